"""What an agent itself grows by is no use of its fragments; beyond its reserve, they do without it.
There is no reserve here, unless a test makes one."""

import asyncio
import mmap
import re
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from agent.fragment_making import InBlocks, MadeFragment, dense_model, write_fragment
from agent.in_process import MIB, Thread, make_fragments
from agent.own_process import in_own_process
from shoal_agent.runtime.failures import OverBudget
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import LIBRARY_RESERVE_BYTES, MemoryMeter, tune_allocator

GROWTH_BYTES = 6 * MIB
BUDGET = 14 * MIB
ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
X = {"x": np.ones((1, 512), np.float32)}


@pytest.fixture
def made(tmp_path: Path) -> MadeFragment:
    return write_fragment(tmp_path, dense_model([512] * 9), 12 * MIB, InBlocks(8))


async def _measure(cache: Path, made: MadeFragment) -> tuple[list[int], int, str]:
    """What the ledger says that the agent has grown by: before it grew, when it had, and when that
    was given back; the highest peak since, of runs that were stopped too; and why a load of the
    whole fragment was refused then: its 8 MiB of weights do not fit beside what has grown."""
    tune_allocator(BUDGET)
    grown = []
    with Thread(1) as thread:
        fragments = make_fragments(cache, thread, BUDGET)
        meter = fragments._runtime._meter

        async def begin_anew() -> None:
            await fragments.load(made.digest, made.least_bytes, [])
            await fragments.unload(made.digest)
            grown.append(int(fragments.ledger.grown))
            await fragments.load(made.digest, min(made.resident_bytes, fragments.ledger.free), [])
            await fragments.run(made.digest, X)
            await fragments.unload(made.digest)

        await begin_anew()
        with mmap.mmap(-1, GROWTH_BYTES, flags=ANONYMOUS) as growth:
            growth.write(bytes(GROWTH_BYTES))
            await begin_anew()
            peak = meter.peak_bytes()
            with pytest.raises(OverBudget) as refused:
                await fragments.load(made.digest, made.resident_bytes, [])
        await fragments.load(made.digest, made.resident_bytes, [])
        await fragments.unload(made.digest)
        await begin_anew()
        await fragments.close()
    return grown, peak, str(refused.value)


def measure(cache: Path, made: MadeFragment) -> tuple[list[int], int, str]:
    return asyncio.run(_measure(cache, made))


def test_fragments_do_without_what_the_agent_has_grown_by_beyond_its_reserve(
    tmp_path: Path, made: MadeFragment
) -> None:
    grown, peak, refused = in_own_process(measure, tmp_path, made)
    assert max(grown[0], grown[2]) < 2 * MIB, "what a session leaves"
    assert abs(grown[1] - grown[0] - GROWTH_BYTES) < 2 * MIB
    assert peak <= BUDGET
    assert re.fullmatch(
        r"would need 12 MiB, have [678]\S* MiB of a budget of 14 MiB, "
        r"and the agent itself has grown by [5678]\S* MiB",
        refused,
    )


def _growing_model() -> onnx.ModelProto:
    """As many bytes as an input says."""
    text = "agraph (float[1, 512] x, int64[1] n) => (float y) {\n"
    text += "  x1 = ReduceMax <keepdims = 0> (x)\n  many = Expand (x1, n)\n"
    text += "  y = ReduceMax <keepdims = 0> (many)\n}"
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]>\n{text}')


def _use_beside_growth(folder: Path, digest: str) -> tuple[int, int]:
    """What is in use once the process has grown, within its reserve, and once a fragment that
    takes next to nothing has been opened."""
    with Thread(1) as thread:
        meter = MemoryMeter()
        runtime = thread.submit(Runtime, meter, threads=1, limit_bytes=BUDGET).result()
        thread.submit(meter.settle, LIBRARY_RESERVE_BYTES, GROWTH_BYTES).result()
        with mmap.mmap(-1, GROWTH_BYTES - MIB, flags=ANONYMOUS) as growth:
            growth.write(bytes(len(growth)))
            grown = meter.used_bytes()
            thread.submit(runtime.open, digest, folder).result()
            used = meter.used_bytes()
            thread.submit(runtime.close, digest).result()
    return grown, used


def test_what_the_agent_has_grown_by_before_its_first_fragment_is_no_use_of_that(
    tmp_path: Path,
) -> None:
    made = write_fragment(tmp_path, _growing_model(), MIB)
    grown, used = in_own_process(_use_beside_growth, made.folder, made.digest)
    assert grown >= GROWTH_BYTES - MIB
    assert used <= MIB


async def _use_after_a_trial(cache: Path, made: MadeFragment) -> int:
    """Of a fragment whose weights are out of memory, where the process had grown before."""
    with Thread(1) as thread:
        fragments = make_fragments(cache, thread, BUDGET)
        meter = fragments._runtime._meter
        thread.submit(meter.settle, LIBRARY_RESERVE_BYTES, GROWTH_BYTES).result()
        with mmap.mmap(-1, GROWTH_BYTES - MIB, flags=ANONYMOUS) as growth:
            growth.write(bytes(len(growth)))
            await fragments.load(made.digest, BUDGET - MIB, [])
            assert fragments.opening.trial_of(made.digest) is not None
            thread.submit(fragments._runtime.drop_weights, made.digest).result()
            used = meter.used_bytes()
        await fragments.close()
    return used


def use_after_a_trial(cache: Path, made: MadeFragment) -> int:
    return asyncio.run(_use_after_a_trial(cache, made))


def test_what_the_agent_has_grown_by_before_a_trial_is_no_use_of_the_fragment(
    tmp_path: Path,
) -> None:
    made = write_fragment(tmp_path, dense_model([512] * 9), 12 * MIB, largest={"x": X["x"].shape})
    assert in_own_process(use_after_a_trial, tmp_path, made) <= MIB


def _growth_after_failure(cache: Path, digest: str, input_file: Path) -> int:
    """What the ledger says that the agent has grown by when it has given up a fragment of which
    nothing is planned, whose input waits on the disk."""

    async def fail() -> int:
        tune_allocator(BUDGET)
        with Thread(1) as thread, input_file.open("rb") as file:
            fragments = make_fragments(cache, thread, BUDGET)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                x = np.frombuffer(mapped, np.float32).reshape(-1, 512)
                await fragments.load(digest, MIB, [])
                with pytest.raises(OverBudget):
                    await fragments.run(digest, {"x": x, "n": np.array([BUDGET])})
                del x
                grown = int(fragments.ledger.grown)
            await fragments.close()
        return grown

    return asyncio.run(fail())


def test_an_input_of_a_run_that_failed_is_nothing_that_the_agent_has_grown_by(
    tmp_path: Path,
) -> None:
    model = _growing_model()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    made = write_fragment(tmp_path, model, MIB)
    input_file = tmp_path / "x"
    input_file.write_bytes(bytes(GROWTH_BYTES))
    grown = in_own_process(_growth_after_failure, tmp_path, made.digest, input_file)
    assert grown < GROWTH_BYTES // 2, "what a session leaves"
