"""Memory that is received into, used again. New memory costs a page fault for each of its pages,
which takes longer than to receive what goes there.

The allocator gives large blocks back to the kernel when they are freed (`tune_allocator`). So the
memory of an activation that is dropped waits here for the next one of its size:

- Memory is *in use* while the activation is, and counts where that does. When the store drops the
  activation, the ledger is asked for the same space again: it *waits*, as reserved bytes, or goes.
- Who receives takes what waits; its space is returned, as the new activation has its own.
- Arrays of activations are views, and a view may outlive its activation: in a frame of a caller, in
  the processor's thread. Memory is lent through an array that all views refer to, directly or not,
  and is lent again only when that array is gone. It cannot come back, so one look is enough.

What moves leaves memory free in the heap, that of its frames, and so do activations that were not
received: it waits too, for what comes next, and counts like what left it. The heap is trimmed when
it has to go.

What waits is the first to go where anybody needs room. Each kind stays within a part of the
budget and an absolute bound: two buffers of the largest activations that come often, or many of
small ones.

`take` may be called in any thread, and gives new memory outside of the event loop's. All else
belongs to that thread.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal_agent.memory.residency import Ledger

MOST_BYTES: Final = 32 << 20
"""Memory that waits. Receiving more takes so long that page faults are a small part of it."""
PART: Final = 8
"""Of the budget that may wait: one in so many."""
_PAGE_BYTES: Final = 4096


@dataclass(slots=True, eq=False)
class Lease:
    """Memory, and the array through which it was lent last."""

    memory: NDArray[np.uint8]
    array: weakref.ref[NDArray[np.uint8]]

    @property
    def size(self) -> int:
        return self.memory.nbytes

    @property
    def in_use(self) -> bool:
        """Whether a view of it may still be."""
        return self.array() is not None


@contextmanager
def nothing_arrives(ledger: Ledger, free: int) -> Iterator[None]:
    """So much is granted to nobody meanwhile, if it is free."""
    was_free = ledger.bar(free)
    try:
        yield
    finally:
        if was_free:
            ledger.unbar(free)


class Buffers:
    """The memory of one agent that waits for activations to come."""

    def __init__(self, ledger: Ledger, least_bytes: int, trim: Callable[[], None]) -> None:
        """Smaller blocks are the allocator's to use again. `trim` gives the kernel what is free in
        the heap."""
        self._ledger = ledger
        self._least_bytes = least_bytes
        self._trim = trim
        self._thread = get_ident()
        self._waiting: deque[Lease] = deque()
        self.waiting_bytes = 0
        self.holes_bytes = 0
        self._uncounted_bytes = 0
        self._yields = False

    def take(self, size: int) -> tuple[NDArray[np.uint8], Lease | None]:
        """So many writable bytes, and what `keep` takes when they are not needed any more; None:
        they are too few for that."""
        if size < self._least_bytes:
            return np.empty(size, np.uint8), None
        whole = -(-size // _PAGE_BYTES) * _PAGE_BYTES
        memory = self._found(whole) if self._waiting and get_ident() == self._thread else None
        if memory is None:
            memory = np.empty(whole, np.uint8)
        # Views of an array refer to the array behind it, if there is one: here is a memoryview.
        array = np.frombuffer(memory.data, np.uint8, size)
        return array, Lease(memory, weakref.ref(array))

    def keep(self, lease: Lease) -> None:
        """What lies there was dropped, and does not count any more: let the memory wait, where
        nobody else wants the space. It leaves the oldest no room."""
        most = self._most
        if self._yields or lease.size > min(most, self._ledger.spare + self.waiting_bytes):
            self.leave(lease.size)
            return
        while self._waiting and (
            self.waiting_bytes + lease.size > most or lease.size > self._ledger.spare
        ):
            oldest = self._waiting[0]
            self._remove(oldest)
            self.leave(oldest.size)
        # What is withheld from fragments is not for this either.
        if lease.size <= self._ledger.spare and self._ledger.request_space(lease.size):
            self._waiting.append(lease)
            self.waiting_bytes += lease.size
        else:
            self.leave(lease.size)

    @property
    def yields(self) -> bool:
        """Whether a load asks for memory."""
        return self._yields

    @contextmanager
    def yielding(self) -> Iterator[None]:
        """A load asks for memory: until it has its place nothing else comes, or it might wait for
        ever, since something always moves or waits where a device is busy; nor does memory wait
        here that leaves meanwhile."""
        self._yields = True
        try:
            yield
        finally:
            self._yields = False

    async def let_loads_first(self) -> None:
        """A run may be about to have all that is free, as the last one had: a load that waits looks
        first whether there is room now."""
        if self._yields:
            await asyncio.sleep(0)

    def request_move(self, size: int, *, text: bool = False) -> bool:
        """Ask for a move: what others have left in the heap is for it. `text` has no other place,
        so it waits for no load."""
        if self._yields and not text:
            return False
        if self._filled(size):
            self._ledger.begin_move(size)
            return True
        return self._asked(self._ledger.request_move, size)

    def request_space(self, size: int, *, text: bool = False) -> bool:
        """Ask for an activation, as for a move."""
        if self._yields and not text:
            return False
        return self._filled(size) or self._asked(self._ledger.request_space, size)

    def end_move(self, size: int) -> None:
        """A move has ended; what it leaves in the heap waits."""
        self._ledger.end_move(size)
        self.leave(size)

    def leave(self, size: int) -> None:
        """So much was freed that does not count any more. It may be in the heap still: it waits,
        where nobody else wants the space, or goes back to the kernel, what is small together."""
        is_little = self.holes_bytes + size <= self._most and size <= self._ledger.spare
        if is_little and not self._yields and self._ledger.request_space(size):
            self.holes_bytes += size
            return
        self._uncounted_bytes += size
        if self._uncounted_bytes >= self._least_bytes:
            self._close_holes()

    def give_back(self) -> None:
        """Let all go that waits."""
        while self._waiting:
            self._remove(self._waiting[0])
        self._close_holes()

    def make_room(self, size: int) -> int:
        """Let all go that waits if less than that is free; what is free now."""
        if self._ledger.free < size:
            self._gave_back()
        return self._ledger.free

    @property
    def _most(self) -> int:
        return min(MOST_BYTES, self._ledger.budget // PART)

    def _gave_back(self) -> bool:
        """Let all go that waits or may be free in the heap; whether there was any."""
        holds = bool(self._waiting or self.holes_bytes or self._uncounted_bytes)
        if holds:
            self.give_back()
        return holds

    def _filled(self, size: int) -> bool:
        """Whether it fits where holes are: then their reserved bytes are its own."""
        if size > self.holes_bytes:
            return False
        self.holes_bytes -= size
        return True

    def _asked(self, request: Callable[[int], bool], size: int) -> bool:
        """Ask the ledger for what takes more than the holes; all that waits goes if need be."""
        filled, self.holes_bytes = self.holes_bytes, 0
        self._ledger.return_space(filled)
        if request(size):
            return True
        self._uncounted_bytes += filled  # the heap still has them
        return self._gave_back() and request(size)

    def _close_holes(self) -> None:
        self._trim()
        self._ledger.return_space(self.holes_bytes)
        self.holes_bytes = self._uncounted_bytes = 0

    def _found(self, size: int) -> NDArray[np.uint8] | None:
        """Memory of just that size that nobody uses: more would not be counted."""
        for lease in self._waiting:
            if lease.size == size and not lease.in_use:
                self._remove(lease)
                return lease.memory
        return None

    def _remove(self, lease: Lease) -> None:
        self._waiting.remove(lease)
        self.waiting_bytes -= lease.size
        self._ledger.return_space(lease.size)
