"""Tensors survive the wire, and the wire is what the .proto says."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal_protocol.assembly import ActivationAssembler, Limits, ReceivedActivation
from shoal_protocol.codecs import LinkCodec
from shoal_protocol.frame_sizes import MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.frames import (
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
    dtypes = {each.name: each.dtype for each in encoded.header.activation.tensors}
    for name, sent in tensors.items():
        assert same(sent, received.tensors[name])
        assert (dtypes[name] == pb.BFLOAT16) == (name in bfloat16)
        if sent.dtype != object and sent.size:
            assert received.tensors[name].flags.aligned


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


@given(st.integers(0, 2**64 - 1), st.text(max_size=150), st.integers(1, 40_000))
def test_the_payload_of_a_transfer_of_one_frame_begins_where_an_array_may(
    transfer: int, device: str, size: int
) -> None:
    tensors = {"x": np.zeros(size, np.uint8)}
    (message,) = encode_activation(KEY, device, tensors, transfer=transfer)
    _, payload = split_frame(message)
    assert len(payload) == size
    assert (len(message) - size) % 16 == 0


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
    encoded.header.transfer = 2
    assert receive(iter(encoded), assembler).transfer == 2


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
    with pytest.raises(UnsupportedTensor, match=f"^tensor 'mask': .*{reason}"):
        encode_activation(KEY, "", {"mask": array}, transfer=1)


def test_only_sixteen_bit_integers_can_be_bfloat16() -> None:
    with pytest.raises(UnsupportedTensor, match="BFLOAT16 in an array of float32"):
        encode_activation(
            KEY, "", {"x": np.ones(2, np.float32)}, transfer=1, bfloat16=frozenset({"x"})
        )


def test_many_short_texts_are_encoded_in_the_memory_of_their_bytes() -> None:
    texts = {"x": np.full(200_000, "ab")}
    tracemalloc.start()
    try:
        encoded = encode_activation(KEY, "", texts, transfer=1)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert encoded.encoded_bytes == 200_000 * 6
    assert peak_bytes < 2 * encoded.encoded_bytes
