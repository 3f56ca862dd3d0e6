"""A record as the JSON that a manifest would write; `schema.parse` reads the same value back."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum

from shoal_api.schema import json_name, members
from shoal_api.shapes import Quantity

Json = dict[str, object]


def write(record: object) -> Json:
    """An object's fields by the names that a manifest writes; what is absent or empty is left out.

    Quantities come out as whole numbers of their unit, or of its thousandths.
    """
    assert is_dataclass(record), f"{type(record)} is no record"
    written: Json = {}
    declared = members(type(record))
    for each in fields(record):
        value = getattr(record, each.name)
        if value is None or (isinstance(value, tuple | Mapping) and not value):
            continue
        name = json_name(each.name)
        shape = declared[name].shape
        in_thousandths = isinstance(shape, Quantity) and shape.per_unit == 1000
        written[name] = f"{value}m" if in_thousandths else _write(value)
    return written


def _write(value: object) -> object:
    match value:
        case Enum():
            return value.value
        case tuple() | list():
            return [_write(item) for item in value]
        case Mapping():
            return {name: _write(item) for name, item in value.items()}
        case bool() | int() | float() | str() | None:
            return value
        case _:
            return write(value)
