"""Memory that is received into again: it counts while it waits, and nobody shares it who reads it.

What may still be read is told by the array through which memory was lent, so every kind of view
must keep that array alive.
"""

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from agent.in_process import MIB
from shoal_agent.execution.values import Key, Made
from shoal_agent.memory.demands import Load
from shoal_agent.memory.residency import Ledger
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.transport.activations import ActivationStore
from shoal_agent.transport.buffers import MOST_BYTES, PART, Buffers, Lease
from shoal_protocol.units import Bytes

PAGE: Final = 4096
BUDGET: Final = Bytes(64 * PAGE)
Memory = NDArray[np.uint8]


class View(Protocol):
    """Reads memory; what lies behind it stays while it does."""

    def tobytes(self) -> bytes: ...


VIEWS: Final[dict[str, Callable[[Memory], View]]] = {
    "slice": lambda array: array[8:-8],
    "slice of a slice": lambda array: array[8:][::2],
    "other shape and type": lambda array: array.view(np.float32).reshape(2, -1).T,
    "memoryview": lambda array: array.data[8:],
    "array on a memoryview": lambda array: np.ndarray((64,), np.float64, array.data, 64),
    "array on the array": lambda array: np.ndarray((64,), np.float64, array, 64),
    "array on a part": lambda array: np.ndarray((8,), np.float64, array.data[64:], 64),
    "array of a buffer": lambda array: np.frombuffer(array.data[16:], np.int32),
    "the array again": lambda array: np.asarray(array, order="C"),
    "without a dimension": lambda array: array[:4].view(np.int32).reshape(()),
}
"""As assembled, received whole, divided into items, joined, or given to the runtime."""


def no_heap() -> None:
    """What is trimmed where nothing moves."""


@pytest.mark.parametrize("kind", VIEWS)
def test_memory_is_lent_again_when_its_last_view_is_gone_and_not_before(kind: str) -> None:
    buffers = Buffers(Ledger(budget=BUDGET), PAGE, no_heap)
    array, lease = buffers.take(2 * PAGE)
    assert lease is not None
    view = VIEWS[kind](array)
    address = array.ctypes.data
    del array
    buffers.keep(lease)
    other, _ = buffers.take(2 * PAGE)
    assert not np.shares_memory(other, np.asarray(view))
    assert buffers.waiting_bytes == 2 * PAGE
    del view
    again, _ = buffers.take(2 * PAGE)
    assert again.ctypes.data == address
    assert buffers.waiting_bytes == 0


@dataclass
class Activation:
    """What was received: its bytes, as they must stay while anybody reads them."""

    size: int
    lease: Lease | None
    views: list[tuple[View, bytes]]


@dataclass
class Device:
    """A ledger and what has memory of it, in the way that `Fragments` and the store go."""

    ledger: Ledger = field(default_factory=lambda: Ledger(budget=BUDGET))
    activations: list[Activation] = field(default_factory=list)
    dropped: list[Activation] = field(default_factory=list)
    fragments: list[str] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    heap_bytes: int = 0
    received: int = 0

    def __post_init__(self) -> None:
        self.buffers = Buffers(self.ledger, PAGE, self.trim)

    @property
    def could_be_free(self) -> int:
        return self.ledger.free + self.buffers.waiting_bytes + self.buffers.holes_bytes

    @property
    def used_bytes(self) -> int:
        """Of the heap."""
        return sum(self.moves) + sum(self.made)

    def trim(self) -> None:
        self.heap_bytes = self.used_bytes

    def make(self, size: int) -> None:
        """Keep what was made here, in memory of the heap."""
        could = self.could_be_free >= size
        assert self.buffers.request_space(size) == could, "what waits is in nobody's way"
        if could:
            self.made.append(size)
            self.heap_bytes = max(self.heap_bytes, self.used_bytes)

    def drop_made(self, number: int) -> None:
        if self.made:
            size = self.made.pop(number % len(self.made))
            self.ledger.return_space(size)
            self.buffers.leave(size)

    def move(self, size: int) -> None:
        """Send something: its frames take the place of those that left the heap, or new memory."""
        could = self.could_be_free >= size
        assert self.buffers.request_move(size) == could, "what waits is in nobody's way"
        if could:
            self.moves.append(size)
            self.heap_bytes = max(self.heap_bytes, self.used_bytes)

    def end_move(self, number: int) -> None:
        if self.moves:
            self.buffers.end_move(self.moves.pop(number % len(self.moves)))

    def receive(self, size: int, kind: str) -> None:
        could = self.could_be_free >= size
        self.buffers.make_room(size)
        assert self.ledger.request_space(size) == could, "what waits is in nobody's way"
        if could:
            array, lease = self.buffers.take(size)
            self.received += 1
            array[:] = self.received % 251
            view = VIEWS[kind](array)
            self.activations.append(Activation(size, lease, [(view, view.tobytes())]))

    def drop(self, number: int) -> None:
        if self.activations:
            gone = self.activations.pop(number % len(self.activations))
            self.ledger.return_space(gone.size)
            if gone.lease is not None:
                self.buffers.keep(gone.lease)
            self.dropped.append(gone)

    def forget(self, number: int) -> None:
        """A reader that outlived its activation has ended."""
        if self.dropped:
            del self.dropped[number % len(self.dropped)]

    def load(self, size: int) -> None:
        digest = str(len(self.fragments))
        could = self.could_be_free >= size
        self.buffers.make_room(size)
        admitted = self.ledger.request_load(digest, Bytes(size)) is Load.ADMITTED
        assert admitted == could, "what waits is in nobody's way"
        if admitted:
            self.ledger.finish_load(digest)
            self.fragments.append(digest)

    def unload(self, _: int) -> None:
        if self.fragments:
            self.ledger.unload(self.fragments.pop())

    def change_budget(self, size: int) -> None:
        held = self.ledger.fragments + self.ledger.moving
        held += sum(self.made) + sum(each.size for each in self.activations)
        self.buffers.give_back()
        assert self.ledger.change_budget(Bytes(max(size, held))) == [], "what waited has gone"

    def withhold(self, size: int) -> None:
        self.buffers.give_back()
        self.ledger.withhold(Bytes(size))

    def check(self) -> None:
        waiting, ledger = self.buffers.waiting_bytes + self.buffers.holes_bytes, self.ledger
        counted = ledger.moving + sum(self.made) + self.buffers.holes_bytes
        assert self.heap_bytes <= counted, "all of it counts"
        assert ledger.reserved == waiting + sum(self.made) + sum(
            each.size for each in self.activations
        )
        assert ledger.fragments + ledger.reserved + ledger.moving <= ledger.budget
        for each in (*self.activations, *self.dropped):
            for view, content in each.views:
                assert view.tobytes() == content, "somebody else was given its memory"


pages = st.integers(1, 12).map(lambda count: count * PAGE)
some = st.integers(0, 8)
events = st.one_of(
    st.tuples(st.just("receive"), pages, st.sampled_from(list(VIEWS))),
    st.tuples(st.just("receive"), st.sampled_from([2 * PAGE, 3 * PAGE]), st.just("slice")),
    st.tuples(st.sampled_from(["drop", "forget", "unload"]), some),
    st.tuples(st.sampled_from(["drop", "forget"]), some),
    st.tuples(st.sampled_from(["load", "withhold", "move", "make"]), pages),
    st.tuples(st.sampled_from(["end_move", "drop_made"]), some),
    st.tuples(st.just("change_budget"), st.integers(0, 128).map(lambda count: count * PAGE)),
)


# A failure is shown in seconds: to explain its parts takes minutes.
@settings(max_examples=300, deadline=None, phases=set(Phase) - {Phase.explain})
@given(st.lists(events, max_size=60))
def test_what_waits_counts_is_in_nobodys_way_and_is_read_by_nobody_else(
    history: list[tuple[str, int] | tuple[str, int, str]],
) -> None:
    device = Device()
    for name, *arguments in history:
        getattr(device, name)(*arguments)
        device.check()


@pytest.mark.parametrize("ask", [Device.make, Device.move])
def test_nothing_stays_in_the_heap_uncounted_where_holes_do_not_suffice(
    ask: Callable[[Device, int], None],
) -> None:
    device = Device()
    device.make(4 * PAGE)
    device.drop_made(0)
    device.load(60 * PAGE)
    assert device.buffers.holes_bytes == 4 * PAGE, "there is room for both"
    ask(device, 5 * PAGE)
    device.check()
    assert (device.buffers.holes_bytes, device.ledger.free) == (0, 4 * PAGE)


def test_memory_is_used_again_in_most_of_a_stream_of_one_size() -> None:
    """What the history above checks would hold of buffers that are never lent again."""
    buffers, addresses = Buffers(Ledger(budget=BUDGET), PAGE, no_heap), set()
    for _ in range(10):
        array, lease = buffers.take(3 * PAGE)
        assert lease is not None
        addresses.add(array.ctypes.data)
        del array
        buffers.keep(lease)
    assert len(addresses) == 1


def test_the_heap_is_not_trimmed_between_moves_of_one_kind() -> None:
    trimmed = []
    buffers = Buffers(Ledger(budget=BUDGET), PAGE, lambda: trimmed.append(True))
    for _ in range(10):
        assert buffers.request_move(4 * PAGE)
        buffers.end_move(4 * PAGE)
    assert buffers.holes_bytes == 4 * PAGE
    assert not trimmed
    buffers.give_back()
    assert buffers.holes_bytes == 0
    assert len(trimmed) == 1


def test_what_is_small_goes_together_where_nothing_may_wait() -> None:
    trimmed = []
    ledger = Ledger(budget=BUDGET)
    buffers = Buffers(ledger, PAGE, lambda: trimmed.append(True))
    assert ledger.request_space(BUDGET)
    for _ in range(7):
        buffers.leave(PAGE // 4)
    assert len(trimmed) == 1
    assert buffers.holes_bytes == 0
    assert not buffers.request_move(PAGE)
    assert len(trimmed) == 2, "three small ones were left"
    assert not buffers.request_move(PAGE)
    assert len(trimmed) == 2, "nothing is left to give back"


def test_the_oldest_go_where_more_would_wait_than_may() -> None:
    ledger = Ledger(budget=Bytes(PART * 4 * PAGE))
    buffers = Buffers(ledger, PAGE, no_heap)
    leases = [lease for size in (1, 2, 3) if (lease := buffers.take(size * PAGE)[1]) is not None]
    for lease in leases:
        buffers.keep(lease)
    assert buffers.waiting_bytes == 3 * PAGE
    assert ledger.reserved == buffers.waiting_bytes + buffers.holes_bytes
    _, large = buffers.take(5 * PAGE)
    assert large is not None
    buffers.keep(large)
    assert buffers.waiting_bytes == 3 * PAGE, "it goes, and leaves the others alone"


def test_no_more_waits_than_is_worth_it_however_large_the_budget() -> None:
    ledger = Ledger(budget=Bytes(1 << 40))
    buffers = Buffers(ledger, PAGE, no_heap)
    leases = [buffers.take(MOST_BYTES // 4)[1] for _ in range(6)]
    for lease in leases:
        assert lease is not None
        buffers.keep(lease)
    assert buffers.waiting_bytes == MOST_BYTES


def test_small_memory_and_that_of_other_threads_comes_from_the_allocator() -> None:
    buffers = Buffers(Ledger(budget=BUDGET), PAGE, no_heap)
    assert buffers.take(PAGE - 1)[1] is None
    lease = buffers.take(PAGE)[1]
    assert lease is not None
    buffers.keep(lease)
    thread = threading.Thread(target=buffers.take, args=(PAGE,))
    thread.start()
    thread.join()
    assert buffers.waiting_bytes == PAGE


# ---- in the agent --------------------------------------------------------------------------------


def received(store: ActivationStore, key: Key, size: int) -> int:
    """Receive an activation; where it lies."""
    buffer = store.open_buffer(size, 0)
    array = buffer.allocate(size)
    array[:] = 1
    store.receive(key, {"x": array.view(np.float32)}, buffer)
    return array.ctypes.data


def reserved(fragments: Fragments) -> int:
    """What waits for and as activations, without what their frames have left in the heap."""
    return fragments.ledger.reserved - fragments.buffers.holes_bytes


KEYS: Final = [Made("j", 1, item, 0) for item in range(4)]


async def test_what_the_store_drops_waits_until_somebody_needs_its_room(
    make: Callable[..., Fragments], tmp_path: Path
) -> None:
    fragments = make(budget=16 * MIB)
    buffers = fragments.buffers
    store = ActivationStore(tmp_path / "spill", 1 << 30, fragments, buffers)
    address = received(store, KEYS[0], MIB)
    assert reserved(fragments) == MIB
    store.drop(KEYS[:1])
    assert reserved(fragments) == buffers.waiting_bytes == MIB
    assert received(store, KEYS[1], MIB) == address
    assert (reserved(fragments), buffers.waiting_bytes) == (MIB, 0)
    store.drop(KEYS[1:2])
    assert fragments.request_move(16 * MIB), "what waits makes room at once"
    assert (reserved(fragments), buffers.waiting_bytes) == (0, 0)
    fragments.end_move(16 * MIB)
    await fragments.close()


async def test_what_a_task_has_used_waits_as_well(
    make: Callable[..., Fragments], tmp_path: Path
) -> None:
    """Its fragment's own share has had the bytes meanwhile."""
    fragments = make(budget=16 * MIB)
    store = ActivationStore(tmp_path / "spill", 1 << 30, fragments, fragments.buffers)
    received(store, KEYS[0], MIB)
    store.cover(KEYS[0])
    assert reserved(fragments) == 0
    store.drop(KEYS[:1])
    assert reserved(fragments) == fragments.buffers.waiting_bytes == MIB
    await fragments.change_budget(8 * MIB)
    assert reserved(fragments) == 0
    await fragments.close()


async def test_what_went_to_the_disk_leaves_no_memory_behind(
    make: Callable[..., Fragments], tmp_path: Path
) -> None:
    fragments = make(budget=16 * MIB)
    store = ActivationStore(tmp_path / "spill", 1 << 30, fragments, fragments.buffers)
    received(store, KEYS[0], MIB)
    await store.spill(MIB)
    gc.collect()
    store.clear()
    assert (reserved(fragments), fragments.buffers.waiting_bytes) == (0, 0)
    await fragments.close()
