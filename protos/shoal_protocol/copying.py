"""Values made of others that have fields of the same names, such as messages of the protocol."""

from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

R = TypeVar("R")


def copied(kind: type[R], source: object, **given: object) -> R:
    """A value whose other fields are those of the source that have the same names."""
    names = [each.name for each in fields(kind) if each.name not in given]  # type: ignore[arg-type]
    values: dict[str, Any] = {name: getattr(source, name) for name in names}
    return kind(**values, **given)


def plain(message: Message) -> dict[str, Any]:
    """A message for JSON: numbers are numbers, which protobuf's own JSON has as text, and a field
    is missing only where absence means something. It has no bytes and no maps."""
    return {
        field.name: _plain(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _plain(field: Any, value: Any) -> Any:
    if field.is_repeated:
        return [_one(field, each) for each in value]
    return _one(field, value)


def _one(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if field.enum_type is not None and value in field.enum_type.values_by_number:
        return field.enum_type.values_by_number[value].name
    return value
