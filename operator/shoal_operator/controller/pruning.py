"""Reads a status that another version of the operator has written.

A status that does not parse loses its invalid fields and no others: after a downgrade the operator
must still know that a job has ended, or the job would run again.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from shoal_api.schema import parse
from shoal_api.shapes import FieldError

R = TypeVar("R")
_STATUS: Final = "status"
_ROUNDS: Final = 32


def parse_pruned(cls: type[R], document: Mapping[str, object]) -> R | tuple[FieldError, ...]:
    """Parse an object without its status' invalid fields; the errors outside of the status."""
    pruned = dict(document)
    value = parse(cls, pruned)
    for _ in range(_ROUNDS):
        wrong = [error.path for error in _errors(value) if error.path[:1] == (_STATUS,)]
        if not wrong:
            return value
        pruned = copy.deepcopy(pruned)
        # From the end, so that the indices of earlier items stay valid.
        for path in sorted(wrong, key=_order, reverse=True):
            _drop(pruned, path)
        value = parse(cls, pruned)
    return parse(cls, {name: each for name, each in document.items() if name != _STATUS})


def _errors(value: object) -> tuple[FieldError, ...]:
    return value if isinstance(value, tuple) else ()


def _order(path: Sequence[str | int]) -> list[tuple[int, str]]:
    return [(step, "") if isinstance(step, int) else (-1, step) for step in path]


def _drop(document: dict[str, object], path: Sequence[str | int]) -> None:
    """Remove the value at a path; of a missing value, the innermost parent that exists."""
    place: object = document
    above: list[tuple[object, str | int]] = []
    for step in path:
        above.append((place, step))
        match place, step:
            case dict(), str() if step in place:
                place = place[step]
            case list(), int() if step < len(place):
                place = place[step]
            case _:
                above.pop()
                break
    match above[-1]:
        case dict() as table, name:
            table.pop(name, None)
        case list() as items, int(index):
            del items[index]
        case _:
            raise AssertionError(f"nothing at {path}")
