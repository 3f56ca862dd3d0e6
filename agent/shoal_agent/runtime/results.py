"""What a run of a fragment gives."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal_protocol.tensors import Array


def kept(outputs: Iterable[Array]) -> list[Array]:
    """Outputs as they may be kept. What lies in the arena is copied: it would hold back all of
    that."""
    return [each if each.flags.owndata else np.array(each) for each in outputs]


class Ran(NamedTuple):
    """Outputs in order, and the times of the run."""

    outputs: list[Array]
    seconds: float
    processor_seconds: float


class Passed(NamedTuple):
    """What runs in passing gave: outputs by their names for each of them, and the part of the times
    that each had. `streamed_bytes` of weights were mapped again, in blocks within `granted_bytes`;
    0: as a whole."""

    outputs: list[dict[str, Array]]
    seconds: float
    processor_seconds: float
    streamed_bytes: int
    granted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Outputs of a run, its time in ONNX Runtime and that of the processor, and the most memory
    above the floor during it. `streamed_bytes` and `granted_bytes` as in `Passed`. `squeezed`: it
    has only fitted because weights were dropped while it ran. `unkept_bytes` of weights would have
    been in memory besides if it had kept what is planned. `batch`: so many items ran at once;
    0: one alone."""

    outputs: dict[str, Array]
    compute_seconds: float
    processor_seconds: float
    peak_bytes: int
    streamed_bytes: int
    granted_bytes: int = 0
    squeezed: bool = False
    unkept_bytes: int = 0
    batch: int = 0


def result_of(
    ran: Ran,
    names: Sequence[str],
    peak_bytes: int,
    *,
    streamed_bytes: int = 0,
    granted_bytes: int = 0,
) -> RunResult:
    """The result of a run, with its outputs by their names."""
    return RunResult(
        outputs=dict(zip(names, ran.outputs, strict=True)),
        compute_seconds=ran.seconds,
        processor_seconds=ran.processor_seconds,
        peak_bytes=peak_bytes,
        streamed_bytes=streamed_bytes,
        granted_bytes=granted_bytes,
    )
