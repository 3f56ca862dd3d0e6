"""Measures the processor, the memory and the disk, within a budget and some seconds.

A rate is that of the best of several short runs of one thread: other processes, and a quota, can
only make a run longer. How much of such threads there is (`processors`) shows in a second of runs
with all threads, one after the other: a quota that no file shows to this process counts there as
well.

The weights of a fragment are mapped files. So a file is written, dropped from the page cache and
mapped: the first reading is the disk's, one after the pages were unmapped is the page cache's, and
one of pages that are mapped is the memory's.
"""

import gc
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Final

import numpy as np
import onnxruntime

from shoal_agent.runtime.recipes import AS_IT_IS
from shoal_agent.runtime.rehearsal_model import Node, onnx_model
from shoal_agent.telemetry.logs import log
from shoal_protocol.speeds import Speed
from shoal_protocol.tensors import Array

MOST_SECONDS: Final = 10.0
_BURST_SECONDS: Final = 0.06
_LEAST_RUNS: Final = 3
_WINDOWS: Final = 4
_WINDOW_SECONDS: Final = 0.3
"""Three periods of the kernel's quotas."""
_MOST_FILE_BYTES: Final = 16 << 20
_PIECE_BYTES: Final = 1 << 20
_PROBE_BYTES: Final = 8 << 20
"""What the largest of the operators takes, with its runtime's arena."""


@dataclass(frozen=True, slots=True)
class _Operator:
    """A model of one node, and the operations of a run."""

    node: Node
    weights: Mapping[str, Array]
    feed: Mapping[str, Array]
    flops: int

    def session(self, threads: int) -> Callable[[], object]:
        """Runs it once; raises whatever ONNX Runtime does."""
        options = AS_IT_IS.options(threads)
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        model = onnx_model([self.node], self.weights, self.feed, ["y"])
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, self.feed)


def _convolution(channels: int, size: int, kernel: int) -> _Operator:
    border = kernel // 2
    return _Operator(
        ("Conv", "x w", "y", {"pads": (border,) * 4}),
        {"w": np.ones((channels, channels, kernel, kernel), np.float32)},
        {"x": np.ones((1, channels, size, size), np.float32)},
        2 * channels**2 * kernel**2 * size**2,
    )


def _product(rows: int, width: int, columns: int) -> _Operator:
    return _Operator(
        ("MatMul", "x w", "y", {}),
        {"w": np.ones((width, columns), np.float32)},
        {"x": np.ones((rows, width), np.float32)},
        2 * rows * width * columns,
    )


def measure(threads: int, folder: Path, budget_bytes: int) -> Speed:
    """What the device does; what could not be measured, or not in time, is not known."""
    deadline = perf_counter() + MOST_SECONDS
    file_bytes = min(_MOST_FILE_BYTES, budget_bytes // 2)
    steps: list[Callable[[Speed], Speed]] = [
        lambda speed: _disk(speed, folder, file_bytes, deadline)
    ]
    if budget_bytes >= _PROBE_BYTES:
        steps.append(lambda speed: _convolutions(speed, deadline))
        steps.append(lambda speed: _products(speed, threads, deadline))
    speed = Speed()
    for step in steps:
        if perf_counter() < deadline:
            speed = _tried(step, speed)
    gc.collect()
    return speed


def _tried(step: Callable[[Speed], Speed], speed: Speed) -> Speed:
    try:
        return step(speed)
    except Exception as error:  # the runtime's exceptions have no common base but this
        log.warning("a part of this device could not be measured: %s", error)
        return speed


def _convolutions(speed: Speed, deadline: float) -> Speed:
    rates = [_rate(each, deadline) for each in (_convolution(64, 28, 3), _convolution(96, 28, 1))]
    return replace(speed, convolution_flops_per_second=_mean(rates))


def _products(speed: Speed, threads: int, deadline: float) -> Speed:
    small, large = _product(128, 512, 512), _product(256, 512, 1024)
    rates = [_rate(small, deadline), _rate(large, deadline)]
    sustained = _sustained(large, threads, deadline)
    return replace(
        speed,
        processors=min(float(threads), sustained / rates[-1]),
        product_flops_per_second=_mean(rates),
    )


def _rate(operator: _Operator, deadline: float) -> float:
    """Operations per second of one thread, in the best of its runs."""
    run = operator.session(1)
    run()  # the first one prepares what the kernel keeps
    return operator.flops / _best_seconds(run, deadline)


def _best_seconds(run: Callable[[], object], deadline: float) -> float:
    began, shortest, runs = perf_counter(), float("inf"), 0
    while True:
        started = perf_counter()
        run()
        ended = perf_counter()
        shortest, runs = min(shortest, ended - started), runs + 1
        enough = runs >= _LEAST_RUNS and ended - began >= _BURST_SECONDS
        if enough or ended >= deadline:
            return max(shortest, 1e-9)


def _sustained(operator: _Operator, threads: int, deadline: float) -> float:
    """Operations per second of all threads, in the best of some windows: what else the machine
    does comes and goes, a quota stays."""
    run = operator.session(threads)
    run()
    windows = [_in_window(operator, run, deadline)]
    while len(windows) < _WINDOWS and perf_counter() < deadline:
        windows.append(_in_window(operator, run, deadline))
    return max(windows)


def _in_window(operator: _Operator, run: Callable[[], object], deadline: float) -> float:
    began, runs = perf_counter(), 0
    while True:
        run()
        runs += 1
        now = perf_counter()
        if now - began >= _WINDOW_SECONDS or now >= deadline:
            return operator.flops * runs / (now - began)


def _disk(speed: Speed, folder: Path, size: int, deadline: float) -> Speed:
    path = folder / f".calibration-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    size = max(1, size // _PIECE_BYTES) * _PIECE_BYTES
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(path)
        for _ in range(size // _PIECE_BYTES):
            os.write(descriptor, os.urandom(_PIECE_BYTES))
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped:
            return _with_readings(speed, mapped, deadline)
    finally:
        os.close(descriptor)


def _with_readings(speed: Speed, mapped: mmap.mmap, deadline: float) -> Speed:
    def read() -> None:
        np.frombuffer(mapped, np.uint64).sum()

    started = perf_counter()
    read()
    disk_seconds = perf_counter() - started
    memory_seconds = _best_seconds(read, deadline)
    page_seconds = float("inf")
    for _ in range(_LEAST_RUNS):
        mapped.madvise(mmap.MADV_DONTNEED)
        started = perf_counter()
        read()
        page_seconds = min(page_seconds, perf_counter() - started)
    return replace(
        speed,
        memory_bytes_per_second=len(mapped) / memory_seconds,
        page_bytes_per_second=len(mapped) / page_seconds,
        disk_bytes_per_second=len(mapped) / disk_seconds,
    )


def _mean(rates: Sequence[float]) -> float:
    """The harmonic mean: as much work at each."""
    return len(rates) / sum(1 / rate for rate in rates)
