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
