"""Loads that wait until there is memory for them, on a device where something always comes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.fragment_making import MadeFragment, dense_model, table_model, write_fragment
from agent.scripted_coordinator import PATIENCE_SECONDS
from shoal_agent.cache.fetching import Source
from shoal_agent.execution.values import Made
from shoal_agent.runtime.failures import OverBudget
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


async def leave(fragments: Fragments, *made: MadeFragment) -> None:
    for each in made:
        await fragments.unload(each.digest)
    await fragments.close()


async def test_what_a_batch_leaves_in_the_heap_does_not_fail_a_load(
    tmp_path: Path, make: Make, other: MadeFragment
) -> None:
    """No activation is in memory: nothing could be written to the disk for it."""
    made = write_fragment(tmp_path, dense_model([64, 512, 512, 64]), 4 * MIB, batched=True)
    fragments = make(budget=32 * MIB)
    store_of(fragments, tmp_path)
    await fragments.load(made.digest, 4 * MIB, [])
    items = [{"x": np.full((1, 64), number, np.float32)} for number in range(2)]
    result = await fragments.run(made.digest, items[0])
    fragments.batches.note(made.digest, items[0], result.outputs)
    assert len(fragments.batches.choose(made.digest, [*items])) == len(items)
    await fragments.run_together(made.digest, items)
    fragments.batches.settled(len(items))
    assert fragments.ledger.moving > 0
    rest = fragments.ledger.budget - fragments.ledger.fragments
    assert (await fragments.load(other.digest, rest, [])).resident_bytes == rest
    await leave(fragments, made, other)


async def test_rows_that_gather_while_a_load_waits_do_not_take_its_place(
    tmp_path: Path, make: Make, other: MadeFragment
) -> None:
    """It waits for a batch of which the outputs are still on their way."""
    made = write_fragment(tmp_path, table_model(rows=49152), 20 * MIB, batched=True)
    fragments = make(budget=96 * MIB)
    await fragments.load(made.digest, 20 * MIB, [])
    items = [{"x": np.arange(2048) + 2048 * number} for number in range(24)]
    result = await fragments.run(made.digest, items[0])
    fragments.batches.note(made.digest, items[0], result.outputs)
    assert len(fragments.batches.choose(made.digest, items[:2])) == 2
    loading = asyncio.create_task(fragments.load(other.digest, 76 * MIB, []))
    await asyncio.sleep(0.05)
    for item in items:
        await fragments.run(made.digest, item)
    fragments.batches.settled(2)
    assert (await loading).resident_bytes == 76 * MIB
    await leave(fragments, made, other)


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


async def test_a_load_that_has_activations_written_is_not_overtaken_by_what_comes(
    make: Make, other: MadeFragment
) -> None:
    fragments = make(budget=32 * MIB)
    granted: list[bool] = []

    async def spill(size: int) -> None:
        fragments.return_space(size // 2)
        await asyncio.sleep(0)
        granted.extend([fragments.request_space(MIB), fragments.request_move(MIB)])
        fragments.return_space(size - size // 2)

    fragments.spilling.spill = spill
    assert fragments.request_space(8 * MIB)
    await fragments.load(other.digest, 32 * MIB, [])
    assert granted == [False, False]
    await leave(fragments, other)


async def test_a_load_is_not_overtaken_by_run_after_run_that_has_all_that_is_free(
    tmp_path: Path, make: Make, other: MadeFragment
) -> None:
    made = write_fragment(tmp_path, dense_model([512] * 3), 8 * MIB, unknown_sizes=True)
    fragments = make(budget=48 * MIB)
    await fragments.load(made.digest, made.resident_bytes, [])
    loaded = asyncio.Event()

    async def work() -> None:
        while not loaded.is_set():
            await fragments.run(made.digest, {"x": np.ones((2, 512), np.float32)})

    working = asyncio.create_task(work())
    await asyncio.sleep(0.05)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await fragments.load(other.digest, 32 * MIB, [])
    finally:
        loaded.set()
        await working
    assert set(fragments.ledger.resident) == {made.digest, other.digest}
    await leave(fragments, made, other)


async def test_a_load_does_not_wait_for_what_is_fetched_ahead(
    tmp_path: Path, make: Make, other: MadeFragment
) -> None:
    """Over a slow link that takes minutes."""
    fragments = make(budget=32 * MIB)
    asked = asyncio.Event()

    async def nothing() -> AsyncIterator[bytes]:
        asked.set()
        await asyncio.sleep(10 * PATIENCE_SECONDS)
        yield b""

    def slow(*_: object) -> Any:
        return nothing()

    sources = [Source("pi-zero", slow)]
    fetching = asyncio.create_task(fragments.prefetch("sha256:" + "0" * 64, sources))
    await asked.wait()
    assert fragments.ledger.moving > 0
    async with asyncio.timeout(PATIENCE_SECONDS):
        await fragments.load(other.digest, 32 * MIB, [])
    with pytest.raises(OverBudget, match="is not fetched now: a load needs"):
        await fetching
    assert fragments.ledger.moving == 0
    await leave(fragments, other)


async def test_text_has_its_place_while_a_load_waits(
    tmp_path: Path, make: Make, other: MadeFragment
) -> None:
    """It can be nowhere but in memory: a task that has made some would fail."""
    fragments = make(budget=48 * MIB)
    store = store_of(fragments, tmp_path)
    assert fragments.request_move(16 * MIB)
    loading = asyncio.create_task(fragments.load(other.digest, 40 * MIB, []))
    await asyncio.sleep(0.05)
    assert other.digest not in fragments.ledger.in_flight
    await store.put(ITEMS[0], {"text": np.array(["x" * 2 * MIB], object)})
    store.open_buffer(2 * MIB, 0, 2 * MIB).abandon()
    fragments.end_move(16 * MIB)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await loading
    store.clear()
    await leave(fragments, other)


async def test_text_that_is_sent_while_its_task_ends_leaves_no_bytes_behind(
    tmp_path: Path, make: Make
) -> None:
    """Beside it others move, whose bytes are theirs."""
    fragments = make(budget=8 * MIB)
    store = store_of(fragments, tmp_path)
    text, numbers = np.array(["x" * 2 * MIB], object), np.arange(5 * MIB, dtype=np.uint8)
    await store.put(ITEMS[0], {"text": text, "numbers": numbers})
    store.cover(ITEMS[0])
    assert fragments.request_move(5 * MIB)
    with store.lend(ITEMS[0]):
        await store.uncover(ITEMS[0])
        assert store.spilled_bytes > 0, "the numbers have no room in memory"
    assert fragments.ledger.moving == 5 * MIB
    held = store.get(ITEMS[0])
    assert held is not None
    np.testing.assert_array_equal(held["numbers"], numbers)
    store.clear()
    fragments.end_move(5 * MIB)
    fragments.buffers.give_back()
    assert (fragments.ledger.reserved, fragments.ledger.moving) == (0, 0)


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
