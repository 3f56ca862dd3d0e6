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
BUDGET = 24 * MIB
X = {"x": np.ones((1, 512), np.float32)}


@pytest.fixture
def made(tmp_path: Path) -> MadeFragment:
    return write_fragment(tmp_path, dense_model([512] * 9), 16 * MIB, InBlocks(8))


async def _measure(cache: Path, made: MadeFragment) -> tuple[list[int], list[int], str]:
    """What the ledger says that the agent has grown by, and each run's peak: before it grew, when
    it had, and when that was given back; and why a load of the whole budget was refused then."""
    tune_allocator(BUDGET)
    grown, peaks = [], []
    with Thread(1) as thread:
        fragments = make_fragments(cache, thread, BUDGET)

        async def begin_anew() -> None:
            await fragments.load(made.digest, made.resident_bytes, [])
            await fragments.unload(made.digest)
            grown.append(int(fragments.ledger.grown))
            await fragments.load(made.digest, made.resident_bytes, [])
            peaks.append((await fragments.run(made.digest, X)).peak_bytes)
            await fragments.unload(made.digest)

        await begin_anew()
        with mmap.mmap(-1, GROWTH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as growth:
            growth.write(bytes(GROWTH_BYTES))
            await begin_anew()
            with pytest.raises(OverBudget) as refused:
                await fragments.load(made.digest, 20 * MIB, [])
        await fragments.load(made.digest, 20 * MIB, [])
        await fragments.unload(made.digest)
        await begin_anew()
        await fragments.close()
    return grown, peaks, str(refused.value)


def measure(cache: Path, made: MadeFragment) -> tuple[list[int], list[int], str]:
    return asyncio.run(_measure(cache, made))


def test_fragments_do_without_what_the_agent_has_grown_by_beyond_its_reserve(
    tmp_path: Path, made: MadeFragment
) -> None:
    grown, peaks, refused = in_own_process(measure, tmp_path, made)
    assert max(grown[0], grown[2]) < 2 * MIB, "what a session leaves"
    assert abs(grown[1] - grown[0] - GROWTH_BYTES) < 2 * MIB
    assert max(peaks) <= BUDGET
    assert re.fullmatch(
        r"would need 20 MiB, have 1\S* MiB of a budget of 24 MiB, "
        r"and the agent itself has grown by [5678]\S* MiB",
        refused,
    )
