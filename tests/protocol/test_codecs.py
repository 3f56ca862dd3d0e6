"""Codecs give back what they took, within bounds, and are used where they pay."""

import zlib

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shoal_protocol.codecs import (
    CodecError,
    CodecSample,
    LinkCodec,
    choose_codec,
    decode,
    encode,
)
from shoal_protocol.v1 import tensors_pb2 as pb

LOSSLESS = [pb.NONE, pb.LZ4, pb.ZSTD, pb.ZLIB]
EDGE = ("ocr", 0, 1, "x")


@given(st.sampled_from(LOSSLESS), st.sampled_from([1, 2, 4, 8]), st.binary(max_size=100))
def test_lossless_codecs_give_the_same_bytes_back(
    codec: pb.Codec, element_bytes: int, pattern: bytes
) -> None:
    data = pattern * element_bytes
    encoded = encode(memoryview(data), codec, element_bytes=element_bytes)
    assert encoded is not None
    into = memoryview(bytearray(len(data)))
    decode(encoded[0], into, codec, shuffled=encoded[1], element_bytes=element_bytes)
    assert into == data


def test_the_shuffle_makes_dense_numbers_smaller() -> None:
    data = np.random.default_rng(0).standard_normal(50_000, np.float32).data.cast("B")
    sizes = {}
    for width in (1, 4):
        encoded = encode(data, pb.ZSTD, element_bytes=width)
        assert encoded is not None
        sizes[width] = len(encoded[0])
    assert sizes[4] < 0.9 * len(data) < sizes[1]


def test_float16_is_within_its_precision() -> None:
    numbers = np.linspace(-1000, 1000, 1001, dtype=np.float32)
    encoded = encode(numbers.data.cast("B"), pb.FP16, element_bytes=4)
    assert encoded is not None
    into = np.empty_like(numbers)
    decode(encoded[0], into.data.cast("B"), pb.FP16, shuffled=False, element_bytes=4)
    np.testing.assert_allclose(into, numbers, rtol=2**-11)


def test_float16_does_not_turn_a_number_into_infinity() -> None:
    too_large = np.array([65520, 1], np.float32)
    assert encode(too_large.data.cast("B"), pb.FP16, element_bytes=4) is None
    infinite = np.array([np.inf, -np.inf, np.nan], np.float32)
    assert encode(infinite.data.cast("B"), pb.FP16, element_bytes=4) is not None


@pytest.mark.parametrize("codec", [pb.LZ4, pb.ZSTD, pb.ZLIB])
@pytest.mark.parametrize("stated_bytes", [0, 999, 1001, 10_000])
def test_another_size_than_stated_is_refused(codec: pb.Codec, stated_bytes: int) -> None:
    encoded = encode(memoryview(bytes(1000)), codec, element_bytes=1)
    assert encoded is not None
    into = memoryview(bytearray(stated_bytes))
    with pytest.raises(CodecError):
        decode(encoded[0], into, codec, shuffled=False, element_bytes=1)


def test_a_zstd_frame_must_state_its_size_and_be_alone() -> None:
    unstated = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    stated = zstandard.ZstdCompressor().compress(bytes(100))
    for frame in (unstated, stated + stated, stated[:-1], b""):
        into = memoryview(bytearray(100))
        with pytest.raises(CodecError):
            decode(memoryview(frame), into, pb.ZSTD, shuffled=False, element_bytes=1)


def test_a_zlib_stream_must_end_with_its_bytes() -> None:
    stream = zlib.compress(bytes(100))
    for damaged in (stream[:-1], stream + b".", b""):
        into = memoryview(bytearray(100))
        with pytest.raises(CodecError):
            decode(memoryview(damaged), into, pb.ZLIB, shuffled=False, element_bytes=1)


@given(st.sampled_from([*LOSSLESS, pb.FP16, 99]), st.binary(max_size=200), st.integers(0, 64))
def test_random_bytes_are_refused_or_decoded(codec: pb.Codec, data: bytes, elements: int) -> None:
    into = np.zeros(elements, np.float32).data.cast("B")
    try:
        decode(memoryview(data), into, codec, shuffled=codec != pb.NONE, element_bytes=4)
    except CodecError as error:
        assert str(error)  # noqa: PT017 - nothing else may be raised


# ---- which codec ---------------------------------------------------------------------------------

MEASURED = {
    pb.LZ4: CodecSample(ratio=0.9, seconds_per_byte=1 / 2.0e9),
    pb.ZSTD: CodecSample(ratio=0.8, seconds_per_byte=1 / 1.0e9),
}


@pytest.mark.parametrize(
    ("link", "codec"),
    [(1e6, pb.ZSTD), (12.5e6, pb.ZSTD), (150e6, pb.NONE), (1.2e9, pb.NONE)],
)
def test_a_codec_is_chosen_where_it_pays(link: float, codec: pb.Codec) -> None:
    samples = {**MEASURED, pb.ZSTD: CodecSample(ratio=0.8, seconds_per_byte=1 / 1.0e9)}
    assert choose_codec(link, samples) == codec


@given(
    st.floats(1e3, 1e10),
    st.dictionaries(
        st.sampled_from([pb.LZ4, pb.ZSTD, pb.ZLIB, pb.FP16]),
        st.builds(CodecSample, ratio=st.floats(0.001, 1), seconds_per_byte=st.floats(1e-10, 1e-7)),
    ),
)
def test_the_choice_is_the_least_of_all_expected_times(
    link: float, samples: dict[pb.Codec, CodecSample]
) -> None:
    times = {codec: 2 * s.seconds_per_byte + s.ratio / link for codec, s in samples.items()}
    times[pb.NONE] = 1 / link
    assert times[choose_codec(link, samples)] == min(times.values())


def link_of(seconds_per_megabyte: float) -> LinkCodec:
    link = LinkCodec()
    for _ in range(3):
        link.observe_transfer(1_000_000, seconds_per_megabyte)
    return link


def test_nothing_is_encoded_until_the_link_is_known_to_be_slow() -> None:
    link = LinkCodec()
    for _ in range(2):
        assert link.choose(EDGE, 1_000_000) == pb.NONE
        link.observe_transfer(100, 1.0)
        link.observe_transfer(1_000_000, 2.0)
        assert link.bytes_per_second is None
    link.observe_transfer(1_000_000, 2.0)
    assert link.bytes_per_second == 1_000_000
    assert link.choose(EDGE, 1_000_000) != pb.NONE
    assert link.choose(EDGE, 1000) == pb.NONE


def test_a_fast_link_of_some_delay_is_not_taken_for_a_slow_one() -> None:
    link = link_of(0.022)
    assert link.choose(EDGE, 1_000_000) != pb.NONE
    link.observe_transfer(100, 0.020)
    assert link.bytes_per_second == pytest.approx(500e6, rel=0.3)
    assert link.choose(EDGE, 1_000_000) == pb.NONE


def drive(link: LinkCodec, times: int, *, half_allowed: bool = False) -> list[pb.Codec]:
    """Choose again and again, and report what each codec would have done."""
    chosen = []
    for _ in range(times):
        codec = link.choose(EDGE, 1_000_000, half_allowed=half_allowed)
        chosen.append(codec)
        if codec != pb.NONE:
            encoded, seconds = {
                pb.LZ4: (950_000, 0.001),
                pb.ZSTD: (800_000, 0.002),
                pb.FP16: (500_000, 0.001),
            }[codec]
            link.observe_encoding(
                EDGE, codec, decoded_bytes=1_000_000, encoded_bytes=encoded, seconds=seconds
            )
    return chosen


def test_on_a_slow_link_each_is_tried_then_the_best_used_and_the_rest_tried_rarely() -> None:
    chosen = drive(link_of(0.1), 1000)
    assert chosen[:4] == [pb.LZ4, pb.ZSTD, pb.ZSTD, pb.ZSTD]
    assert 10 <= chosen.count(pb.LZ4) <= 20
    assert 10 <= chosen.count(pb.NONE) <= 20


def test_float16_is_used_only_where_it_is_allowed() -> None:
    link = link_of(0.1)
    assert pb.FP16 not in drive(link, 200)
    assert drive(link, 200, half_allowed=True).count(pb.FP16) > 180
    assert pb.FP16 not in drive(link, 200)


def test_a_link_that_becomes_fast_is_used_plainly_again() -> None:
    link = link_of(0.1)
    assert drive(link, 10)[-1] == pb.ZSTD
    link.observe_transfer(1_000_000, 0.001)
    assert drive(link, 10) == [pb.NONE] * 10


def test_what_is_remembered_is_bounded() -> None:
    link = link_of(0.1)
    assert [link.choose(("job", index), 1_000_000) for index in range(5000)] == [pb.LZ4] * 5000
    assert len(link._edges) <= 1024
