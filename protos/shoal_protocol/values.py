"""Messages of the protocol as values."""

from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

R = TypeVar("R")


def copied(kind: type[R], message: Message, **given: object) -> R:
    """A value whose other fields are those of the message that have the same names."""
    names = [each.name for each in fields(kind) if each.name not in given]  # type: ignore[arg-type]
    values: dict[str, Any] = {name: getattr(message, name) for name in names}
    return kind(**values, **given)
