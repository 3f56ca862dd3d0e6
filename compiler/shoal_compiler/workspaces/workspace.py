"""What is said of a node: what its kernel takes while it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shoal_compiler.shaped import Shaped
from shoal_compiler.tensor_types import bits_of

FLOAT_BYTES: Final = 4
THREADS: Final = 4
"""So many have what each needs for itself, where that is much."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes of the arena, one after the other, and beside it."""

    arena: tuple[int, ...] = ()
    beside_bytes: int = 0


Rule = Callable[[Shaped], Workspace]


def floats(*numbers: int, beside: int = 0) -> Workspace:
    """So many numbers in single precision."""
    return Workspace(tuple(FLOAT_BYTES * each for each in numbers if each), FLOAT_BYTES * beside)


def numbers(shaped: Shaped, *counts: int, place: int = 0) -> Workspace:
    """So many numbers of an input's type; halves, and what is smaller, become single precision."""
    size = max(FLOAT_BYTES, (bits_of(shaped.type(place)) or 0) // 8)
    return Workspace(tuple(size * each for each in counts if each))
