"""A node with the sizes of what it reads and gives: what its cost is worked out from."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from shoal_compiler.nodes import integer_of, integers_of, text_of

Dims = tuple[int, ...]


class Unknown(Exception):
    """The cost depends on a size that is unknown."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """A node with the sizes of its inputs and outputs; None where unknown or absent. `types` are
    the elements' types of its inputs, as onnx numbers them, `makers` the operators that give them.
    """

    node: onnx.NodeProto
    inputs: Sequence[Dims | None]
    outputs: Sequence[Dims | None]
    types: Sequence[int] = ()
    makers: Sequence[str] = ()

    def input(self, place: int) -> Dims:
        """An input's sizes. Raises `Unknown`."""
        return _known(self.inputs, place)

    def output(self, place: int) -> Dims:
        """An output's sizes; outputs that are left out do not count. Raises `Unknown`."""
        return _known(self.outputs, place)

    def has(self, place: int) -> bool:
        """Whether there is such an input."""
        return any(self.node.input[place : place + 1])

    def gives(self, place: int) -> bool:
        """Whether there is such an output."""
        return any(self.node.output[place : place + 1])

    def type(self, place: int) -> int:
        """The type of an input's elements; 0: not known."""
        return self.types[place] if place < len(self.types) else 0

    def follows(self, place: int, operator: str) -> bool:
        """Whether such an operator gives an input."""
        return operator in self.makers[place : place + 1]

    def integer(self, name: str, default: int = 0) -> int:
        """An attribute that is an integer."""
        return integer_of(self.node, name, default)

    def integers(self, name: str) -> list[int]:
        """An attribute that is a list of integers; empty where there is none."""
        return integers_of(self.node, name)

    def text(self, name: str) -> str:
        """An attribute that is text; empty where there is none."""
        return text_of(self.node, name)


def _known(sizes: Sequence[Dims | None], place: int) -> Dims:
    found = sizes[place] if place < len(sizes) else None
    if found is None:
        raise Unknown
    return found
