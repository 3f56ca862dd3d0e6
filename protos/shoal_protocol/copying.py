"""Values made of others that have fields of the same names, such as messages of the protocol."""

from dataclasses import fields
from typing import Any, TypeVar

R = TypeVar("R")


def copied(kind: type[R], source: object, **given: object) -> R:
    """A value whose other fields are those of the source that have the same names."""
    names = [each.name for each in fields(kind) if each.name not in given]  # type: ignore[arg-type]
    values: dict[str, Any] = {name: getattr(source, name) for name in names}
    return kind(**values, **given)
