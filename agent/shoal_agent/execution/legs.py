"""Legs of itineraries: what this device runs for items that bring a ticket, and which of these are
here.

The coordinator plans a leg once, and an item that comes with the leg's ticket runs as soon as it is
there: nobody is asked. An item is here from its arrival until it has left or failed; nothing of it
is kept. What goes wrong is the coordinator's to mend: it gives the item up, and has it run task by
task. So a leg that is not known any more is no fault, and its items are ignored.

Items run one at a time, in the order in which they came. Their number is bounded; the ledger bounds
their bytes.
"""

from collections import OrderedDict, deque
from typing import Final, Generic, NamedTuple, TypeVar

KNOWN_LEGS: Final = 256
WAITING_ITEMS: Final = 256
"""More than the coordinator has on one device at once."""

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
    """An item that is here: its number, and what it has brought."""

    leg: Leg
    instruction: int
    content: Content


class Legs(Generic[Content]):
    """The legs of one session, and the items that wait to run."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Leg] = OrderedDict()
        self._waiting: deque[Arrived[Content]] = deque()

    def plan(self, ticket: bytes, leg: Leg) -> None:
        """Take items with this ticket from now on. Legs of older epochs of the job go, and of too
        many the one that was planned first."""
        old = [
            known
            for known, each in self._known.items()
            if each.job == leg.job and each.epoch < leg.epoch
        ]
        for known in old:
            del self._known[known]
        self._known[ticket] = leg
        if len(self._known) > KNOWN_LEGS:
            self._known.popitem(last=False)

    def find(self, ticket: bytes) -> Leg | None:
        return self._known.get(ticket)

    @property
    def full(self) -> bool:
        """Whether no more items may wait."""
        return len(self._waiting) >= WAITING_ITEMS

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def arrive(self, item: Arrived[Content]) -> None:
        self._waiting.append(item)

    def next(self) -> Arrived[Content] | None:
        """The item that runs next; None: none waits."""
        return self._waiting.popleft() if self._waiting else None

    def clear(self) -> list[Arrived[Content]]:
        """Nothing runs any more; what has waited."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting
