"""Sizes of tensors as items had them on their way, where they follow from no planned shape.

In some models sizes follow from what inputs hold: speech is as long as its text says. Nobody knows
them before an item has come that far; what ran out of memory tells them then, and the model is cut
anew with them.
"""

from collections.abc import Iterable, Mapping
from operator import le
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

if TYPE_CHECKING:  # who decides with sizes needs no messages
    from shoal_protocol.v1.session_pb2 import TensorSizes

Sizes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Of the axes of tensors, by their names."""

MOST_TENSORS: Final = 64
MOST_AXES: Final = 16
_MOST_CHARACTERS: Final = 512
_MOST_SIZE: Final = 1 << 40


def larger(known: Sizes, found: Sizes) -> Sizes:
    """Both together, along each axis the larger one; of a tensor with another rank what is known
    already. No more than `MOST_TENSORS`."""
    both = dict(known)
    for name, sizes in found.items():
        before = both.get(name, (0,) * len(sizes))
        if len(before) == len(sizes) and (name in both or len(both) < MOST_TENSORS):
            both[name] = tuple(map(max, before, sizes))
    return both


def is_within(sizes: tuple[int, ...], known: tuple[int, ...] | None) -> bool:
    """Whether a tensor is no larger than is known; None: nothing is."""
    return known is not None and len(sizes) == len(known) and all(map(le, sizes, known))


class _Messages(Protocol):
    def add(self, *, name: str, sizes: Iterable[int]) -> object: ...


def write_sizes(messages: _Messages, sizes: Sizes) -> None:
    """Add them to a message's field."""
    for name, axes in sizes.items():
        messages.add(name=name, sizes=axes)


def read_sizes(messages: "Iterable[TensorSizes]") -> Sizes:
    """As they came; without what makes no sense, and no more than `MOST_TENSORS`."""
    found: dict[str, tuple[int, ...]] = {}
    for each in messages:
        sane = 0 < len(each.name) <= _MOST_CHARACTERS and len(each.sizes) <= MOST_AXES
        if sane and all(size <= _MOST_SIZE for size in each.sizes) and len(found) < MOST_TENSORS:
            found[each.name] = tuple(each.sizes)
    return found
