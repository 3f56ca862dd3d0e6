"""Messages of protobuf, mutated as such: fields are set, cleared, repeated and moved, so that what
comes out is a message again. Texts and bytes come from elsewhere in the message: a digest is not
guessed."""

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

_NUMBERS: Final = (0, 1, 2, 3, 7, 64, 1 << 20, 1 << 31, (1 << 31) - 1, (1 << 63) - 1, (1 << 64) - 1)
_FLOATS: Final = (0.0, -1.0, 1.0, 1e-300, 1e308, math.inf, -math.inf, math.nan)
_BITS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (32, True),
    FieldDescriptor.CPPTYPE_UINT32: (32, False),
    FieldDescriptor.CPPTYPE_INT64: (64, True),
    FieldDescriptor.CPPTYPE_UINT64: (64, False),
}

Flip = Callable[[bytes], bytes]


def mutated(data: bytes, kind: type[Message], random: Random, flip: Flip) -> bytes:
    """A mutation of the message in `data`; `flip` mutates the value of a field of bytes."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        message.Clear()
    for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
        parts = list(_parts(message))
        part = random.choice([part for part in parts if part.DESCRIPTOR.fields])
        fields: Any = part.DESCRIPTOR.fields  # its type differs between implementations
        _change(part, random.choice(fields), random, _Values(parts, random, flip))
    return message.SerializeToString()


def _parts(message: Message) -> Iterator[Message]:
    """The message and all in it."""
    yield message
    for field, value in message.ListFields():
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for part in value if field.is_repeated else (value,):
                yield from _parts(part)


def _change(part: Message, field: FieldDescriptor, random: Random, values: "_Values") -> None:
    nested = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
    value = getattr(part, field.name)
    if field.is_repeated:
        _change_list(value, field, random, values)
    elif random.random() < 0.15:
        part.ClearField(field.name)
    elif nested:
        value.SetInParent()
    else:
        setattr(part, field.name, values.of(field, value))


def _change_list(value: Any, field: FieldDescriptor, random: Random, values: "_Values") -> None:
    """Remove, repeat, exchange, or add a value of a repeated field."""
    place = random.randrange(len(value)) if value else 0
    other = random.randrange(len(value)) if value else 0
    items = list(value)
    match random.randrange(4):
        case 0 if items:
            del items[place]
        case 1 if items:
            items.insert(other, items[place])
        case 2 if items:
            items[place], items[other] = items[other], items[place]
        case _ if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            value.add()
            return
        case _:
            items.append(values.of(field, items[place] if items else None))
    copies = (
        [type(item).FromString(item.SerializeToString()) for item in items]
        if (field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE)
        else items
    )
    del value[:]
    value.extend(copies)


class _Values:
    """Values of fields."""

    def __init__(self, parts: list[Message], random: Random, flip: Flip) -> None:
        self._random, self._flip = random, flip
        self._texts = ["", "x" * 300, "/", "sha256:"]
        self._texts += [
            value
            for part in parts
            for field, found in part.ListFields()
            if field.cpp_type == FieldDescriptor.CPPTYPE_STRING
            for value in (found if field.is_repeated else (found,))
            if isinstance(value, str)
        ]

    def of(self, field: FieldDescriptor, old: Any) -> Any:
        """A value for a field that is no message."""
        random = self._random
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
                return self._flip(old or b"")
            case FieldDescriptor.CPPTYPE_STRING:
                return random.choice(self._texts)
            case FieldDescriptor.CPPTYPE_BOOL:
                return random.random() < 0.5
            case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
                return random.choice(_FLOATS)
            case FieldDescriptor.CPPTYPE_ENUM:
                assert field.enum_type is not None, "an enum has a type"
                return random.choice((*field.enum_type.values_by_number, 99))
            case kind:
                bits, signed = _BITS[kind]
                number = random.choice((*_NUMBERS, random.randrange(64), (old or 0) + 1))
                number %= 1 << bits
                return number - (1 << bits) if signed and number >> (bits - 1) else number
