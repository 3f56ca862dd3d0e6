"""What is known of a fragment's tensors for any number of items, and of a node that takes some."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Final

import onnx

MAX_ELEMENTS: Final = 64
"""Of the longest tensor whose elements are followed."""


class _Count(Enum):
    """A size that is in proportion to the number of items."""

    COUNT = "count"
    MULTIPLE = "multiple"


COUNT: Final = _Count.COUNT
"""That of an axis that has the items."""
MULTIPLE: Final = _Count.MULTIPLE
"""Several times as large, perhaps."""
Element = int | float | None | _Count
"""Of a small tensor; None: it is not known, and the same for every number of items."""


def grows(element: Element) -> bool:
    """Whether it is in proportion to the number of items."""
    return isinstance(element, _Count)


class Mixes(Exception):
    """Items would meet, or it is not known that they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor. `rows`: its first axis has the items, or that of the number `axis`. Else `first` is
    the fixed size of its first axis, if that is known, and `elements` are those of a tensor of at
    most one axis."""

    rank: int | None
    first: int | None = None
    rows: bool = False
    axis: int = 0
    elements: tuple[Element, ...] | None = None

    @property
    def counts(self) -> bool:
        return self.elements is not None and any(map(grows, self.elements))

    @property
    def same(self) -> bool:
        """Whether it is the same for every number of items."""
        return not self.rows and not self.counts


def rows(rank: int, axis: int = 0) -> Value:
    if rank < 1:
        raise Mixes("the first axis goes")
    return Value(rank=rank, rows=True, axis=axis)


@dataclass(frozen=True, kw_only=True)
class Application:
    """A node with what its inputs are. `inferred` has rank and first axis of its outputs, as they
    are for inputs that are the same."""

    node: onnx.NodeProto
    domain: str
    version: int
    inputs: tuple[Value | None, ...]
    inferred: tuple[Value, ...]

    @cached_property
    def attributes(self) -> Mapping[str, onnx.AttributeProto]:
        return {each.name: each for each in self.node.attribute}

    def integer(self, name: str, default: int) -> int:
        return self.attributes[name].i if name in self.attributes else default

    def input(self, at: int) -> Value | None:
        return self.inputs[at] if at < len(self.inputs) else None

    def row_input(self, at: int = 0) -> tuple[Value, int]:
        """An input that must have rows, and its rank."""
        value = self.input(at)
        if value is None or not value.rows or value.rank is None or value.axis:
            raise Mixes(f"input {at} has no rows")
        return value, value.rank

    def moved_input(self) -> tuple[int, int]:
        """The rank of the first input, which must have rows, and the number of their axis."""
        value = self.input(0)
        if value is None or not value.rows or value.rank is None:
            raise Mixes("the first input has no rows")
        return value.rank, value.axis

    def check_same(self, inputs: Sequence[Value | None]) -> None:
        if not all(value is None or value.same for value in inputs):
            raise Mixes("a parameter depends on the items")

    def check_others_same(self) -> None:
        """All inputs but the first one are parameters."""
        self.check_same(self.inputs[1:])

    def known(self, at: int, attribute: str = "") -> tuple[int, ...] | None:
        """Integers in an input, or in the attribute that had them in earlier versions; None: there
        are none. Raises `Mixes` where they are not known."""
        if attribute in self.attributes:
            return tuple(self.attributes[attribute].ints)
        if self.input(at) is None:
            return None
        if (integers := integers_of(self.input(at))) is None:
            raise Mixes(f"input {at} is not known")
        return integers

    def made(self, value: Value) -> tuple[Value, ...]:
        return (value,) * len(self.node.output)


def integers_of(value: Value | None) -> tuple[int, ...] | None:
    """All elements, where they are known integers."""
    if value is None or value.elements is None:
        return None
    integers = tuple(each for each in value.elements if isinstance(each, int))
    return integers if len(integers) == len(value.elements) else None


def elements_of(value: Value | None) -> tuple[Element, ...] | None:
    """Those of a tensor of at most one axis; unknown ones where only their number is known."""
    if value is None or value.rows:
        return None
    if value.elements is None and value.rank == 1 and value.first is not None:
        return (None,) * value.first if value.first <= MAX_ELEMENTS else None
    return value.elements if value.elements is not None or value.rank != 0 else (None,)
