"""What an agent itself grows by beyond its reserve, its fragments do without. There is no reserve
here."""

import asyncio
import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from agent.fragment_making import InBlocks, MadeFragment, dense_model, write_fragment
from agent.in_process import MIB, Thread, make_fragments
from agent.own_process import in_own_process
from shoal_agent.runtime.failures import OverBudget
from shoal_agent.runtime.process_memory import tune_allocator

GROWTH_BYTES = 6 * MIB
BUDGET = 14 * MIB
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
        with mmap.mmap(-1, GROWTH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as growth:
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
