"""Reads a status that another version of the operator has written.

A status that does not parse loses its invalid fields and no others: after a downgrade the operator
must still know that a job has ended, or the job would run again.
"""

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from shoal_api.schema import parse
from shoal_api.shapes import FieldError

R = TypeVar("R")
_STATUS: Final = "status"
_ROUNDS: Final = 32
_INVALID: Final = object()


def parse_pruned(cls: type[R], document: Mapping[str, object]) -> R | tuple[FieldError, ...]:
    """Parse an object without its status' invalid fields; the errors outside of the status."""
    pruned = document
    value = parse(cls, pruned)
    for _ in range(_ROUNDS):
        errors = value if isinstance(value, tuple) else ()
        wrong = [error.path[1:] for error in errors if error.path[:1] == (_STATUS,)]
        if not wrong:
            return value
        status = _without(pruned.get(_STATUS), wrong)
        if status is _INVALID:
            break
        pruned = {**pruned, _STATUS: status}
        value = parse(cls, pruned)
    return parse(cls, {name: each for name, each in document.items() if name != _STATUS})


def _without(value: object, paths: Sequence[Sequence[str | int]]) -> object:
    """JSON without the values at these paths; where one is missing, without its parent."""
    if not paths:
        return value
    below = {
        path[0]: [each[1:] for each in paths if each[:1] == path[:1]] for path in paths if path
    }
    match value:
        case dict() if all(paths) and below.keys() <= value.keys():
            kept = {name: _without(each, below.get(name, ())) for name, each in value.items()}
            return {name: each for name, each in kept.items() if each is not _INVALID}
        case list() if all(paths):
            items = [_without(each, below.get(index, ())) for index, each in enumerate(value)]
            return [each for each in items if each is not _INVALID]
        case _:
            return _INVALID
