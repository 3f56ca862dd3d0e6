"""What an agent's memory does that runs fragments in blocks, as the kernel measures it."""

import functools
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from agent.conftest import MARK_ERROR_BYTES, Joined
from agent.fragment_making import InBlocks, MadeFragment, dense_model, write_fragment
from agent.scripted_coordinator import ConnectedDevice, ScriptedCoordinator
from agent.test_running import edge, task
from chaining import Tensors, run_chained
from chaining import run_whole as run_whole_model
from made_models import Made, Values, vocabulary
from real_models import MODELS, find
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_protocol.partition import Fragment
from shoal_protocol.v1 import session_pb2 as pb

Join = Callable[..., Awaitable[Joined]]
MIB = 1 << 20
WIDTH = 1024
WHOLE = 70 * MIB


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all of these tests: none of them changes a file of it."""
    return tmp_path_factory.mktemp("store")


@functools.cache
def made_of(store: Path, whole: int = WHOLE, working: int = MIB) -> MadeFragment:
    """Sixteen blocks with 4 MiB of weights each."""
    blocks = InBlocks(16, working_bytes=working)
    return write_fragment(store, dense_model([WIDTH] * 17), whole, blocks)


async def run(
    device: ConnectedDevice, made: MadeFragment, item: int, rows: int = 1
) -> tuple[pb.Reply, np.ndarray]:
    """One item, and its output."""
    x = np.random.default_rng(0).standard_normal((rows, WIDTH), dtype=np.float32)
    await device.give(edge(-1, 0, item), {"x": x})
    execute = pb.Execute(
        task=task(0, item),
        digest=made.digest,
        inputs=[pb.InputSource(producer=-1, tensors=["x"])],
        results=["y"],
    )
    reply = await device.ask("execute", execute)
    assert reply.HasField("executed"), reply
    return reply, (await device.result()).tensors["y"]


def assert_close(output: np.ndarray, whole: np.ndarray) -> None:
    """One may be of the prepared form, which adds in another order."""
    np.testing.assert_allclose(output, whole, rtol=1e-4, atol=1e-6)


_WHOLE: dict[int, np.ndarray] = {}


async def expected(coordinator: ScriptedCoordinator, join: Join, rows: int = 1) -> np.ndarray:
    """What the fragment computes as a whole; computed once."""
    if rows not in _WHOLE:
        _WHOLE[rows] = await run_whole(coordinator, join, rows)
    return _WHOLE[rows]


async def run_whole(coordinator: ScriptedCoordinator, join: Join, rows: int) -> np.ndarray:
    """What an agent computes that has room for the whole fragment."""
    made = made_of(coordinator.store)
    joined = await join("pi-5", budget="100Mi")
    idle = joined.agent.without_libraries()
    await joined.device.load(made.digest, WHOLE)
    _, output = await run(joined.device, made, 0, rows)
    assert joined.agent.without_libraries() - idle > 60 * MIB
    return output


async def test_an_agent_says_what_tasks_took_within_its_grant(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    # Its items take far less than what its blocks are said to work with. All of a budget for an
    # untried fragment that takes all of that is not left to it: it may take more.
    made, granted = made_of(coordinator.store, working=16 * MIB), 48 * MIB
    joined = await join("pi-4", budget=str(granted))
    await joined.device.load(made.digest, granted)
    said: list[dict[int, float]] = []
    for item in range(6):
        reply, _ = await run(joined.device, made, item)
        said.append({each.granted_bytes: each.seconds for each in reply.executed.within})
    assert said[0] == {}, "one run may have been disturbed"
    ((grant, seconds),) = said[-1].items()
    assert (grant, seconds > 0.0) == (granted, True)


@pytest.mark.parametrize(
    ("granted", "threads"),
    [
        pytest.param(10 * MIB, 1, marks=pytest.mark.minutes),
        (10 * MIB, 8),
        pytest.param(24 * MIB, 1, marks=pytest.mark.minutes),
        pytest.param(40 * MIB, 1, marks=pytest.mark.minutes),
    ],
)
async def test_a_fragment_runs_within_whatever_it_is_granted(
    coordinator: ScriptedCoordinator, join: Join, granted: int, threads: int
) -> None:
    whole = await expected(coordinator, join)
    made = made_of(coordinator.store)
    joined = await join("pi-4", "--threads", str(threads), budget=str(granted))
    idle = joined.agent.status("VmRSS")
    reply = await joined.device.load(made.digest, granted)
    assert reply.loaded.resident_bytes == granted, reply
    for item in range(4):
        reply, output = await run(joined.device, made, item)
        assert reply.WhichOneof("outcome") == "executed", reply
        assert reply.executed.peak_bytes <= granted
        assert_close(output, whole)
    telemetry = await joined.device.telemetry.get()
    assert telemetry.peak_bytes <= granted
    await joined.device.unload(made.digest)
    assert joined.agent.status("VmRSS") - idle < 3 * MIB
    assert joined.agent.mapped() == set()


async def test_less_than_the_least_is_refused_with_need_and_have(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    made = made_of(coordinator.store)
    joined = await join()
    reply = await joined.device.load(made.digest, made.least_bytes - 1)
    failure = reply.failure
    assert failure.code == pb.BUDGET
    assert (failure.need_bytes, failure.have_bytes) == (made.least_bytes, made.least_bytes - 1)
    assert "would need 9 MiB even in blocks, have 8.999999 MiB" in failure.message
    assert (await joined.device.load(made.digest, made.least_bytes)).HasField("loaded")


async def test_a_whole_fragment_measured_over_the_budget_goes_on_in_blocks(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    whole = await expected(coordinator, join)
    made = made_of(coordinator.store, whole=20 * MIB)
    joined = await join(budget="24Mi")
    await joined.device.load(made.digest, 20 * MIB)
    for item in range(4):
        reply, output = await run(joined.device, made, item)
        assert_close(output, whole)
        # The first run was stopped, and ran again: nobody saw the mistake.
        assert reply.WhichOneof("outcome") == "executed", reply
        assert reply.executed.peak_bytes <= 24 * MIB
    assert joined.device.evicted.empty()
    # How much less depends on where the first run was when it was stopped.
    granted = re.findall(r"runs within ([\d.]+) MiB now", joined.agent.errors.read_text())
    assert granted
    assert all(made.least_bytes / MIB <= float(each) + 0.1 < 20 for each in granted), granted


async def test_a_fragment_in_blocks_measured_over_the_budget_goes_on_with_less(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    # Its activations take 8 MiB, not 1.
    whole = await expected(coordinator, join, rows=512)
    made = made_of(coordinator.store)
    joined = await join(budget="48Mi")
    await joined.device.load(made.digest, 46 * MIB)
    peaks = []
    for item in range(3):
        reply, output = await run(joined.device, made, item, rows=512)
        assert_close(output, whole)
        peaks.append(reply.executed.peak_bytes)
    assert max(peaks) <= 48 * MIB, peaks
    said = joined.agent.errors.read_text()
    assert "runs within" in said, f"it was granted too much: {peaks}, {said}"
    assert joined.device.evicted.empty()


async def test_free_memory_is_lent_to_a_fragment_until_another_comes(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    whole = await expected(coordinator, join)
    first = made_of(coordinator.store)
    second = write_fragment(coordinator.store, dense_model([64, 512, 64]), 40 * MIB)
    device = (await join(budget="60Mi")).device
    await device.load(first.digest, 10 * MIB)
    peaks: list[int] = []

    async def peak_of_runs() -> int:
        for item in range(2):
            reply, output = await run(device, first, len(peaks) * 2 + item)
            assert_close(output, whole)
        peaks.append(reply.executed.peak_bytes)
        return peaks[-1]

    assert 16 * MIB < await peak_of_runs() <= 36 * MIB
    assert (await device.load(second.digest, 40 * MIB)).HasField("loaded")
    assert await peak_of_runs() <= 20 * MIB
    await device.unload(second.digest)
    assert 16 * MIB < await peak_of_runs() <= 36 * MIB
    assert device.evicted.empty()


@functools.cache
def whole_of(store: Path, name: str) -> tuple[Fragment, Tensors, Tensors]:
    """A model as one fragment, its inputs, and its results as a whole."""
    item = MODELS[name].inputs(0)
    profile = profile_model(find(name), MODELS[name].shapes())
    document = cut_model(find(name), profile, (), store)
    return document.fragments[0], item, run_chained(store, document, item)


async def check_least(coordinator: ScriptedCoordinator, join: Join, path: Path, x: Values) -> None:
    """Run a model as one fragment, in blocks, in the smallest budget that it needs."""
    document = cut_model(path, profile_model(path, {"x": x.shape}), (), coordinator.store)
    (fragment,) = document.fragments
    assert fragment.least_bytes < fragment.resident_bytes
    budget = fragment.least_bytes + MARK_ERROR_BYTES
    device = (await join(budget=str(budget))).device
    assert (await device.load(fragment.digest, fragment.least_bytes)).HasField("loaded")
    whole = run_whole_model(path, {"x": x})["y"]
    execute = pb.Execute(
        digest=fragment.digest,
        inputs=[pb.InputSource(producer=-1, tensors=["x"])],
        results=["y"],
    )
    for number in range(3):
        await device.give(edge(-1, 0, number), {"x": x})
        execute.task.CopyFrom(task(0, number))
        reply = await device.ask("execute", execute)
        assert reply.WhichOneof("outcome") == "executed", reply
        assert reply.executed.peak_bytes <= budget, reply
        assert_close((await device.result()).tensors["y"], whole)


async def test_an_output_that_is_made_in_parts_is_joined_within_what_is_granted(
    coordinator: ScriptedCoordinator, join: Join, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(vocabulary(), path)
    x = np.random.default_rng(0).standard_normal((1, 64, 256), np.float32)
    await check_least(coordinator, join, path, x)


async def test_quantised_weights_are_not_copied_for_the_layers_that_read_them(
    coordinator: ScriptedCoordinator, join: Join, tmp_path: Path
) -> None:
    made = quantised()
    path = made.save(tmp_path)
    await check_least(coordinator, join, path, made.inputs()["x"])


LAYERS = 16


def quantised() -> Made:
    """Sixteen layers of 1 MiB of weights, which are 4 MiB each as floats."""
    chance = [np.random.default_rng(layer) for layer in range(LAYERS)]
    return Made(
        text="agraph (float[1, 1024] x) => (float[1, 1024] y) {\n"
        + "\n".join(
            f"v{layer} = DequantizeLinear <axis = 1> (W{layer}, s{layer}, z{layer})\n"
            f"{'y' if layer == LAYERS - 1 else f'h{layer}'} = MatMul ("
            f"{f'h{layer - 1}' if layer else 'x'}, v{layer})"
            for layer in range(LAYERS)
        )
        + "\n}",
        weights={
            **{f"s{layer}": np.full(1024, 1 / 2400, np.float32) for layer in range(LAYERS)},
            **{f"z{layer}": np.zeros(1024, np.int8) for layer in range(LAYERS)},
            **{
                f"W{layer}": chance[layer].integers(-127, 127, (1024, 1024), np.int8)
                for layer in range(LAYERS)
            },
        },
        shapes={"x": (1, 1024)},
    )


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ppocr_rec", 0),
        ("minilm_l6", 0),
        *(
            pytest.param(name, more, marks=[pytest.mark.slow, pytest.mark.minutes])
            for name, more in (
                *(("ppocr_rec", 8 * MIB), ("minilm_l6", 8 * MIB)),
                *(("resnet18", 0), ("resnet18", 8 * MIB)),
                *(("vit_base_16", 0), ("vit_base_16", 8 * MIB)),
            )
        ),
    ],
)
async def test_a_real_model_runs_in_blocks_within_what_it_is_granted(
    coordinator: ScriptedCoordinator, join: Join, name: str, more: int
) -> None:
    fragment, item, expected = whole_of(coordinator.store, name)
    granted = min(fragment.least_bytes + more, fragment.resident_bytes - 1)
    device = (await join(budget=str(granted))).device
    assert (await device.load(fragment.digest, granted)).HasField("loaded")
    execute = pb.Execute(
        digest=fragment.digest,
        inputs=[pb.InputSource(producer=-1, tensors=list(item))],
        results=list(expected),
    )
    for number in range(3):
        await device.give(edge(-1, 0, number), item)
        execute.task.CopyFrom(task(0, number))
        reply = await device.ask("execute", execute)
        assert reply.WhichOneof("outcome") == "executed", reply
        assert reply.executed.peak_bytes <= granted, reply
        output = (await device.result()).tensors
        for each, value in expected.items():
            # Run as a whole with other options, among them weights that are laid out anew.
            assert np.allclose(output[each], value, rtol=1e-3, atol=1e-4)
