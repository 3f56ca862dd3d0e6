"""What a manifest says of a fragment's blocks."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_protocol.blocks import (
    Block,
    Join,
    arena_beside,
    blocks_as_json,
    blocks_from_json,
    joins_as_json,
    joins_from_json,
    least_bytes,
)

SIZES = st.integers(0, 2**40)
NAMES = st.lists(st.text(min_size=1, max_size=8), max_size=4).map(tuple)


@st.composite
def described(draw: st.DrawFn) -> Block:
    working = draw(SIZES)
    return Block(
        model_offset=draw(SIZES),
        model_bytes=draw(SIZES),
        takes=draw(NAMES),
        gives=draw(NAMES),
        held_bytes=draw(SIZES),
        weight_bytes=draw(SIZES),
        working_bytes=working,
        beside_bytes=draw(st.sampled_from([0, working // 2, working])),
        empties_arena=draw(st.booleans()),
        dequantises=draw(st.booleans()),
    )


BLOCKS = st.lists(described(), min_size=2, max_size=5)
END = 2**42


@given(BLOCKS)
def test_what_is_written_is_read(blocks: list[Block]) -> None:
    assert blocks_from_json(json.loads(json.dumps(blocks_as_json(blocks))), END) == tuple(blocks)


@given(BLOCKS)
def test_the_smallest_budget_holds_each_block_while_it_runs(blocks: list[Block]) -> None:
    held = sum(block.held_bytes for block in blocks)
    assert all(
        held + block.weight_bytes + block.working_bytes <= least_bytes(blocks) for block in blocks
    )


def working(*sizes: int, emptied: tuple[int, ...] = ()) -> list[Block]:
    """Blocks of which only what they work with matters."""
    return [
        Block(
            model_offset=0,
            model_bytes=0,
            takes=(),
            gives=(),
            held_bytes=0,
            weight_bytes=0,
            working_bytes=size,
            empties_arena=index in emptied,
        )
        for index, size in enumerate(sizes)
    ]


def test_what_the_neediest_block_took_stays_unless_the_arena_is_emptied() -> None:
    assert arena_beside(working(3, 5, 4)) == (5, 5, 5)
    assert arena_beside(working(3, 5, 4, 1, 2, 1, emptied=(0, 3))) == (3, 5, 5, 1, 2, 2)


def test_what_a_node_takes_beside_the_arena_is_there_with_what_others_have_left_in_it() -> None:
    blocks = [replace(each, beside_bytes=2) for each in working(3, 5, 6)]
    blocks[1] = replace(blocks[1], beside_bytes=0)
    assert arena_beside(blocks) == (5 + 2, 5, 5 + 2)
    emptied = [replace(each, empties_arena=index != 1) for index, each in enumerate(blocks)]
    assert arena_beside(emptied) == (3, 5, 6)


def test_an_arena_that_keeps_the_last_items_values_counts_for_all_blocks() -> None:
    assert arena_beside(working(3, 5, 4, emptied=(1,))) == (5, 5, 5)


@pytest.mark.parametrize("flag", ["empties_arena", "dequantises", "beside_bytes"])
def test_a_manifest_says_of_blocks_only_what_is_so(flag: str) -> None:
    assert all(flag not in each for each in blocks_as_json(working(1, 2)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weight_bytes": -1}, "block 1: weight_bytes is -1"),
        ({"weight_bytes": True}, "block 1: weight_bytes is True"),
        ({"beside_bytes": 1}, "block 1: beside_bytes is 1, working_bytes is 0"),
        ({"takes": "x"}, "block 1: takes are not names"),
        ({"gives": [1]}, "block 1: gives are not names"),
        ({"model_offset": END}, "block 1 is beyond the end"),
    ],
)
def test_blocks_of_strangers_are_refused(change: dict[str, object], text: str) -> None:
    block = Block(
        model_offset=0,
        model_bytes=1,
        takes=(),
        gives=("y",),
        held_bytes=0,
        weight_bytes=0,
        working_bytes=0,
    )
    value = json.loads(json.dumps(blocks_as_json([block, block])))
    value[1].update(change)
    with pytest.raises(ValueError, match=text):
        blocks_from_json(value, END)


@pytest.mark.parametrize("value", [None, {}, [], [1, 2], "blocks"])
def test_what_are_no_blocks_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="block"):
        blocks_from_json(value, END)


JOIN = Join(output="y", axis=2, parts=("y.0", "y.1"), sizes=(32, 5))


def test_joins_that_are_written_are_read() -> None:
    assert joins_from_json(json.loads(json.dumps(joins_as_json([JOIN])))) == (JOIN,)
    assert joins_from_json(None) == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"output": 1},
        {"axis": -1},
        {"parts": []},
        {"parts": ["y.0"]},
        {"parts": ["y.0", "y.0"]},
        {"parts": ["y.0", 1]},
        {"sizes": [32, 0]},
        {"sizes": [32, "5"]},
    ],
)
def test_what_is_no_join_is_refused(wrong: dict[str, object]) -> None:
    (value,) = joins_as_json([JOIN])
    with pytest.raises(ValueError, match=r"join|part"):
        joins_from_json([value | wrong])
