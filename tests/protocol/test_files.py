"""Files of fragments arrive whole, resume where they broke off, and lie at their peril."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_protocol.files import FileReceiver, file_frames
from shoal_protocol.frames import MalformedFrame, acknowledgement, join_frame, split_frame
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest, FileSlice, Frame, FrameHeader

DIGEST = "sha256:" + "0" * 64


def request(offset: int = 0, part_bytes: int = 0) -> FetchFragmentRequest:
    return FetchFragmentRequest(digest=DIGEST, file="weights.bin", offset=offset, bytes=part_bytes)


@given(st.binary(max_size=500), st.integers(1, 100), st.data())
def test_a_file_arrives_from_any_offset(
    content: bytes, frame_bytes: int, data: st.DataObject
) -> None:
    asked = request(data.draw(st.integers(0, len(content))))
    receiver = FileReceiver(asked, limit_bytes=len(content))
    written = bytearray(content[: asked.offset])
    for message in file_frames(io.BytesIO(content), asked, len(content), frame_bytes=frame_bytes):
        assert Frame.FromString(message).SerializeToString() == message
        assert not receiver.complete
        position = receiver.position
        piece = receiver.feed(message)
        assert position == len(written)
        written += piece
    assert receiver.complete
    assert receiver.file_bytes == len(content)
    assert written == content


@given(st.binary(min_size=1, max_size=500), st.integers(1, 100), st.integers(1, 600))
def test_a_file_arrives_in_parts(content: bytes, frame_bytes: int, part_bytes: int) -> None:
    written = bytearray()
    while len(written) < len(content):
        asked = request(len(written), part_bytes)
        receiver = FileReceiver(asked, limit_bytes=len(content))
        source = io.BytesIO(content)
        for message in file_frames(source, asked, len(content), frame_bytes=frame_bytes):
            written += receiver.feed(message)
        assert receiver.complete
        assert len(written) == min(len(content), asked.offset + part_bytes)
    assert written == content


def test_more_than_the_part_that_was_asked_for_is_refused() -> None:
    receiver = FileReceiver(request(part_bytes=2), limit_bytes=6)
    (whole,) = file_frames(io.BytesIO(b"abcdef"), request(), 6)
    with pytest.raises(MalformedFrame, match="6 of 2 bytes"):
        receiver.feed(whole)


def test_an_offset_past_the_end_cannot_be_served() -> None:
    with pytest.raises(ValueError, match="offset 4 is past the 3 bytes"):
        next(file_frames(io.BytesIO(b"abc"), request(4), 3))


def test_a_file_shorter_than_thought_is_noticed_by_the_sender() -> None:
    with pytest.raises(EOFError, match="ends at 3 of 4 bytes"):
        list(file_frames(io.BytesIO(b"abc"), request(), 4, frame_bytes=3))


def lies() -> dict[str, list[bytes]]:
    """Answers to a request that are wrong, by what the receiver says to them."""
    first, second, third = file_frames(io.BytesIO(b"abcdef"), request(), 6, frame_bytes=2)
    payload = split_frame(second)[1]
    named = FileSlice(digest=DIGEST, file="weights.bin", file_bytes=6)
    other = FileSlice(digest=DIGEST, file="model.onnx", file_bytes=6)
    return {
        "offset 4 where 2 comes next": [first, third],
        "another transfer begins": [first, first],
        "a frame after the last": [first, second, third, third],
        "does not describe a file": [second],
        "not what was asked": [join_frame(FrameHeader(file=other), payload)],
        "last: True": [join_frame(FrameHeader(file=named, last=True), payload)],
        "7 of 6 bytes": [first, second, join_frame(FrameHeader(offset=4, last=True), b"xyz")],
        "has 7 bytes, at most 6": [
            next(file_frames(io.BytesIO(b"abcdefg"), request(), 7, frame_bytes=2))
        ],
        "does not start with a header": [b"not a frame"],
    } | {"does not describe a file ": [bytes(acknowledgement(1))]}


@pytest.mark.parametrize("reason", list(lies()))
def test_a_lie_is_refused(reason: str) -> None:
    *before, last = lies()[reason]
    receiver = FileReceiver(request(), limit_bytes=6)
    for message in before:
        receiver.feed(message)
    with pytest.raises(MalformedFrame, match=reason.strip()):
        receiver.feed(last)


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_random_bytes_are_refused(messages: list[bytes]) -> None:
    receiver = FileReceiver(request(), limit_bytes=100)
    for message in messages:
        with pytest.raises(MalformedFrame):
            receiver.feed(message)
