"""Loads that wait until there is memory for them, on a device where something always comes."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from agent.fragment_making import MadeFragment, dense_model, write_fragment
from shoal_agent.execution.values import Made
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.transport.activations import ActivationStore, SpillFull

MIB = 1 << 20
ITEMS = tuple(Made("j", 1, item, 0) for item in range(3))

Make = Callable[..., Fragments]


@pytest.fixture
def other(tmp_path: Path) -> MadeFragment:
    """The fragment that is to be loaded."""
    return write_fragment(tmp_path, dense_model([512, 1024, 512]), 20 * MIB)


def store_of(fragments: Fragments, folder: Path) -> ActivationStore:
    store = ActivationStore(folder / "disk", 64 * MIB, fragments, fragments.buffers)
    fragments.spilling.spill = store.spill
    return store


@pytest.mark.parametrize("leaves", ["used", "dropped", "sent"])
async def test_what_leaves_memory_while_another_is_written_counts_as_room_that_was_made(
    tmp_path: Path, make: Make, leaves: str
) -> None:
    fragments = make()
    store = store_of(fragments, tmp_path)
    for key in ITEMS[:2]:
        await store.put(key, {"y": np.zeros(MIB, np.uint8)})
    spilling = asyncio.create_task(store.spill(2 * MIB))
    await asyncio.sleep(0)  # the first is being written
    if leaves == "used":
        store.cover(ITEMS[1])
    elif leaves == "dropped":
        store.drop(ITEMS[:1])
    else:
        with store.lend(ITEMS[1]):
            await spilling
    await spilling
    assert fragments.ledger.moving == 0
    store.clear()
    await fragments.close()


async def test_a_load_fails_where_neither_memory_nor_the_disk_has_room_for_what_waits(
    tmp_path: Path, make: Make, other: MadeFragment
) -> None:
    fragments = make(budget=32 * MIB)
    store = store_of(fragments, tmp_path)
    await store.put(ITEMS[0], {"text": np.array(["x" * 2 * MIB], object)})
    with pytest.raises(SpillFull, match="what is left in memory is text"):
        await fragments.load(other.digest, 31 * MIB, [])
    store.clear()
    await fragments.close()
