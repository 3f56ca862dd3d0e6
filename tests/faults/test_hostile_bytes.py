"""What strangers and damaged bytes may do to real processes: fail their own job, and nothing else.

Coordinators, agents, `shoal run` and the enrolment server run here as users start them.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import grpc
import numpy as np
import onnx
import pytest
import pytest_asyncio
from pool import Pool, cut, read_results, running_pool, write_items

from agent.fragment_making import tree_model
from cli.local.workbench import WIDTH, Workbench, save_inputs, save_model
from parity_with_whole import TOLERANCE, largest_difference, whole
from pki.test_enrolment import csr, seen_as
from shoal_protocol.digests import digest_of, hexadecimal
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.pki.authority import is_issued_by
from shoal_protocol.pki.enrolment import BURST
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.enrolment_pb2 import EnrolRequest
from shoal_protocol.v1.enrolment_pb2_grpc import EnrolmentStub

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

FILES = 6
STACKED = 60


@pytest_asyncio.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    devices = [{"name": name, "memory": "48Mi"} for name in ("one", "two")]
    async with running_pool(tmp_path / "pool", devices, cgroups=False) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unharmed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """One for all tests that end none of its processes."""
    devices = [{"name": name, "memory": "48Mi"} for name in ("one", "two")]
    async with running_pool(tmp_path_factory.mktemp("pool"), devices, cgroups=False) as running:
        yield running


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(tmp_path / "small.onnx")
    return tmp_path / "small.onnx"


def item(seed: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).standard_normal((2, WIDTH)).astype(np.float32)}


def sound_job(pool: Pool, model: Path, folder: Path) -> tuple[PartitionDocument, Path]:
    """Two fragments, and files of many stacked items each."""
    document = cut(model, pool.store, 2, {"x": (2, WIDTH)})
    files = [
        {"x": np.stack([item(number * STACKED + row)["x"] for row in range(STACKED)])}
        for number in range(FILES)
    ]
    return document, write_items(folder, files)


def check_results(model: Path, outputs: Path) -> None:
    """All rows of all files are what the whole model gives for them."""
    right = whole(model, [item(seed) for seed in range(FILES * STACKED)])
    for number in range(FILES):
        with np.load(outputs / f"{number:05}.npz") as stored:
            assert stored.files == ["y"]
            rows = stored["y"]
        assert len(rows) == STACKED
        for row, expected in zip(rows, right[number * STACKED :], strict=False):
            assert largest_difference({"y": row}, expected) <= TOLERANCE


# ---- a model that crashes ONNX Runtime -----------------------------------------------------------


def put_deep_tree(store: Path, folder: Path) -> PartitionDocument:
    """A fragment that the compiler would refuse: its own of a small tree, with a deep one in it."""
    onnx.save(tree_model(10), folder / "tree.onnx")
    document = cut(folder / "tree.onnx", store, 1)
    (fragment,) = document.fragments
    shallow = store / "fragments" / hexadecimal(fragment.digest)
    content = tree_model(20_000).SerializeToString()
    manifest = json.loads((shallow / "fragment.json").read_bytes())
    entry = {"sha256": hexadecimal(digest_of(content)), "bytes": len(content)}
    manifest["files"] = {"model.onnx": entry}
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    deep = store / "fragments" / hexadecimal(digest_of(text))
    deep.mkdir()
    (deep / "model.onnx").write_bytes(content)
    (deep / "fragment.json").write_bytes(text)
    return replace(document, fragments=(replace(fragment, digest=digest_of(text)),))


async def test_a_model_that_crashes_the_runtime_fails_before_a_device_opens_it(
    model: Path, tmp_path: Path
) -> None:
    devices = [{"name": name, "memory": "160Mi"} for name in ("one", "two")]
    async with running_pool(tmp_path / "pool", devices, cgroups=False) as pool:
        document, inputs = sound_job(pool, model, tmp_path / "in")
        hostile = put_deep_tree(pool.store, tmp_path)
        one = write_items(tmp_path / "one", [{"x": np.ones((1, 1), np.float32)}])
        await pool.submit("hostile", hostile, one, tmp_path / "nothing")
        await pool.submit("healthy", document, inputs, tmp_path / "out")
        bad, good = await pool.finish("hostile"), await pool.finish("healthy")
        assert bad.state == pb.JobStatus.FAILED
        assert "ONNX Runtime ended with SIGSEGV when it loaded this fragment" in bad.message
        assert sum(map(pool.restarts, pool.device_names)) == 0
        assert (good.state, good.succeeded) == (pb.JobStatus.COMPLETE, FILES * STACKED), good
    check_results(model, tmp_path / "out")


@pytest.mark.minutes
async def test_a_model_that_crashes_devices_too_small_for_a_trial_fails_alone(
    pool: Pool, model: Path, tmp_path: Path
) -> None:
    document, inputs = sound_job(pool, model, tmp_path / "in")
    hostile = put_deep_tree(pool.store, tmp_path)
    one = write_items(tmp_path / "one", [{"x": np.ones((1, 1), np.float32)}])
    await pool.submit("hostile", hostile, one, tmp_path / "nothing")
    await pool.submit("healthy", document, inputs, tmp_path / "out")
    bad, good = await pool.finish("hostile"), await pool.finish("healthy")
    assert bad.state == pb.JobStatus.FAILED
    assert "fragment 0 of hostile ended agents 4 times in a row" in bad.message
    assert sum(map(pool.restarts, pool.device_names)) >= 4, "the runtime does not crash any more"
    assert (good.state, good.succeeded) == (pb.JobStatus.COMPLETE, FILES * STACKED), good
    check_results(model, tmp_path / "out")


# ---- damaged state -------------------------------------------------------------------------------


def flipped(content: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 8)):
        content[chance.randrange(len(content))] ^= chance.randint(1, 255)


def shortened(content: bytearray, chance: random.Random) -> None:
    del content[chance.randrange(len(content)) :]


def zeroed(content: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(content))
    end = chance.randint(start, len(content))
    content[start:end] = bytes(end - start)


Damage = Callable[[bytearray, random.Random], None]


async def freeze(process: int) -> None:
    """Stop a process, and wait until none of its threads runs: a system call may still end."""
    os.kill(process, signal.SIGSTOP)
    while True:
        states = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/stat")]
        if all(state.rpartition(") ")[2].startswith("T") for state in states):
            return
        await asyncio.sleep(0.001)


async def freeze_in_the_middle(pool: Pool, state: Path) -> list[Path]:
    """Stop the coordinator when a file is complete and another is not; its journal and parts."""
    process = pool.process_id("coordinator")
    async with asyncio.timeout(60):
        while True:
            await freeze(process)
            found = [path for path in state.glob("*") if path.suffix in (".jsonl", ".part")]
            if len(found) > 1 and all(path.stat().st_size for path in found):
                return found
            os.kill(process, signal.SIGCONT)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.minutes) for seed in range(1, 6))]
)
@pytest.mark.parametrize(
    "damage",
    [
        flipped,
        pytest.param(shortened, marks=pytest.mark.minutes),
        pytest.param(zeroed, marks=pytest.mark.minutes),
    ],
)
async def test_results_are_right_after_a_kill_that_damaged_parts_and_journal(
    pool: Pool, model: Path, tmp_path: Path, damage: Damage, seed: int
) -> None:
    chance = random.Random(seed)  # noqa: S311 - where the damage is
    document, inputs = sound_job(pool, model, tmp_path / "in")
    outputs = tmp_path / "out"
    await pool.submit("damaged", document, inputs, outputs)
    for path in await freeze_in_the_middle(pool, outputs / ".shoal" / "damaged"):
        content = bytearray(path.read_bytes())
        damage(content, chance)
        path.write_bytes(content)
    pool.kill("coordinator")
    status = await pool.finish("damaged")
    assert (status.state, status.succeeded) == (pb.JobStatus.COMPLETE, FILES * STACKED), status
    check_results(model, outputs)
    assert pool.restarts("coordinator") == 1, "the damage ended the coordinator that resumed"
    assert "Traceback" not in pool.workspace.log("coordinator").read_text()


# ---- links in the outputs folder -----------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="module")
async def test_results_replace_links_and_do_not_follow_them(
    unharmed: Pool, model: Path, tmp_path: Path
) -> None:
    victim, outputs = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    outputs.mkdir()
    for name in ("00000.npz", "00001.npz", "failures.json", "failures.json.tmp", ".shoal-probe"):
        (outputs / name).symlink_to(victim)
    document = cut(model, unharmed.store, 2, {"x": (2, WIDTH)})
    refused = {"x": np.zeros((2, 5), np.float32)}
    inputs = write_items(tmp_path / "in", [item(0), item(1), refused])
    status = await unharmed.run("links", document, inputs, outputs)
    assert (status.succeeded, status.failed) == (2, 1), status
    for result, right in zip(read_results(outputs), whole(model, [item(0), item(1)]), strict=True):
        assert largest_difference(result, right) <= TOLERANCE
    assert json.loads((outputs / "failures.json").read_bytes())["failed"] == 1
    assert not [path for path in outputs.rglob("*") if path.is_symlink()]
    assert victim.read_text() == "precious"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_job_whose_state_would_be_behind_a_link_says_which(
    unharmed: Pool, model: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "journal.jsonl").write_text("precious")
    document = cut(model, unharmed.store, 2, {"x": (2, WIDTH)})
    inputs = write_items(tmp_path / "in", [item(0)])
    for number, (link, target) in enumerate(
        [
            (".shoal", victim),
            (".shoal/job-1", victim),
            (".shoal/job-2/journal.jsonl", victim / "journal.jsonl"),
        ]
    ):
        planted = tmp_path / f"out-{number}" / link
        planted.parent.mkdir(parents=True)
        planted.symlink_to(target)
        outputs = tmp_path / f"out-{number}"
        status = await unharmed.run(f"job-{number}", document, inputs, outputs)
        assert (status.state, status.reason) == (pb.JobStatus.FAILED, "FolderRefused")
        assert f"{planted} is a link or of the wrong kind; remove it" in status.message
    assert {path.name: path.read_text() for path in victim.iterdir()} == {
        "journal.jsonl": "precious"
    }


# ---- the environment of the user -----------------------------------------------------------------

SECRET = "a-secret-of-the-user"  # noqa: S105 - of this test


def command_line(process: Path) -> str:
    return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def environments(process: Path, of_parent: str) -> dict[str, bytes]:
    """Of all processes below one, by command line. Those that still have their parent's command
    line are left out: between fork and exec a process is a copy of its parent.
    """
    found: dict[str, bytes] = {}
    with contextlib.suppress(OSError):
        lists = [path.read_text() for path in process.glob("task/*/children")]
        for child in (Path("/proc", number) for each in lists for number in each.split()):
            with contextlib.suppress(OSError):
                line = command_line(child)
                found |= environments(child, line)
                content = (child / "environ").read_bytes()
                if content and line not in ("", of_parent):  # without any it has ended
                    found[line] = content
    return found


def test_a_secret_of_the_user_reaches_no_process_that_a_run_starts(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "AWS_SECRET_ACCESS_KEY": SECRET}
    bench = Workbench(folder=tmp_path, environment=environment)
    save_model(bench.model)
    save_inputs(bench.inputs, files=4)
    bench.write_manifest()
    found: dict[str, bytes] = {}
    run = bench.start("run", bench.manifest)
    process = Path("/proc", str(run.pid))
    while run.poll() is None:
        with contextlib.suppress(OSError):
            found |= environments(process, command_line(process))
        time.sleep(0.01)
    _, said = run.communicate()
    assert run.returncode == 0, said
    for program in ("shoal_coordinator", "shoal_agent", "shoal_cli.local.preparation"):
        shown = [content for line, content in found.items() if program in line]
        assert any(b"PATH=" in content for content in shown), list(found)
    assert not [line for line, content in found.items() if SECRET.encode() in content]


# ---- the enrolment port --------------------------------------------------------------------------

DEVICES = 30
SERVER = """
import asyncio, sys
from datetime import UTC, datetime
from pathlib import Path
from pki.operators import Operator
from shoal_protocol.pki.authority import Authority

async def serve(folder, devices):
    operator = Operator(folder)
    operator.pools["default"] = Authority.make("shelf", datetime.now(UTC))
    for number in range(devices):
        operator.grant(f"token-{number}", f"pi-{number}")
    async with operator.serving():
        (folder / "own.pem").write_bytes(operator.own.certificate)
        print(operator.target, flush=True)
        await asyncio.Event().wait()

asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
"""


@pytest.fixture
async def enrolment(tmp_path: Path) -> AsyncIterator[str]:
    """The target of an enrolment server, a process of its own."""
    command = (sys.executable, "-c", SERVER, tmp_path, str(DEVICES))
    process = await asyncio.create_subprocess_exec(
        *command, stdout=PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
        assert process.returncode is None, "the server died"
    finally:
        process.kill()
        await process.wait()


async def test_devices_enrol_while_another_address_floods_the_port(
    enrolment: str, tmp_path: Path
) -> None:
    port = int(enrolment.rpartition(":")[2])
    credentials = grpc.ssl_channel_credentials((tmp_path / "own.pem").read_bytes())
    options = [("grpc.ssl_target_name_override", "localhost")]
    request, codes = csr("pi-0"), Counter[grpc.StatusCode]()

    async def flood() -> None:
        target = f"127.0.0.1:{port}"
        async with grpc.aio.secure_channel(target, credentials, options=options) as channel:
            for number in count():
                guess = EnrolRequest(token=f"guess-{number}", certificate_request=request)
                try:
                    await EnrolmentStub(channel).Enrol(guess, timeout=60)
                except grpc.aio.AioRpcError as error:
                    codes[error.code()] += 1

    async with asyncio.timeout(60), seen_as("127.0.0.2", port) as elsewhere:
        floods = [asyncio.create_task(flood()) for _ in range(16)]
        while codes[grpc.StatusCode.RESOURCE_EXHAUSTED] < BURST:
            await asyncio.sleep(0.05)
        for number in range(DEVICES):
            async with grpc.aio.secure_channel(elsewhere, credentials, options=options) as channel:
                mine = EnrolRequest(
                    token=f"token-{number}", certificate_request=csr(f"pi-{number}")
                )
                response = await EnrolmentStub(channel).Enrol(mine, timeout=60)
            assert is_issued_by(response.certificate_chain, response.authority)
        for task in floods:
            assert task.cancel(), "a flood ended too early"
        await asyncio.gather(*floods, return_exceptions=True)
