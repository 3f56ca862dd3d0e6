"""Operators that read rows of tables: of such a table an item has only those in memory."""

from collections.abc import Mapping
from typing import Final, NamedTuple


class RowReader(NamedTuple):
    """`tables` and `rows` are positions of inputs: of which rows are read, and which says what
    rows. It is so where the attribute `axis`, if there is one, is 0."""

    tables: tuple[int, ...]
    rows: int
    axis: str = ""


ROW_READERS: Final[Mapping[str, RowReader]] = {
    "Gather": RowReader((0,), 1, "axis"),
    "GatherBlockQuantized": RowReader((0, 2, 3), 1, "gather_axis"),
    "EmbedLayerNormalization": RowReader((2, 3, 4), 0),
}


class Element(NamedTuple):
    """A type of a table's elements: what numpy calls one of that size, and its number in ONNX."""

    code: str
    number: int


ELEMENTS: Final[Mapping[str, Element]] = {
    "float": Element("f4", 1),
    "uint8": Element("u1", 2),
    "int8": Element("i1", 3),
    "uint16": Element("u2", 4),
    "int16": Element("i2", 5),
    "int32": Element("i4", 6),
    "int64": Element("i8", 7),
    "bool": Element("?", 9),
    "float16": Element("f2", 10),
    "double": Element("f8", 11),
    "uint32": Element("u4", 12),
    "uint64": Element("u8", 13),
    "bfloat16": Element("u2", 16),
    "float8e4m3fn": Element("u1", 17),
    "float8e4m3fnuz": Element("u1", 18),
    "float8e5m2": Element("u1", 19),
    "float8e5m2fnuz": Element("u1", 20),
}
"""Those of which rows are whole bytes, by ONNX's names in lower case: a device can read them from
the file of a table."""
