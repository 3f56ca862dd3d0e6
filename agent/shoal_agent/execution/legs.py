"""Legs of itineraries: what this device runs for items that bring a ticket, and which of these are
here.

The coordinator plans a leg once, and an item that comes with the leg's ticket runs as soon as it is
there: nobody is asked. An item is here from its arrival until it has left or failed; nothing of it
is kept. What goes wrong is the coordinator's to mend: it gives the item up, and has it run task by
task. So a leg that is not known any more is no fault, and its items are ignored.

Items of a leg run in the order in which they came, and legs take turns: an item of one does not
wait for all that another has. Those that wait behind one another for the same leg, and have the
same layout, may go on together. Their number is bounded, for each leg too; the ledger bounds their
bytes.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final, Generic, NamedTuple, TypeVar

from shoal_protocol.items import to_forget

KNOWN_LEGS: Final = 512
WAITING_ITEMS: Final = 256
"""Of one leg: more than the coordinator has of one job on one device at once."""
MOST_ITEMS: Final = 2048

Content = TypeVar("Content")


class Step(NamedTuple):
    """A fragment, and the names of the tensors that it takes."""

    digest: str
    inputs: tuple[str, ...]


class Leg(NamedTuple):
    """Steps that an item takes here one after the other, the names of what leaves with it, and
    where to: a device with its address, or the coordinator (empty)."""

    job: str
    epoch: int
    steps: tuple[Step, ...]
    sends: tuple[str, ...]
    device: str
    address: str
    next_ticket: bytes


class Arrived(NamedTuple, Generic[Content]):
    """An item that is here: its number, the layout of its tensors, and what it has brought."""

    leg: Leg
    instruction: int
    layout: bytes
    content: Content


class Legs(Generic[Content]):
    """The legs of one session, and the items that wait to run."""

    def __init__(self) -> None:
        self._known: dict[bytes, Leg] = {}
        self._waiting: OrderedDict[int, deque[Arrived[Content]]] = OrderedDict()
        """By the leg's `id`, in the order of their turns: of legs for which any wait."""
        self._count = 0

    def plan(self, ticket: bytes, leg: Leg) -> None:
        """Take items with this ticket from now on; of too many legs one goes (`to_forget`)."""
        self._known[ticket] = leg
        if len(self._known) > KNOWN_LEGS:
            del self._known[to_forget(self._known)]

    def void(self, job: str, epoch: int) -> list[Arrived[Content]]:
        """Legs of a job below an epoch go, and what waits for them, which is returned."""
        old = [k for k, each in self._known.items() if each.job == job and each.epoch < epoch]
        for known in old:
            del self._known[known]
        return self._drop(lambda item: item.leg.job == job and item.leg.epoch < epoch)

    def cancel(self, instruction: int) -> Arrived[Content] | None:
        """An item is not needed any more; None: it does not wait."""
        return next(iter(self._drop(lambda item: item.instruction == instruction)), None)

    def find(self, ticket: bytes) -> Leg | None:
        return self._known.get(ticket)

    def room_for(self, leg: Leg, count: int) -> bool:
        """Whether so many items more may wait for a leg."""
        there = len(self._waiting.get(id(leg), ()))
        return there + count <= WAITING_ITEMS and self._count + count <= MOST_ITEMS

    @property
    def known(self) -> int:
        return len(self._known)

    @property
    def waiting(self) -> int:
        return self._count

    @property
    def next_leg(self) -> Leg | None:
        """Of the item that runs next; None: none waits."""
        return next((items[0].leg for items in self._waiting.values()), None)

    def arrive(self, items: Iterable[Arrived[Content]]) -> None:
        for item in items:
            self._waiting.setdefault(id(item.leg), deque()).append(item)
            self._count += 1

    def next(self, most: int = 1) -> list[Arrived[Content]]:
        """The item that runs next, and those that may go on with it, at most so many in all."""
        if not self._waiting:
            return []
        key, items = next(iter(self._waiting.items()))
        together = [items.popleft()]
        while items and len(together) < most and items[0].layout == together[0].layout:
            together.append(items.popleft())
        self._count -= len(together)
        if items:
            self._waiting.move_to_end(key)
        else:
            del self._waiting[key]
        return together

    def clear(self) -> list[Arrived[Content]]:
        """Nothing runs any more; what has waited."""
        return self._drop(lambda _: True)

    def _drop(self, goes: Callable[[Arrived[Content]], bool]) -> list[Arrived[Content]]:
        """Those that wait and go."""
        gone: list[Arrived[Content]] = []
        for key, items in list(self._waiting.items()):
            gone += filter(goes, items)
            if stays := [item for item in items if not goes(item)]:
                self._waiting[key] = deque(stays)
            else:
                del self._waiting[key]
        self._count -= len(gone)
        return gone
