"""Loads, runs, moves and changes of the budget at once, each of which may be cancelled at any time:
every run gives what it gives alone, and the ledger and the runtime agree when all has ended."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from agent.fragment_making import InBlocks, MadeFragment, dense_model, write_fragment
from agent.in_process import MIB
from agent.scripted_coordinator import PATIENCE_SECONDS
from shoal_agent.memory.demands import NoRoom
from shoal_agent.runtime.block_fragment import BlockFragment
from shoal_agent.runtime.failures import NotResident, RuntimeFailed
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.runtime.mapped_pages import mapped_ranges
from shoal_agent.runtime.runs import OpenFragment

ROUNDS = 4
ROWS = (1, 4, 64)
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.minutes) for seed in range(1, 8)))


class Asking:
    """What sessions and the machine ask for, by chance."""

    def __init__(self, fragments: Fragments, made: Sequence[MadeFragment], seed: int) -> None:
        self.fragments, self.made = fragments, made
        self.chance = random.Random(seed)  # noqa: S311 (not for secrets)
        self.expected: dict[str, np.ndarray] = {}
        self.ran = 0

    async def load(self) -> None:
        made = self.chance.choice(self.made)
        need = self.chance.choice([made.least_bytes, made.resident_bytes])
        await self.fragments.load(made.digest, need, [])

    async def unload(self) -> None:
        await asyncio.sleep(self.chance.random() / 10)
        await self.fragments.unload(self.chance.choice(self.made).digest)

    async def run(self) -> None:
        digest, rows = self.chance.choice(self.made).digest, self.chance.choice(ROWS)
        given = await self.run_one(digest, rows)
        expected = np.repeat(self.expected[digest], rows, axis=0)
        np.testing.assert_allclose(given, expected, rtol=1e-3, atol=1e-5)
        self.ran += 1

    async def run_one(self, digest: str, rows: int) -> np.ndarray:
        x = np.linspace(-1, 1, 512, dtype=np.float32)
        result = await self.fragments.run(digest, {"x": np.tile(x, (rows, 1))})
        return result.outputs["y"]

    async def run_each_alone(self) -> None:
        for made in self.made:
            await self.fragments.load(made.digest, made.resident_bytes, [])
            self.expected[made.digest] = await self.run_one(made.digest, 1)
            assert np.any(self.expected[made.digest]), "zeros would show nothing"
            await self.fragments.unload(made.digest)

    async def move(self) -> None:
        size = self.chance.randrange(1, 6) * MIB
        if self.fragments.request_move(size):
            try:
                await asyncio.sleep(self.chance.random() / 20)
            finally:
                self.fragments.end_move(size)

    async def change_budget(self) -> None:
        await asyncio.sleep(self.chance.random() / 3)
        await self.fragments.change_budget(self.chance.choice([16, 24, 32, 40]) * MIB)

    async def again_and_again(self, ask: Callable[[], Awaitable[None]]) -> None:
        while True:
            with suppress(NoRoom, NotResident, RuntimeFailed):
                await ask()
            await asyncio.sleep(self.chance.random() / 50)

    async def all_for(self, seconds: float) -> None:
        """Ask for everything, and cancel what is under way then."""
        asked = (self.load, self.load, self.unload, self.run, self.run, self.move)
        tasks = [
            asyncio.create_task(self.again_and_again(each)) for each in (*asked, self.change_budget)
        ]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), repr(ended)


def mapped(made: Sequence[MadeFragment]) -> set[str]:
    """Those of which something is mapped."""
    return {each.digest for each in made if mapped_ranges(each.folder.resolve())}


def runs_within(fragment: OpenFragment, granted_bytes: int) -> bool:
    """Nobody refers to the fragment by a name of its own: what it has mapped would stay."""
    return not isinstance(fragment, BlockFragment) or fragment.granted_bytes <= granted_bytes


async def settled(fragments: Fragments) -> None:
    """All that goes on beside whoever began it has ended."""
    while fragments._evicting or fragments._granting.tasks or fragments._granting._finishing:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("seed", SEEDS)
async def test_when_all_has_ended_what_is_open_is_what_is_reckoned_with(
    tmp_path: Path, make: Callable[..., Fragments], seed: int
) -> None:
    blocks = InBlocks(8)
    made = [
        write_fragment(tmp_path, dense_model([512] * 9, each), 12 * MIB, blocks) for each in (1, 2)
    ]
    made.append(write_fragment(tmp_path, dense_model([512] * 5, seed=3), 7 * MIB))
    fragments = make(40 * MIB)
    asking, loaded = Asking(fragments, made, seed), set[str]()
    await asking.run_each_alone()
    rounds = 0
    # By chance, all that was asked for had no room, or nothing was left of it at any end.
    while rounds < ROUNDS or not (asking.ran and loaded):
        rounds += 1
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asking.all_for(asking.chance.random())
            await settled(fragments)
        ledger, is_open = fragments.ledger, fragments._runtime._open
        fragments.buffers.give_back()
        assert (ledger.in_flight, ledger.moving, ledger.reserved) == ({}, 0, 0)
        assert is_open.keys() == ledger.resident.keys() == fragments.cache._pinned.keys()
        assert ledger.fragments <= ledger.budget
        for digest, share in ledger.shares.items():
            assert runs_within(is_open[digest], share.granted)
        loaded |= ledger.resident.keys()
        assert mapped(made) <= ledger.resident.keys()
    await fragments.close()
