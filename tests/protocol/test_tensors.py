"""Tensors survive the wire, the wire is what the .proto says, and strangers' bytes do no harm."""

import contextlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal_protocol.assembly import ActivationAssembler, Limits, ReceivedActivation
from shoal_protocol.codecs import LinkCodec
from shoal_protocol.frames import (
    MAXIMUM_PAYLOAD_BYTES,
    MalformedFrame,
    TransferError,
    acknowledgement,
    join_frame,
    split_frame,
)
from shoal_protocol.tensors import (
    DTYPES,
    ActivationKey,
    UnsupportedTensor,
    encode_activation,
)
from shoal_protocol.v1 import tensors_pb2 as pb

Array = NDArray[Any]

KEY = ActivationKey(job="ocr", epoch=3, item=17, producer=-1, consumer=0)
DEFAULT = Limits()
CODECS = (pb.NONE, pb.LZ4, pb.ZSTD, pb.ZLIB, pb.FP16)

# ---- what can be sent ----------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def arrays(draw: st.DrawFn, data_type: pb.DataType) -> Array:
    """An array of a type, plain, transposed, strided, or of the other byte order."""
    shape = draw(shapes)
    size = int(np.prod(shape))
    if data_type == pb.STRING:
        strings = np.empty(size, object)
        strings[:] = draw(st.lists(texts, min_size=size, max_size=size))
        return strings.reshape(shape)
    dtype = DTYPES[data_type]
    if data_type == pb.BOOL:
        plain: Array = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), "u1") % 2 == 1
    else:
        # Repetitive bytes, so that codecs have something to gain.
        bits = draw(st.binary(min_size=1, max_size=3)) * (size * dtype.itemsize)
        plain = np.frombuffer(bits[: size * dtype.itemsize], dtype)
    plain = plain.reshape(shape)
    match draw(st.integers(0, 3)):
        case 0:
            return plain.T
        case 1:
            return np.repeat(plain, 2, axis=0)[::2] if plain.ndim else plain
        case 2:
            return plain.astype(plain.dtype.newbyteorder(">"))
        case _:
            return plain


@st.composite
def tensor_sets(draw: st.DrawFn) -> tuple[dict[str, Array], frozenset[str]]:
    tensors: dict[str, Array] = {}
    bfloat16 = set()
    for name in draw(st.lists(st.text(max_size=6), max_size=4, unique=True)):
        data_type = draw(st.sampled_from(list(DTYPES)))
        tensors[name] = draw(arrays(data_type))
        if data_type == pb.BFLOAT16:
            bfloat16.add(name)
    return tensors, frozenset(bfloat16)


def receive(messages: Iterator[bytes], assembler: ActivationAssembler) -> ReceivedActivation:
    *before, last = messages
    for message in before:
        assert assembler.feed(message) is None
    received = assembler.feed(last)
    assert received is not None
    return received


def same(sent: Array, received: Array) -> bool:
    """Same shape and same bits (NaN included)."""
    if sent.shape != received.shape:
        return False
    if sent.dtype == object:
        return bool((sent == received).all())
    return sent.astype(sent.dtype.newbyteorder("<")).tobytes() == received.tobytes()


@given(
    tensor_sets(),
    st.sampled_from([pb.NONE, pb.LZ4, pb.ZSTD, pb.ZLIB]),
    st.sampled_from([1, 3, 64, 1000, MAXIMUM_PAYLOAD_BYTES]),
)
def test_every_tensor_arrives_as_it_was_sent(
    tensors_and_bfloat16: tuple[dict[str, Array], frozenset[str]],
    codec: pb.Codec,
    frame_bytes: int,
) -> None:
    tensors, bfloat16 = tensors_and_bfloat16
    encoded = encode_activation(
        KEY, "pi-4", tensors, transfer=9, codec=codec, bfloat16=bfloat16, frame_bytes=frame_bytes
    )
    received = receive(iter(encoded), ActivationAssembler())
    assert (received.transfer, received.key, received.device) == (9, KEY, "pi-4")
    assert list(received.tensors) == list(tensors)
    assert received.decoded_bytes == encoded.decoded_bytes
    assert received.encoded_bytes == encoded.encoded_bytes
    for name, sent in tensors.items():
        assert same(sent, received.tensors[name])
        assert (received.data_types[name] == pb.BFLOAT16) == (name in bfloat16)
        if sent.dtype != object and sent.size:
            assert received.tensors[name].ctypes.data % 64 == 0


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("frame_bytes", [MAXIMUM_PAYLOAD_BYTES, 100_000])
def test_tensors_of_many_frames_arrive(codec: pb.Codec, frame_bytes: int) -> None:
    generator = np.random.default_rng(0)
    dense = np.maximum(generator.standard_normal((3, 500, 700), np.float32), 0)
    tensors = {"a": dense, "b": np.arange(300_000), "c": np.zeros(100_000, np.float16)}
    messages = list(
        encode_activation(KEY, "", tensors, transfer=1, codec=codec, frame_bytes=frame_bytes)
    )
    assert max(map(len, messages)) <= frame_bytes + 300
    received = receive(iter(messages), ActivationAssembler())
    expected = dense.astype(np.float16).astype(np.float32) if codec == pb.FP16 else dense
    np.testing.assert_array_equal(received.tensors["a"], expected)
    np.testing.assert_array_equal(received.tensors["b"], tensors["b"])


def test_an_activation_without_tensors_is_one_frame() -> None:
    (message,) = encode_activation(KEY, "", {}, transfer=1)
    received = ActivationAssembler().feed(message)
    assert received is not None
    assert received.tensors == {}


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.booleans(), st.binary(max_size=300))
def test_a_frame_is_what_protobuf_writes_and_reads(
    transfer: int, offset: int, last: bool, payload: bytes
) -> None:
    header = pb.FrameHeader(transfer=transfer, offset=offset, last=last)
    message = join_frame(header, payload)
    assert message == pb.Frame(header=header, payload=payload).SerializeToString()
    assert pb.Frame.FromString(message) == pb.Frame(header=header, payload=payload)
    again, rest = split_frame(message)
    assert (again, bytes(rest)) == (header, payload)


def test_every_frame_of_a_transfer_is_what_protobuf_writes() -> None:
    tensors = {"x": np.arange(1000, dtype=np.float32), "y": np.array(["text"], object)}
    for message in encode_activation(KEY, "pi-4", tensors, transfer=1 << 40, frame_bytes=300):
        assert pb.Frame.FromString(message).SerializeToString() == message


def test_a_relay_changes_the_number_and_not_the_payload() -> None:
    tensors = {"x": np.arange(1000)}
    relayed = []
    for message in encode_activation(KEY, "pi-4", tensors, transfer=1, frame_bytes=999):
        header, payload = split_frame(message)
        header.transfer = 2
        relayed.append(join_frame(header, payload))
    received = receive(iter(relayed), ActivationAssembler())
    assert received.transfer == 2
    np.testing.assert_array_equal(received.tensors["x"], tensors["x"])


def test_a_transfer_can_be_sent_again_under_a_new_number() -> None:
    encoded = encode_activation(KEY, "pi-4", {"x": np.ones(9)}, transfer=1)
    assembler = ActivationAssembler()
    assert receive(iter(encoded), assembler).transfer == 1
    assert receive(iter(replace(encoded, transfer=2)), assembler).transfer == 2


def test_numbers_too_large_for_float16_are_sent_whole() -> None:
    tensors = {"x": np.array([1.0, 1e6], np.float32), "i": np.array([np.inf, 1], np.float32)}
    received = receive(
        iter(encode_activation(KEY, "", tensors, transfer=1, codec=pb.FP16)), ActivationAssembler()
    )
    np.testing.assert_array_equal(received.tensors["x"], tensors["x"])
    np.testing.assert_array_equal(received.tensors["i"], tensors["i"])


def test_a_slow_link_learns_to_encode() -> None:
    link = LinkCodec()
    tensors = {"x": np.zeros(100_000, np.float32)}
    assert encode_activation(KEY, "", tensors, transfer=1, codec=link).encoded_bytes == 400_000
    for _ in range(3):
        link.observe_transfer(400_000, 1.0)
    encoded = [encode_activation(KEY, "", tensors, transfer=1, codec=link) for _ in range(5)]
    assert all(activation.encoded_bytes < 40_000 for activation in encoded)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.array([object()]), "not text"),
        (np.array(["\ud800"], object), "not Unicode"),
        (np.array(["2020-01-01"], "M8[D]"), "cannot be sent"),
        (np.zeros(2, np.longdouble), "cannot be sent"),
        (np.zeros(2, [("a", "f4")]), "cannot be sent"),
    ],
)
def test_an_array_that_has_no_place_on_the_wire_is_named(array: Array, reason: str) -> None:
    with pytest.raises(UnsupportedTensor, match=reason) as caught:
        encode_activation(KEY, "", {"mask": array}, transfer=1)
    assert caught.value.name == "mask"


def test_only_sixteen_bit_integers_can_be_bfloat16() -> None:
    with pytest.raises(UnsupportedTensor, match="BFLOAT16 in an array of float32"):
        encode_activation(
            KEY, "", {"x": np.ones(2, np.float32)}, transfer=1, bfloat16=frozenset({"x"})
        )


# ---- what is refused -----------------------------------------------------------------------------


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
    assert_refused(frame, "would take 128 bytes or more, at most 127", Limits(decoded_bytes=127))
    assert_refused(frame, "2 tensors, at most 1", Limits(tensors=1))


def test_strings_are_reckoned_with_what_they_take_in_memory() -> None:
    frame, _ = header_of({"x": np.array([""] * 100, object)})
    assert_refused(frame, "would take 6800 bytes", Limits(decoded_bytes=1000))


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
        ActivationAssembler().feed(acknowledgement(1))


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


@st.composite
def headers(draw: st.DrawFn) -> pb.FrameHeader:
    """A header of the right form with wild numbers."""
    number = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1))
    tensor = st.builds(
        pb.TensorHeader,
        name=st.text(max_size=2),
        dtype=st.integers(-1, 20),
        shape=st.lists(number, max_size=5),
        codec=st.integers(-1, 6),
        shuffled=st.booleans(),
        encoded_bytes=number,
        decoded_bytes=number,
    )
    activation = st.builds(pb.Activation, tensors=st.lists(tensor, max_size=3))
    return draw(
        st.builds(
            pb.FrameHeader,
            transfer=st.integers(0, 1),
            offset=number,
            last=st.booleans(),
            activation=st.one_of(st.none(), activation),
        )
    )


@settings(max_examples=300)
@given(st.lists(st.tuples(headers(), st.binary(max_size=40)), max_size=4))
def test_wild_headers_are_refused_or_read(frames: list[tuple[pb.FrameHeader, bytes]]) -> None:
    assert_refused_or_within_limits([join_frame(header, payload) for header, payload in frames])


def test_frames_follow_one_another_without_gaps() -> None:
    offsets = [split_frame(message)[0].offset for message in messages_of(1, frame_bytes=5)]
    assert all(later - earlier == 5 for earlier, later in pairwise(offsets))
