"""Bytes of strangers are refused or read, and do no harm."""

import contextlib
import struct
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.test_tensors import CODECS, DEFAULT, KEY, Array, receive
from shoal_protocol.assembly import ActivationAssembler, Limits
from shoal_protocol.frames import (
    MalformedFrame,
    TransferError,
    acknowledgement,
    join_frame,
    split_frame,
)
from shoal_protocol.tensors import encode_activation
from shoal_protocol.v1 import tensors_pb2 as pb


def header_of(tensors: Mapping[str, Array], codec: pb.Codec = pb.NONE) -> tuple[pb.Frame, bytes]:
    (message,) = encode_activation(KEY, "", tensors, transfer=7, codec=codec)
    frame = pb.Frame.FromString(message)
    return frame, frame.payload


def assert_refused(frame: pb.Frame, reason: str, limits: Limits = DEFAULT) -> None:
    with pytest.raises(MalformedFrame, match=reason) as caught:
        ActivationAssembler(limits).feed(frame.SerializeToString())
    assert caught.value.transfer == 7
    assert caught.value.outcome == pb.Acknowledgement.REFUSED


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": [2**63, 2]}, "32 bytes do not make"),
        ({"shape": [2**63, 0], "encoded_bytes": 0, "decoded_bytes": 0}, "too large"),
        ({"shape": [2**32, 2**32, 2**32]}, "32 bytes do not make"),
        ({"shape": [7]}, "32 bytes do not make"),
        ({"shape": [1] * 40}, "rank 40"),
        ({"dtype": 99}, "data type 99 is not known"),
        ({"dtype": pb.DATA_TYPE_UNSPECIFIED}, "data type 0 is not known"),
        ({"codec": 99}, "codec 99"),
        ({"encoded_bytes": 31}, "codec 0 cannot make"),
        ({"shuffled": True}, "codec 0 cannot make"),
        ({"codec": pb.FP16}, "codec 4 cannot make"),
        ({"codec": pb.ZSTD}, "codec 2 cannot make"),
        ({"name": "n" * 2000}, "name of 2000 characters"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(change: dict[str, Any], reason: str) -> None:
    frame, _ = header_of({"x": np.arange(8, dtype=np.float32)})
    tensor = frame.header.activation.tensors[0]
    for field, value in change.items():
        if field == "shape":
            del tensor.shape[:]
            tensor.shape.extend(value)
        else:
            setattr(tensor, field, value)
    assert_refused(frame, reason)


def test_what_is_above_the_limit_is_refused_before_it_is_received() -> None:
    frame, _ = header_of({"x": np.zeros(8), "y": np.zeros(8)})
    assert_refused(frame, "would take 128 B or more, at most 127 B", Limits(decoded_bytes=127))
    assert_refused(frame, "2 tensors, at most 1", Limits(tensors=1))


def test_strings_are_reckoned_with_what_they_take_in_memory() -> None:
    frame, _ = header_of({"x": np.array([""] * 100, object)})
    assert_refused(frame, "would take 6.6 KiB or more, at most 1000 B", Limits(decoded_bytes=1000))


def test_admission_reckons_strings_with_what_they_take_in_memory() -> None:
    frame, _ = header_of({"x": np.array([""] * 100, object), "y": np.zeros(8)})
    asked: list[int] = []
    ActivationAssembler(admit=lambda _, size: asked.append(size)).feed(frame.SerializeToString())
    assert asked == [6800 + 64]


def test_two_tensors_of_one_name_are_refused() -> None:
    frame, _ = header_of({"x": np.zeros(8), "y": np.zeros(8)})
    frame.header.activation.tensors[1].name = "x"
    assert_refused(frame, "two tensors of one name")


def test_more_or_fewer_bytes_than_stated_are_refused() -> None:
    frame, payload = header_of({"x": np.zeros(8)})
    frame.payload = payload + b"."
    assert_refused(frame, "more than the 64 bytes")
    frame.payload = payload[:-1]
    assert_refused(frame, "63 of 64 bytes, last: True")


@pytest.mark.parametrize("codec", [pb.LZ4, pb.ZSTD, pb.ZLIB])
def test_a_bomb_is_not_decoded_past_its_stated_size(codec: pb.Codec) -> None:
    bomb, payload = header_of({"x": np.zeros(4 << 20, np.uint8)}, codec)
    assert len(payload) < (4 << 20) / 200
    tensor = bomb.header.activation.tensors[0]
    tensor.decoded_bytes = len(payload) + 1
    tensor.shape[:] = [len(payload) + 1]
    assert_refused(bomb, "tensor 'x': ")
    tensor.decoded_bytes = tensor.shape[0] = 8 << 20
    assert_refused(bomb, "tensor 'x': ")


def test_damaged_content_is_refused() -> None:
    frame, payload = header_of({"x": np.array([True])})
    frame.payload = b"\x02"
    assert_refused(frame, "neither 0 nor 1")
    frame, payload = header_of({"x": np.array(["ab", "c"], object)})
    frame.payload = payload[:6] + struct.pack("<I", 2**32 - 1) + payload[10:]
    assert_refused(frame, "the text ends within element 1")
    frame.payload = payload.replace(b"ab", b"\xff\xff")
    assert_refused(frame, "element 0")
    del frame.header.activation.tensors[0].shape[:]
    frame.payload = payload
    assert_refused(frame, "5 bytes after the last element")


def messages_of(transfer: int, frame_bytes: int = 8) -> list[bytes]:
    tensors = {"x": np.arange(4)}
    return list(encode_activation(KEY, "", tensors, transfer=transfer, frame_bytes=frame_bytes))


def test_after_a_refusal_the_rest_is_passed_over_and_the_next_transfer_is_taken() -> None:
    refused_outcome = pb.Acknowledgement.BUSY

    def admit(activation: pb.Activation, decoded_bytes: int) -> None:
        assert (activation.key.item, decoded_bytes) == (17, 32)
        if admissions.pop(0):
            raise TransferError("no room for 32 bytes", outcome=refused_outcome)

    admissions = [True, False]
    assembler = ActivationAssembler(admit=admit)
    first, *rest = messages_of(1)
    with pytest.raises(TransferError, match="transfer 1: no room") as caught:
        assembler.feed(first)
    assert (caught.value.transfer, caught.value.outcome) == (1, refused_outcome)
    assert [assembler.feed(message) for message in rest] == [None] * 3
    assert receive(iter(messages_of(2)), assembler).transfer == 2


def test_frames_out_of_order_are_refused_once() -> None:
    first, second, third, last = messages_of(1)
    assembler = ActivationAssembler()
    assembler.feed(first)
    with pytest.raises(MalformedFrame, match="offset 16 where 8 comes next"):
        assembler.feed(third)
    assert assembler.feed(second) is None
    assert assembler.feed(last) is None
    with pytest.raises(MalformedFrame, match="belongs to no activation"):
        assembler.feed(last)


def test_transfers_do_not_interleave() -> None:
    assembler = ActivationAssembler()
    assembler.feed(messages_of(1)[0])
    with pytest.raises(MalformedFrame, match="before transfer 1 has ended"):
        assembler.feed(messages_of(2)[0])
    with pytest.raises(MalformedFrame, match="acknowledgement"):
        ActivationAssembler().feed(bytes(acknowledgement(1)))


# ---- fuzzing -------------------------------------------------------------------------------------


def assert_refused_or_within_limits(messages: list[bytes]) -> None:
    """Feed anything to an assembler: it may refuse, in its own way, and nothing else; what it makes
    of the rest keeps the limits.
    """
    limits = Limits(decoded_bytes=1 << 20)
    assembler = ActivationAssembler(limits)
    for message in messages:
        with contextlib.suppress(MalformedFrame):
            received = assembler.feed(message)
            if received is not None:
                assert received.decoded_bytes <= limits.decoded_bytes
                assert len(received.tensors) <= limits.tensors
                arrays = [each for each in received.tensors.values() if each.dtype != object]
                assert sum(each.nbytes for each in arrays) <= received.decoded_bytes


@given(st.lists(st.binary(max_size=200), max_size=3))
def test_random_bytes_are_refused_or_ignored(messages: list[bytes]) -> None:
    assert_refused_or_within_limits(messages)


@settings(max_examples=300)
@given(st.data(), st.sampled_from(CODECS))
def test_damaged_transfers_are_refused_or_read(data: st.DataObject, codec: pb.Codec) -> None:
    tensors = {
        "x": np.zeros((3, 40), np.float32),
        "t": np.array(["a", "bc"], object),
        "b": np.zeros(30, bool),
    }
    encoded = encode_activation(KEY, "pi-4", tensors, transfer=1, codec=codec, frame_bytes=200)
    messages = [bytearray(message) for message in encoded]
    for _ in range(data.draw(st.integers(1, 4))):
        message = data.draw(st.sampled_from(messages))
        if message:
            position = data.draw(st.integers(0, len(message) - 1))
            message[position] = data.draw(st.integers(0, 255))
            if data.draw(st.booleans()):
                del message[position : position + data.draw(st.integers(0, 5))]
    assert_refused_or_within_limits(
        [bytes(message) for message in data.draw(st.permutations(messages))]
    )


WILD_NUMBERS = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1))
WILD_TENSORS = st.builds(
    pb.TensorHeader,
    name=st.text(max_size=2),
    dtype=st.integers(-1, 20),
    shape=st.lists(WILD_NUMBERS, max_size=5),
    codec=st.integers(-1, 6),
    shuffled=st.booleans(),
    encoded_bytes=WILD_NUMBERS,
    decoded_bytes=WILD_NUMBERS,
)
WILD_HEADERS = st.builds(
    pb.FrameHeader,
    transfer=st.integers(0, 1),
    offset=WILD_NUMBERS,
    last=st.booleans(),
    activation=st.one_of(
        st.none(), st.builds(pb.Activation, tensors=st.lists(WILD_TENSORS, max_size=3))
    ),
)


@settings(max_examples=150)
@given(st.lists(st.tuples(WILD_HEADERS, st.binary(max_size=40)), max_size=4))
def test_wild_headers_are_refused_or_read(frames: list[tuple[pb.FrameHeader, bytes]]) -> None:
    assert_refused_or_within_limits([join_frame(header, payload) for header, payload in frames])


def test_frames_follow_one_another_without_gaps() -> None:
    offsets = [split_frame(message)[0].offset for message in messages_of(1, frame_bytes=5)]
    assert all(later - earlier == 5 for earlier, later in pairwise(offsets))
