"""The table of cuts as a worker prints it, and what is refused of what it may have printed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragment_pools import MIB, cut_table
from shoal_protocol.cut_table import TableRefused, table_from_json, table_to_json

TABLE = cut_table([10**8] * 3, [MIB] * 3)


def changed(**values: object) -> str:
    return json.dumps(json.loads(table_to_json(TABLE)) | values)


def test_a_table_is_read_as_it_was_written() -> None:
    assert table_from_json(table_to_json(TABLE)) == TABLE


def test_a_part_of_a_table_has_the_fragments_between_the_cuts_that_are_left() -> None:
    part = TABLE.only([2])
    assert part.tensors == ("t2",)
    assert part.candidate(0, 1) == TABLE.candidate(0, 2)
    assert part.candidate(0, 2) == TABLE.candidate(0, 3)
    assert TABLE.only([1, 2]) == TABLE


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "not a table of cuts of version 1"),
        (changed(version=2), "not a table of cuts of version 1"),
        (changed(model_digest="sha256:short"), "not a table of cuts"),
        (changed(tensors=["t1", "t1"]), "a cut is named twice"),
        (changed(tensors=["t1", 2]), "2 is not a tensor's name"),
        (changed(rows=[]), "0 rows for 2 cuts"),
        (changed(rows=[[[1] * 9]]), "a row does not have 3 fragments"),
        (changed(tensors=[], rows=[[[1] * 8]]), "a fragment does not have 9 numbers"),
        (changed(tensors=[], rows=[[[-1] * 9]]), "-1 is not a count"),
        (changed(tensors=[], rows=[[[1, 2, 3, *[None] * 6]]]), "the least is over the resident"),
    ],
)
def test_what_is_no_table_is_refused_with_a_reason(text: str, problem: str) -> None:
    with pytest.raises(TableRefused, match=problem):
        table_from_json(text)


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists))
def test_nothing_else_is_raised_whatever_the_rows_are(rows: Any) -> None:
    for text in (changed(rows=rows), changed(rows=[[rows]], tensors=[]), changed(tensors=rows)):
        try:
            read = table_from_json(text)
        except TableRefused:
            continue
        assert table_from_json(table_to_json(read)) == read
