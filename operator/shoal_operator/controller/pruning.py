"""What can be read of a status that another version of the operator has written.

A status that does not parse loses what is wrong with it, and nothing else: how a job has ended must
be known after a downgrade too, or it would run again.
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
    """Read an object without what is wrong in its status; the errors of what else is."""
    pruned = dict(document)
    value = parse(cls, pruned)
    for _ in range(_ROUNDS):
        wrong = [error.path for error in _errors(value) if error.path[:1] == (_STATUS,)]
        if not wrong:
            return value
        pruned = copy.deepcopy(pruned)
        # From the end, so that the places of what comes before stay.
        for path in sorted(wrong, key=_order, reverse=True):
            _drop(pruned, path)
        value = parse(cls, pruned)
    return parse(cls, {name: each for name, each in document.items() if name != _STATUS})


def _errors(value: object) -> tuple[FieldError, ...]:
    return value if isinstance(value, tuple) else ()


def _order(path: Sequence[str | int]) -> list[tuple[int, str]]:
    return [(step, "") if isinstance(step, int) else (-1, step) for step in path]


def _drop(document: dict[str, object], path: Sequence[str | int]) -> None:
    """Remove what is there at a path; where something is missing, what it is missing from."""
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
