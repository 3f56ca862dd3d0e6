"""Lists of values in a file are stepped over as far as they have its form, and no further."""

import mmap

import onnx
import pytest

from shoal_compiler import lists
from shoal_compiler.lists import listed

FLOATS, INTS, STRINGS = (7 << 3 | 5, 8 << 3 | 0, 9 << 3 | 2)


def mapped(content: bytes) -> mmap.mmap:
    data = mmap.mmap(-1, len(content))
    data.write(content)
    return data


LISTS = [
    (FLOATS, onnx.AttributeProto(floats=[1.0, -2.5, 3e38])),
    (INTS, onnx.AttributeProto(ints=[0, 1, 127, 128, 1 << 40, -1, -(1 << 63), 64, 64])),
    (STRINGS, onnx.AttributeProto(strings=[b"", b"LEAF", b"JJJ", b"x" * 127])),
]


@pytest.mark.parametrize(("tag", "message"), LISTS)
@pytest.mark.parametrize("behind", [b"", b"\x12\x01a", b"\x00", b"\xff" * 30])
def test_a_list_ends_with_its_last_value(
    tag: int, message: onnx.AttributeProto, behind: bytes
) -> None:
    content = message.SerializeToString()
    values = next(each for _, each in message.ListFields())
    whole = content + behind
    assert listed(mapped(whole), tag, 0, len(whole)) == (len(values), len(content))


@pytest.mark.parametrize(("tag", "message"), LISTS)
def test_a_value_that_is_cut_off_is_not_one(tag: int, message: onnx.AttributeProto) -> None:
    content = message.SerializeToString()
    for end in range(len(content)):
        count, position = listed(mapped(content), tag, 0, end)
        # A parser reads as many values, and none is whole in what is left.
        parsed = onnx.AttributeProto.FromString(content[:position])
        assert count == sum(len(values) for _, values in parsed.ListFields())
        assert listed(mapped(content), tag, position, end) == (0, position)


@pytest.mark.parametrize(("tag", "message"), LISTS)
def test_chunks_of_a_list_are_the_list(
    tag: int, message: onnx.AttributeProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = message.SerializeToString() * 40
    monkeypatch.setattr(lists, "CHUNK_BYTES", 200)
    data, position, total = mapped(content), 0, 0
    while position < len(content):
        count, after = listed(data, tag, position, len(content))
        assert 0 < after - position <= 200
        position, total = after, total + count
    assert total == 40 * len(next(each for _, each in message.ListFields()))


def test_a_number_of_too_many_bytes_ends_a_list() -> None:
    content = bytes([INTS, 5, INTS]) + b"\x80" * 10 + b"\x01"
    assert listed(mapped(content), INTS, 0, len(content)) == (1, 2)


def test_another_field_is_no_part_of_a_list() -> None:
    content = bytes([INTS, 5, INTS + 8, 5, INTS, 5])
    assert listed(mapped(content), INTS, 0, len(content)) == (1, 2)
    assert listed(mapped(content), STRINGS, 0, len(content)) == (0, 0)
