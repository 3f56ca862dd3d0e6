"""Fragments prepared in a child process: the same results, no copies of weights, and whatever ends
a child or damages its files, the fragment runs or is refused with a reason."""

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from agent.conftest import StartAgent
from agent.fragment_making import (
    MadeFragment,
    dense_model,
    table_model,
    tied_model,
    tree_model,
    write_fragment,
)
from agent.model_families import FAMILIES, half_precision, item
from agent.scripted_coordinator import ScriptedCoordinator
from shoal_agent.cache.disk import FragmentCache
from shoal_agent.memory.residency import Ledger
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.preparation import CrashedAtLoad, Preparation
from shoal_agent.runtime.prepared import Prepared, PreparedModel, folder_of
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.runtime.recipes import PREPARED, PREPARED_UNPACKED
from shoal_agent.runtime.results import RunResult
from shoal_protocol.digests import Digest
from shoal_protocol.manifest import Manifest
from shoal_protocol.preparing import WORTH_PREPARING_BYTES
from shoal_protocol.units import Bytes
from shoal_protocol.v1 import session_pb2 as pb

MIB = 1 << 20
AMPLE = Bytes(512 * MIB)
PROBE = Path(__file__).with_name("preparation_probe.py")
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.minutes) for seed in (1, 2, 3)))


@pytest.fixture(scope="module")
def runtime() -> Iterator[Callable[..., RunResult]]:
    """Opens a fragment, runs it on one item, and closes it."""
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(Runtime, MemoryMeter(), threads=1, limit_bytes=AMPLE).result()

        def run(
            made_fragment: MadeFragment, x: np.ndarray, prepared: PreparedModel | None = None
        ) -> RunResult:
            def call() -> RunResult:
                source = Prepared(whole=prepared)
                made.open(made_fragment.digest, made_fragment.folder, None, source)
                try:
                    (name,) = made_fragment.inputs
                    return made.run(made_fragment.digest, {name: x}, Stopper())
                finally:
                    made.close(made_fragment.digest)

            return thread.submit(call).result()

        yield run


class Bench:
    """A cache, a ledger, and what prepares fragments within both."""

    def __init__(self, root: Path, budget: Bytes = AMPLE, cache_bytes: int = 1 << 30) -> None:
        self.cache = FragmentCache(root, cache_bytes)
        self.ledger = Ledger(budget=budget)
        self.preparation = Preparation(
            self.cache, self.ledger.request_move, self.ledger.end_move, worth_bytes=0
        )

    async def prepare(self, fragment: MadeFragment, granted: int = 4 * MIB) -> PreparedModel | None:
        prepared = await self.preparation.prepare(fragment.digest, fragment.folder, granted)
        assert self.ledger.moving == 0, "what was borrowed was not given back"
        return prepared.whole


@pytest.fixture
def dense(tmp_path: Path) -> MadeFragment:
    return write_fragment(tmp_path, dense_model([256, 512, 256]), 8 * MIB)


@pytest.fixture(scope="module")
def once_prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which `dense` is prepared, as a process before has left it."""
    folder = tmp_path_factory.mktemp("prepared")
    made = write_fragment(folder, dense_model([256, 512, 256]), 8 * MIB)
    assert asyncio.run(Bench(folder).prepare(made)) is not None
    return folder


@pytest.fixture
def prepared_dense(dense: MadeFragment, once_prepared: Path, tmp_path: Path) -> MadeFragment:
    """The same in this test's own cache."""
    shutil.copytree(once_prepared, tmp_path, dirs_exist_ok=True)
    return dense


def leftovers(fragment: MadeFragment) -> list[str]:
    return [path.name for path in fragment.folder.rglob("*.part")]


def mapped_bytes(made: MadeFragment, under: str) -> tuple[int, int] | None:
    """Bytes in memory, and of those this process's own, of mapped files whose path in the
    fragment's folder begins so; None: there are none."""
    smaps = Path("/proc/self/smaps").read_text()
    found = "".join(re.findall(rf" {made.folder}/{under}.*\n((?:[A-Z].*\n)*)", smaps))
    resident, own = (
        sum(int(kib) << 10 for kib in re.findall(rf"^{name}: +(\d+)", found, re.MULTILINE))
        for name in ("Rss", "Anonymous")
    )
    return (resident, own) if found else None


# ---- what it is for ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_prepared_fragment_computes_what_it_computes_unprepared(
    family: str, tmp_path: Path, runtime: Callable[..., RunResult]
) -> None:
    model = FAMILIES[family]()
    fragment = write_fragment(tmp_path, model)
    x = item(model)
    plain = runtime(fragment, x)
    prepared = await Bench(tmp_path).prepare(fragment)
    assert prepared is not None
    assert prepared.recipe_for_whole(fragment.resident_bytes // 2, None) is PREPARED
    fast = runtime(fragment, x, prepared)
    (expected,), (result,) = plain.outputs.values(), fast.outputs.values()
    precision = 2e-3 if expected.dtype == np.float16 else 2e-5
    scale = float(np.abs(expected.astype(np.float64)).max())
    np.testing.assert_allclose(result, expected, rtol=0, atol=precision * max(1.0, scale))


def test_packed_weights_are_mapped_and_not_copied(tmp_path: Path) -> None:
    """In a process of its own, whose anonymous memory nothing else changes."""
    fragment = write_fragment(tmp_path, dense_model([1024, 2048, 1024, 2048, 1024]), 64 * MIB)
    weights = (fragment.folder / "weights.bin").stat().st_size
    assert weights == 32 * MIB
    asyncio.run(Bench(tmp_path).prepare(fragment, 64 * MIB))
    probe = subprocess.run(
        [sys.executable, PROBE, "measure", tmp_path, fragment.digest],
        check=True,
        capture_output=True,
        text=True,
    )
    measured = json.loads(probe.stdout)
    assert measured["anonymous"] < weights // 8
    assert measured["mapped"] >= weights // 2, "the packed weights were not used"


async def test_what_was_prepared_is_used_by_the_next_process(
    tmp_path: Path, prepared_dense: MadeFragment
) -> None:
    before = {path: path.stat().st_ino for path in prepared_dense.folder.rglob("*")}
    # Without memory for a child, what is there must do.
    again = Bench(tmp_path, budget=Bytes(MIB))
    assert await again.prepare(prepared_dense) is not None
    assert {path: path.stat().st_ino for path in prepared_dense.folder.rglob("*")} == before


async def test_a_model_whose_packing_does_not_fit_is_opened_without(
    tmp_path: Path, prepared_dense: MadeFragment
) -> None:
    prepared = await Bench(tmp_path).prepare(prepared_dense)
    assert prepared is not None
    size = (prepared_dense.folder / "weights.bin").stat().st_size
    opening = prepared.packed.opening_bytes
    assert prepared.recipe_for_whole(size, opening) is PREPARED
    assert prepared.recipe_for_whole(size, opening - 1) is PREPARED_UNPACKED


async def test_of_a_prepared_table_little_more_than_the_rows_that_are_read_is_in_memory(
    tmp_path: Path,
) -> None:
    made = write_fragment(tmp_path, table_model(), 16 * MIB)
    prepared = await Bench(tmp_path).preparation.prepare(made.digest, made.folder, 16 * MIB)
    assert prepared.whole is not None
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=AMPLE)
    runtime.open("f", made.folder, 16 * MIB, prepared)
    words = np.arange(0, 8192, 1024)
    runtime.run("f", {"x": words}, Stopper())
    mapped = mapped_bytes(made, "prepared/")
    assert mapped is not None
    # With each row the kernel maps 64 KiB; the matrix beside the table has 256.
    assert mapped[0] <= (len(words) * 64 + 256) << 10
    runtime.close("f")


async def test_a_table_that_is_also_multiplied_is_saved_once_more(tmp_path: Path) -> None:
    """Language models begin and end with one: as rows, and transposed and packed."""
    fragment = write_fragment(tmp_path, tied_model(), 16 * MIB)
    prepared = await Bench(tmp_path).prepare(fragment, AMPLE)
    assert prepared is not None
    assert prepared.weights.stat().st_size >= 3 * 8 * MIB


async def test_rows_of_a_prepared_table_take_no_more_memory_after_a_restart(tmp_path: Path) -> None:
    made = write_fragment(tmp_path, table_model(rows=49152), 64 * MIB)
    await Bench(tmp_path).preparation.prepare(made.digest, made.folder, 64 * MIB)
    for path in made.folder.rglob("weights.bin"):
        with path.open("rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    # Another process verifies the files: it reads them all, and they are cached as it reads.
    prepared = await Bench(tmp_path).preparation.prepare(made.digest, made.folder, 64 * MIB)
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=AMPLE)
    runtime.open("f", made.folder, 64 * MIB, prepared)
    words = np.arange(1024, 49152, 4096)
    runtime.run("f", {"x": words}, Stopper())
    mapped = mapped_bytes(made, "prepared/")
    assert mapped is not None
    assert mapped[0] <= (len(words) * 64 + 256) << 10
    runtime.close("f")


# ---- what a device lacks -------------------------------------------------------------------------


async def test_without_memory_for_a_child_the_fragment_is_opened_as_it_is(
    tmp_path: Path, dense: MadeFragment
) -> None:
    small = Bench(tmp_path, budget=Bytes(16 * MIB))
    assert await small.prepare(dense) is None
    assert leftovers(dense) == []


async def test_a_child_stays_within_what_it_was_given(tmp_path: Path) -> None:
    """Half precision becomes four times as much: converted, and packed beside that."""
    fragment = write_fragment(tmp_path, half_precision(1024, layers=8), 40 * MIB)
    assert await Bench(tmp_path, budget=Bytes(60 * MIB)).prepare(fragment) is None
    assert leftovers(fragment) == []
    assert await Bench(tmp_path).prepare(fragment) is not None


async def test_without_disk_the_fragment_is_tried_and_not_prepared(
    tmp_path: Path, dense: MadeFragment
) -> None:
    size = sum(path.stat().st_size for path in dense.folder.iterdir())
    bench = Bench(tmp_path, cache_bytes=size + 1)
    assert await bench.prepare(dense) is None
    assert not (dense.folder / "prepared").exists()
    crashing = write_fragment(tmp_path, tree_model(20_000), 8 * MIB)
    with pytest.raises(CrashedAtLoad, match="SIGSEGV"):
        await bench.prepare(crashing)


# ---- a model that ends ONNX Runtime --------------------------------------------------------------


async def test_a_model_that_ends_the_runtime_is_refused_and_not_tried_again(tmp_path: Path) -> None:
    fragment = write_fragment(tmp_path, tree_model(20_000), 8 * MIB)
    bench = Bench(tmp_path)
    reason = "ONNX Runtime ended with SIGSEGV when it loaded this fragment, in a process of its own"
    with pytest.raises(CrashedAtLoad, match=reason):
        await bench.prepare(fragment)
    assert leftovers(fragment) == []
    shutil.rmtree(fragment.folder)  # whoever tried again would fail in another way
    with pytest.raises(CrashedAtLoad, match=reason):
        await bench.prepare(fragment)


async def test_an_agent_survives_a_model_that_ends_the_runtime(
    coordinator: ScriptedCoordinator, start_agent: StartAgent
) -> None:
    hostile = write_fragment(coordinator.store, tree_model(20_000), 8 * MIB)
    sound = write_fragment(coordinator.store, tree_model(20), 8 * MIB)
    agent = await start_agent(budget="128Mi")
    device = await coordinator.device()
    for _ in range(2):
        refused = await device.load(hostile.digest, 8 * MIB)
        assert refused.failure.code == pb.RUNTIME
        assert "SIGSEGV" in refused.failure.message
    assert (await device.load(sound.digest, 8 * MIB)).HasField("loaded")
    assert agent.process.returncode is None


# ---- processes killed, files damaged -------------------------------------------------------------


def children() -> set[int]:
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended since
            found |= set(map(int, path.read_text().split()))
    return found


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_child_that_is_killed_leaves_nothing_half(
    seed: int, tmp_path: Path, dense: MadeFragment, runtime: Callable[..., RunResult]
) -> None:
    before = children()
    bench = Bench(tmp_path)
    preparing = asyncio.create_task(bench.prepare(dense))
    while not (started := children() - before) and not preparing.done():
        await asyncio.sleep(0.002)
    await asyncio.sleep(random.Random(seed).uniform(0, 0.5))  # noqa: S311 - no secret
    for child in started & children():
        os.kill(child, signal.SIGKILL)
    await preparing
    assert leftovers(dense) == []
    prepared = await Bench(tmp_path).prepare(dense)
    assert prepared is not None
    runtime(dense, item(dense_model([256, 512, 256])), prepared)


@pytest.mark.parametrize("seed", SEEDS)
async def test_an_agent_that_is_killed_takes_its_child_along(
    seed: int, tmp_path: Path, dense: MadeFragment
) -> None:
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, PROBE, "prepare", tmp_path, dense.digest),
        stdout=asyncio.subprocess.PIPE,
    )
    assert agent.stdout is not None
    child = int(await agent.stdout.readline())
    await asyncio.sleep(random.Random(seed).uniform(0, 0.5))  # noqa: S311 - no secret
    agent.kill()
    await agent.wait()
    while Path(f"/proc/{child}").exists():
        await asyncio.sleep(0.01)
    bench = Bench(tmp_path)
    assert leftovers(dense) == [], "the next process does not tidy up"
    assert await bench.prepare(dense) is not None


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("name", ["prepared.json", "0/model.onnx", "0/weights.bin"])
@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink])
async def test_a_damaged_form_is_made_anew(
    name: str, damage: Callable[[Path], None], tmp_path: Path, prepared_dense: MadeFragment
) -> None:
    folder = folder_of(prepared_dense.folder, "whole")
    right = {path: path.read_bytes() for path in (folder / "0").iterdir()}
    damage(folder / name)
    assert await Bench(tmp_path).prepare(prepared_dense) is not None
    assert {path: path.read_bytes() for path in right} == right
    assert await Bench(tmp_path, budget=Bytes(MIB)).prepare(prepared_dense) is not None


async def test_a_form_that_changes_while_the_agent_runs_is_noticed(
    tmp_path: Path, dense: MadeFragment
) -> None:
    bench = Bench(tmp_path)
    await bench.prepare(dense)
    path = folder_of(dense.folder, "whole") / "0/weights.bin"
    right = path.read_bytes()
    _flip(path)
    assert await bench.prepare(dense) is not None
    assert path.read_bytes() == right


# ---- on disk -------------------------------------------------------------------------------------


async def test_what_was_prepared_counts_in_the_cache_and_goes_with_its_fragment(
    tmp_path: Path, dense: MadeFragment
) -> None:
    bench = Bench(tmp_path)
    plain = bench.cache.total_bytes
    await bench.prepare(dense)
    size = sum(path.stat().st_size for path in dense.folder.rglob("*") if path.is_file())
    assert bench.cache.total_bytes == size > plain
    assert FragmentCache(tmp_path, 1 << 30).total_bytes == size
    bench.cache.drop(dense.digest)
    assert bench.cache.total_bytes == 0
    assert not dense.folder.exists()


async def test_a_fetch_takes_the_room_of_what_was_prepared_of_fragments_in_use(
    tmp_path: Path, dense: MadeFragment
) -> None:
    bench = Bench(tmp_path)
    plain = bench.cache.total_bytes
    await bench.prepare(dense)
    bench.cache.limit_bytes = bench.cache.total_bytes
    bench.cache.pin(dense.digest)
    rest = bench.cache.limit_bytes - plain
    other = Manifest(digest=Digest("sha256:" + 64 * "a"), files={}, manifest_bytes=rest)
    bench.cache.make_room(other)
    assert bench.cache.take_dropped() == []
    assert bench.cache.total_bytes == plain
    assert not (dense.folder / "prepared").exists()


async def test_forms_of_other_runtimes_go_when_one_is_made(
    tmp_path: Path, dense: MadeFragment
) -> None:
    foreign = dense.folder / "prepared" / "made-elsewhere"
    foreign.mkdir(parents=True)
    (foreign / "prepared.json").write_text("{}")
    assert await Bench(tmp_path).prepare(dense) is not None
    assert not foreign.exists()


async def test_what_is_small_is_opened_at_once_and_a_large_graph_is_tried(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.preparation = Preparation(
        bench.cache,
        bench.ledger.request_move,
        bench.ledger.end_move,
        worth_bytes=WORTH_PREPARING_BYTES,
    )
    small = write_fragment(tmp_path, dense_model([256] * 4), 8 * MIB)
    assert await bench.prepare(small) is None
    assert not (small.folder / "prepared").exists()
    large = write_fragment(tmp_path, dense_model([1024] * 3), 40 * MIB)
    assert await bench.prepare(large) is not None
    with pytest.raises(CrashedAtLoad, match="SIGSEGV"):
        await bench.prepare(write_fragment(tmp_path, tree_model(20_000), 8 * MIB))


async def test_a_model_of_activations_mostly_is_opened_prepared_only_where_there_is_room_for_more(
    tmp_path: Path, prepared_dense: MadeFragment
) -> None:
    prepared = await Bench(tmp_path).prepare(prepared_dense)
    assert prepared is not None
    size = (prepared_dense.folder / "weights.bin").stat().st_size
    granted = 5 * size
    assert prepared.recipe_for_whole(size, granted, 0) is None
    assert prepared.recipe_for_whole(size, granted, granted) is PREPARED
    assert prepared.recipe_for_whole(size, 2 * size, 0) is PREPARED, "its weights are most of it"
    assert prepared.recipe_for_whole(size, 2 * size, -256) is PREPARED, "the limit is rounded down"
