"""Fragments in ONNX Runtime, executed from memory-mapped weights.

How the weights stay off the heap (measured for ONNX Runtime 1.31 on text, language and image
models):

- The session is opened from the *path* of model.onnx, whose weights are external data: the
  runtime maps them and owns the mapping. `add_initializer` over a mapping of ours came out equal
  in memory (within 3 MiB either way) and has a lifetime that one can get wrong.
- Prepacking is off: it makes a second, anonymous copy of every MatMul's weights.
- Optimisation stops at "extended": the level above re-orders convolutions' weights into copies
  (88 MiB for 36 MiB of weights). `COPYING_OPTIMIZERS` fold or fuse weights into copies and are
  switched off one by one. What is left after opening a session is 0.2 to 0.4 MiB of heap.
- One arena for activations, shared by all sessions. It reserves large regions, of which only what
  is touched is resident, so that blocks merge again (19 MiB instead of 26 for one that grows by
  what is asked for). It is limited to the budget: a run that would need more fails instead.
- A table of which items read rows is reckoned with by rows: when more has gathered in memory, its
  pages are let go (`drop_weights`).
- A prepared fragment (`preparation`) is opened from the model that was saved for it, without
  further optimisation and with packing: what it would copy was saved, and is mapped.
- No memory patterns: they allocate the second run's activations as one block, beside the first's.

Sessions are opened, run and destroyed in one thread; the interpreter's lock is released meanwhile.
Memory is back when `close` returns.
"""

import gc
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
import onnxruntime

from shoal_agent.runtime import rehearsal_model
from shoal_agent.runtime.prepared import PreparedModel
from shoal_agent.runtime.process_memory import MemoryMeter, drop_mapped_file, trim
from shoal_agent.runtime.watchdog import Watchdog
from shoal_protocol.tensors import DTYPES, Array
from shoal_protocol.v1.tensors_pb2 import BFLOAT16, COMPLEX64, COMPLEX128, DataType

COPYING_OPTIMIZERS: Final = [
    "ConstantFolding",
    "UnsqueezeElimination",
    "ConvAddFusion",
    "ConvMulFusion",
    "ConvBNFusion",
    "MatMul_BatchNormalization_Fusion",
    "AttentionFusion",
    "QAttentionFusion",
]
_SHRINK: Final = ("memory.enable_memory_arena_shrinkage", "cpu:0")
_GROW_BY_DOUBLING: Final = 0
_KEPT_REGION_BYTES: Final = 64 << 10
"""The arena's first region, which it never gives back; and what it leaves unsplit of a block."""
_LEAST_REGION_BYTES: Final = 1 << 20
_ARENA_GRANULE: Final = 256
"""The arena refuses every region that is not a multiple of it, as half of `20M` is not."""
_ERROR_CHARACTERS: Final = 400
_OUT_OF_MEMORY: Final = (
    "Failed to allocate memory",
    "bad_alloc",
    "exceed memory limit",
    "smaller than requested",
)

_DTYPES: Final = {
    f"tensor({DataType.Name(each).lower()})": dtype.newbyteorder("=")
    for each, dtype in DTYPES.items()
    if each not in (BFLOAT16, COMPLEX64, COMPLEX128)
}
"""What numpy calls the types of inputs."""


class RuntimeFailed(Exception):
    """ONNX Runtime could not open or run a fragment; the text is its first line."""


class OutOfBudget(RuntimeFailed):
    """A run would have taken more memory than the budget allows."""


class NotOpen(RuntimeFailed):
    """The fragment was closed before the run began."""


_NODE: Final = re.compile(r"while running (\w+) node\. Name:'([^']*)'")
"""How the runtime names the node that it was in."""


class Terminated(RuntimeFailed):
    """A run was stopped because it was asked to."""


class Stopper:
    """Ends one run early, from any thread; one that has not begun ends as it begins."""

    def __init__(self) -> None:
        self.options = onnxruntime.RunOptions()
        self.options.log_severity_level = 4

    def stop(self) -> None:
        self.options.terminate = True

    @property
    def stopped(self) -> bool:
        return bool(self.options.terminate)


class InputMismatch(ValueError):
    """An input's name, type or shape does not suit the fragment: trying again does not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """What a fragment takes under one name; in `shape` None means any size."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFragment:
    """A fragment that can run; `weights` is the file that is mapped, `weight_bytes` the size of the
    weights, which packed copies in that file are not."""

    weights: Path
    weight_bytes: int
    session: onnxruntime.InferenceSession
    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Outputs of a run, its time in ONNX Runtime, and the most memory above the floor during it."""

    outputs: dict[str, Array]
    compute_seconds: float
    peak_bytes: int


class Runtime:
    """The fragments that are open. Not thread-safe: use one thread."""

    def __init__(self, meter: MemoryMeter, *, threads: int, limit_bytes: int) -> None:
        self._meter = meter
        self._threads = threads
        self._open: dict[str, OpenFragment] = {}
        self._in_passing: Stopper | None = None
        self._watchdog = Watchdog(self._stop_in_passing)
        onnxruntime.set_default_logger_severity(4)
        limit_bytes -= limit_bytes % (2 * _ARENA_GRANULE)
        configuration = {
            "max_mem": limit_bytes,
            "arena_extend_strategy": _GROW_BY_DOUBLING,
            "initial_chunk_size_bytes": _KEPT_REGION_BYTES,
            "initial_growth_chunk_size_bytes": max(_LEAST_REGION_BYTES, limit_bytes // 2),
            "max_dead_bytes_per_chunk": _KEPT_REGION_BYTES,
        }
        onnxruntime.create_and_register_allocator(
            onnxruntime.OrtMemoryInfo(
                "Cpu",
                onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR,
                0,
                onnxruntime.OrtMemType.DEFAULT,
            ),
            onnxruntime.OrtArenaCfg(configuration),
        )
        # Stays open: a first run loads what every run needs, and further ones shrink the arena.
        self._tiny = self._session(rehearsal_model.tiny_model())
        self.shrink()

    def rehearse(self) -> None:
        """Run a model of what most models are made of, and let it go; raises `RuntimeFailed`."""
        session = self._session(rehearsal_model.model())
        try:
            for _ in range(2):  # the first run differs: kernels prepare what they keep
                session.run(None, rehearsal_model.feed())
        except Exception as error:  # the runtime's exceptions have no common base but this
            raise _failure(error, stopped=False) from error
        del session
        gc.collect()
        self.shrink()

    def open(
        self, digest: str, folder: Path, prepared: PreparedModel | None = None
    ) -> OpenFragment:
        """Make a fragment ready to run, as it was prepared if it was; raises `RuntimeFailed`."""
        session = self._session(str(folder / "model.onnx"), prepared)
        inputs = []
        for value in session.get_inputs():
            if (dtype := _DTYPES.get(value.type)) is None:
                raise RuntimeFailed(f"input {value.name} of type {value.type} is not supported")
            shape = tuple(size if isinstance(size, int) else None for size in value.shape)
            inputs.append(InputSpec(name=value.name, dtype=dtype, shape=shape))
        weights = (folder / "weights.bin").resolve()
        mapped = weights if prepared is None else prepared.weights.resolve()
        fragment = OpenFragment(
            weights=mapped,
            weight_bytes=weights.stat().st_size if weights.exists() else 0,
            session=session,
            inputs=tuple(inputs),
            outputs=tuple(value.name for value in session.get_outputs()),
        )
        self._open[digest] = fragment
        trim()  # parsing and optimising leave freed heap behind
        return fragment

    def run(self, digest: str, tensors: Mapping[str, Array], stopper: Stopper) -> RunResult:
        """Run a fragment; raises `InputMismatch`, or `RuntimeFailed` and its kinds."""
        fragment, feed = self._prepare(digest, tensors)
        self._meter.begin_peak()
        try:
            outputs, compute_seconds = self._run(fragment, feed, stopper)
        except OutOfBudget:
            # Items of other sizes may have left the arena in pieces: once more, in an empty one.
            self.shrink()
            outputs, compute_seconds = self._run(fragment, feed, stopper)
        return self._result(fragment, outputs, compute_seconds)

    def run_in_passing(self, digest: str, tensors: Mapping[str, Array]) -> RunResult | None:
        """Run a fragment that takes next to no time, in the event loop's own thread, while nothing
        else runs. The peak is that since the last run of the other kind: to read it would take
        longer. None: it took long for once, or much, and is to be run the other way; else as `run`.
        """
        fragment, feed = self._prepare(digest, tensors)
        try:
            with self._watchdog:
                self._in_passing = Stopper()
                outputs, compute_seconds = self._run(fragment, feed, self._in_passing)
        except (Terminated, OutOfBudget):
            return None
        finally:
            self._in_passing = None
        return self._result(fragment, outputs, compute_seconds)

    def _prepare(
        self, digest: str, tensors: Mapping[str, Array]
    ) -> tuple[OpenFragment, dict[str, Array]]:
        fragment = self._open.get(digest)
        if fragment is None:
            raise NotOpen(f"{digest} is not resident any more")
        check_inputs(fragment.inputs, tensors)
        return fragment, {spec.name: tensors[spec.name] for spec in fragment.inputs}

    def _result(
        self, fragment: OpenFragment, outputs: list[Array], compute_seconds: float
    ) -> RunResult:
        return RunResult(
            outputs=dict(zip(fragment.outputs, outputs, strict=True)),
            compute_seconds=compute_seconds,
            peak_bytes=self._meter.peak_since_begin_bytes(),
        )

    def _run(
        self, fragment: OpenFragment, feed: dict[str, Array], stopper: Stopper
    ) -> tuple[list[Array], float]:
        if stopper.stopped:
            raise Terminated("stopped before it began")
        started = perf_counter()
        try:
            outputs = fragment.session.run(fragment.outputs, feed, stopper.options)
        except Exception as error:  # as above
            raise _failure(error, stopped=stopper.stopped) from error
        compute_seconds = perf_counter() - started
        # The runtime's arrays are views into its allocator; kept, they would hold all of it back.
        return [np.array(output) for output in outputs], compute_seconds

    def _stop_in_passing(self) -> None:
        if (stopper := self._in_passing) is not None:
            stopper.stop()

    def close(self, digest: str) -> int:
        """Give a fragment up; the bytes that came back. Its memory is back on return."""
        before = self._meter.used_bytes()
        self._open.pop(digest, None)
        gc.collect()  # the session goes now, not when a cycle through it is found
        self.shrink()
        return max(0, before - self._meter.used_bytes())

    def weight_bytes(self, digest: str) -> int:
        """Of a fragment that is open; else none."""
        fragment = self._open.get(digest)
        return 0 if fragment is None else fragment.weight_bytes

    def drop_weights(self, digest: str) -> None:
        """Let a fragment's mapped weights go: it reads rows of a table, and those of many items
        have gathered in memory. The next run reads again what it needs, from the page cache mostly:
        under a millisecond for 20 MB.
        """
        fragment = self._open.get(digest)
        if fragment is not None:
            drop_mapped_file(fragment.weights)

    def shrink(self) -> None:
        """Give back what neither fragments nor activations hold."""
        options = onnxruntime.RunOptions()
        options.add_run_config_entry(*_SHRINK)
        self._tiny.run(None, {"x": np.zeros(1, np.float32)}, options)
        trim()

    def _session(
        self, model: str | bytes, prepared: PreparedModel | None = None
    ) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        # A plan for all activations at once would be allocated beside what the first run left.
        options.enable_mem_pattern = False
        levels = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_EXTENDED
        options.add_session_config_entry("session.use_env_allocators", "1")
        if prepared is not None:
            options.graph_optimization_level = levels.ORT_DISABLE_ALL
            model = str(prepared.model)
        if prepared is None or not prepared.packed:
            options.add_session_config_entry("session.disable_prepacking", "1")
        # Spinning burns processor time that the other agents of a machine need.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            return onnxruntime.InferenceSession(
                model,
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=COPYING_OPTIMIZERS,
            )
        except Exception as error:  # as above
            raise _failure(error, stopped=False) from error


def check_inputs(specs: tuple[InputSpec, ...], tensors: Mapping[str, Array]) -> None:
    """Whether tensors suit a fragment; `InputMismatch` says what does not.

    A symbolic size is any size here: exporters give one symbol to axes that differ.
    """
    for spec in specs:
        tensor = tensors.get(spec.name)
        if tensor is None:
            raise InputMismatch(f"input {spec.name} is missing")
        if tensor.dtype != spec.dtype:
            raise InputMismatch(f"input {spec.name}: type {tensor.dtype} is not {spec.dtype}")
        if not _fits(tensor.shape, spec.shape):
            raise InputMismatch(
                f"input {spec.name}: shape {_shape(tensor.shape)} does not fit {_shape(spec.shape)}"
            )


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    # The runtime shows a shape of unknown rank like a number's: as ().
    if not wanted:
        return True
    return len(shape) == len(wanted) and all(
        expected is None or size == expected for size, expected in zip(shape, wanted, strict=True)
    )


def _shape(sizes: tuple[int | None, ...]) -> str:
    return "[" + ",".join("?" if size is None else str(size) for size in sizes) + "]"


def _failure(error: Exception, *, stopped: bool) -> RuntimeFailed:
    text = str(error)
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    line = line[:_ERROR_CHARACTERS]
    if stopped:
        node = _NODE.search(text)
        where = f"in its {node[1]} node {node[2]!r}" if node else f"while it ran: {line}"
        return Terminated(f"stopped {where}")
    if any(sign in text for sign in _OUT_OF_MEMORY):
        return OutOfBudget(line)
    return RuntimeFailed(line)
