"""Codecs: a tensor's bytes made smaller for a slow link, and which codec is worth its time.

A codec trades processor time for bytes on the link, so it pays only where the link is slower than
the codec: below about 0.2 GB/s (measured; a Unix socket does 1 GB/s and more). Dense activations
shrink by 14 % under byte shuffle and zstd, maps behind a ReLU by 25 to 50 %; half of float32 goes
with float16, which is lossy and used only where the job allows it.

Decoding is bounded: the decoded size is known from the header and has been checked against dtype,
shape and the receiver's limit before anything here runs, and no decoder is allowed to write past
it.
"""

import zlib
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final

import lz4.block
import numpy as np
import zstandard

from shoal_protocol.v1 import tensors_pb2 as pb

ZSTD_LEVEL: Final = 1
ZLIB_LEVEL: Final = 6
LZ4_LIMIT_BYTES: Final = 0x7E000000
"""The most that one LZ4 block may hold."""

LOSSLESS: Final = (pb.LZ4, pb.ZSTD)
"""What `LinkCodec` tries; zlib loses to zstd on every link."""


class CodecError(ValueError):
    """Encoded bytes that do not decode to exactly what their header says."""


def encode(
    data: memoryview, codec: pb.Codec, *, element_bytes: int
) -> tuple[memoryview, bool] | None:
    """Bytes of one tensor under a codec, and whether they were shuffled first.

    `element_bytes` is the width of one number. None: the codec cannot carry these bytes (float16
    would overflow, or a block would be too large).
    """
    if codec == pb.NONE:
        return data, False
    if codec == pb.FP16:
        return _encode_half(data)
    shuffled = element_bytes > 1
    source = _shuffle(data, element_bytes) if shuffled else data
    match codec:
        case pb.LZ4:
            if len(data) > LZ4_LIMIT_BYTES:
                return None
            encoded = lz4.block.compress(source, store_size=False)
        case pb.ZSTD:
            encoded = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(source)
        case pb.ZLIB:
            encoded = zlib.compress(source, ZLIB_LEVEL)
        case _:
            raise AssertionError(f"codec {codec} is not known")
    return memoryview(encoded), shuffled


def decode(
    encoded: memoryview, into: memoryview, codec: pb.Codec, *, shuffled: bool, element_bytes: int
) -> None:
    """Decode into a buffer of exactly the decoded size. Raises `CodecError`."""
    if codec == pb.FP16:
        _decode_half(encoded, into)
        return
    size = len(into)
    try:
        match codec:
            case pb.NONE:
                decoded: bytes | memoryview = encoded
            case pb.LZ4:
                decoded = lz4.block.decompress(encoded, uncompressed_size=size)
            case pb.ZSTD:
                decoded = _decode_zstd(encoded, size)
            case pb.ZLIB:
                decoder = zlib.decompressobj()
                # One byte more than allowed: enough to see that there would be more.
                decoded = decoder.decompress(encoded, size + 1)
                if not decoder.eof or decoder.unused_data:
                    raise CodecError(f"the zlib stream does not end with its {size} bytes")
            case _:
                raise CodecError(f"codec {codec} is not known")
    except (lz4.block.LZ4BlockError, zstandard.ZstdError, zlib.error) as error:
        raise CodecError(f"{pb.Codec.Name(codec)} cannot decode its bytes: {error}") from error
    if len(decoded) != size:
        raise CodecError(f"{pb.Codec.Name(codec)} gave {len(decoded)} bytes instead of {size}")
    if shuffled:
        _unshuffle(decoded, into, element_bytes)
    else:
        into[:] = decoded


def _decode_zstd(encoded: memoryview, size: int) -> bytes:
    # The library trusts the size that the frame itself states, so that one is checked first.
    stated = zstandard.get_frame_parameters(encoded).content_size
    if stated != size:
        raise CodecError(f"the zstd frame states {stated} bytes instead of {size}")
    return zstandard.ZstdDecompressor().decompress(
        encoded, max_output_size=size, allow_extra_data=False
    )


def _shuffle(data: memoryview, element_bytes: int) -> memoryview:
    """Group bytes of one significance: first all lowest bytes, at the end all highest."""
    elements = np.frombuffer(data, np.uint8).reshape(-1, element_bytes)
    return np.ascontiguousarray(elements.T).reshape(-1).data


def _unshuffle(data: bytes | memoryview, into: memoryview, element_bytes: int) -> None:
    if len(into) % element_bytes:
        raise CodecError(f"{len(into)} bytes are no whole number of {element_bytes}-byte elements")
    planes = np.frombuffer(data, np.uint8).reshape(element_bytes, -1)
    np.frombuffer(into, np.uint8).reshape(-1, element_bytes)[:] = planes.T


def _encode_half(data: memoryview) -> tuple[memoryview, bool] | None:
    single = np.frombuffer(data, "<f4")
    with np.errstate(over="ignore", under="ignore"):
        half = single.astype("<f2")
    if np.isinf(half).any() and not np.array_equal(np.isinf(half), np.isinf(single)):
        return None  # a finite number became infinite: worse than the loss that was allowed
    return half.view(np.uint8).data, False


def _decode_half(encoded: memoryview, into: memoryview) -> None:
    if 2 * len(encoded) != len(into) or len(encoded) % 2:
        raise CodecError(f"float16 of {len(encoded)} bytes cannot be {len(into)} bytes of float32")
    np.frombuffer(into, "<f4")[:] = np.frombuffer(encoded, "<f2")


# ---- which codec ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSample:
    """What a codec did to one tensor: encoded size per decoded byte, and encoding time per byte."""

    ratio: float
    seconds_per_byte: float


def choose_codec(link_bytes_per_second: float, samples: Mapping[pb.Codec, CodecSample]) -> pb.Codec:
    """The codec of the least expected time to encode, send and decode a byte; NONE on a tie.

    Decoding is reckoned as costly as encoding, which is fair for LZ4 and pessimistic for the
    others.
    """

    def seconds_per_byte(codec: pb.Codec) -> float:
        sample = samples[codec]
        return 2 * sample.seconds_per_byte + sample.ratio / link_bytes_per_second

    best = min(samples, key=seconds_per_byte, default=pb.NONE)
    if best == pb.NONE or seconds_per_byte(best) >= 1 / link_bytes_per_second:
        return pb.NONE
    return best


@dataclass(slots=True)
class _Edge:
    """What is known about one tensor that flows again and again."""

    samples: dict[pb.Codec, CodecSample] = field(default_factory=dict)
    tried_at: dict[pb.Codec, int] = field(default_factory=dict)
    chosen: int = 0


class LinkCodec:
    """The codec for each tensor that flows over one link, from what was measured on it.

    The caller feeds it: `observe_transfer` after each acknowledged transfer, `observe_encoding`
    after each encoding (`encode_activation` does that). Until the link's speed is known, and on a
    link faster than any codec, everything is sent unencoded. On a slow link each candidate is tried
    once, then the fastest is used; every `PROBE_INTERVAL` choices each is tried again, as tensors,
    processors and links change, and so is no codec at all.
    """

    FAST_BYTES_PER_SECOND: Final = 200_000_000
    SMALL_BYTES: Final = 4096
    PROBE_INTERVAL: Final = 64
    _LARGE_TRANSFER_BYTES: Final = 65536
    _ASSUMED_FIXED_SECONDS: Final = 0.001
    _TRANSFERS: Final = 3
    _EDGES: Final = 1024

    def __init__(self) -> None:
        self._fixed: deque[float] = deque(maxlen=8)
        self._large: deque[tuple[int, float]] = deque(maxlen=8)
        self._edges: OrderedDict[Hashable, _Edge] = OrderedDict()

    @property
    def bytes_per_second(self) -> float | None:
        """The link's speed, None until measured: that of the best of the last large transfers.

        A transfer takes a fixed time (small ones show it) and a time by its size; only the second
        is the link's. The best, as all else that happens on the way (a busy receiver, the very
        first connection) only slows.
        """
        if len(self._large) < self._TRANSFERS:
            return None
        fixed = min(self._fixed, default=self._ASSUMED_FIXED_SECONDS)
        # Copied: large tensors are encoded in a thread, while transfers are observed in another.
        large = tuple(self._large)
        return max([size / max(seconds - fixed, seconds / 8) for size, seconds in large])

    @property
    def fast(self) -> bool:
        """Whether everything is sent unencoded: no codec keeps up with the link, or its speed is
        not known."""
        speed = self.bytes_per_second
        return speed is None or speed >= self.FAST_BYTES_PER_SECOND

    def observe_transfer(self, wire_bytes: int, seconds: float) -> None:
        """A transfer took this long from its first frame to its acknowledgement."""
        if seconds <= 0:
            return
        if wire_bytes < self._LARGE_TRANSFER_BYTES:
            self._fixed.append(seconds)
        else:
            self._large.append((wire_bytes, seconds))

    def observe_encoding(
        self,
        edge: Hashable,
        codec: pb.Codec,
        *,
        decoded_bytes: int,
        encoded_bytes: int,
        seconds: float,
    ) -> None:
        """Encoding a tensor of an edge took this long and gave that many bytes."""
        self._state(edge).samples[codec] = CodecSample(
            ratio=encoded_bytes / decoded_bytes, seconds_per_byte=seconds / decoded_bytes
        )

    def choose(self, edge: Hashable, decoded_bytes: int, *, half_allowed: bool = False) -> pb.Codec:
        """The codec for the next tensor of an edge; `half_allowed`: it is float32 and may lose."""
        speed = self.bytes_per_second
        if speed is None or speed >= self.FAST_BYTES_PER_SECOND or decoded_bytes < self.SMALL_BYTES:
            return pb.NONE
        candidates = (*LOSSLESS, pb.FP16) if half_allowed else LOSSLESS
        state = self._state(edge)
        state.chosen += 1
        best = self._best(speed, state, candidates)
        state.tried_at[best] = state.chosen
        return best

    def _best(self, speed: float, state: _Edge, candidates: tuple[pb.Codec, ...]) -> pb.Codec:
        for codec in candidates:
            if codec not in state.samples:
                return codec
        for codec in (pb.NONE, *candidates):
            if state.chosen - state.tried_at.get(codec, 0) > self.PROBE_INTERVAL:
                return codec
        return choose_codec(speed, {codec: state.samples[codec] for codec in candidates})

    def _state(self, edge: Hashable) -> _Edge:
        state = self._edges.setdefault(edge, _Edge())
        self._edges.move_to_end(edge)
        if len(self._edges) > self._EDGES:
            self._edges.popitem(last=False)
        return state
