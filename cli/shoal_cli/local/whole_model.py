"""The whole model in ONNX Runtime, as anybody would load it, and the memory that this takes.

Memory is measured as an agent measures its own: the floor is what is resident once ONNX Runtime is
loaded and has run a first tiny model, freed heap given back. The peak is the kernel's mark of
resident memory (`VmHWM`) less the floor. The mark is reset before the session is made and before
each run, and read after each, so that reading inputs and comparing results have no part in it.
Where the mark cannot be reset (a hardened container), one that has grown meanwhile says the same;
where it has not, what is resident afterwards is counted, which is less than the peak may have been.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnx import TensorProto, helper

from shoal_protocol.session_options import (
    COPYING_OPTIMIZERS,
    EXACT_PRODUCTS,
    LEVEL,
    UNPACKED,
    UNSOUND_OPTIMIZERS,
)

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

_OFF: Final = [*UNSOUND_OPTIMIZERS, *COPYING_OPTIMIZERS]
_PROVIDERS: Final = ["CPUExecutionProvider"]
_CLEAR: Final = Path("/proc/self/clear_refs")
_RESET_MARK: Final = "5"


class ModelUnusable(Exception):
    """ONNX Runtime does not load or run the model."""


class Way(StrEnum):
    """How ONNX Runtime loads a model: as it does by default, without any optimisation, with the
    options of agents, or *mapped*: nothing is done that would copy weights, so that those in a file
    of their own stay there."""

    DEFAULT = "default"
    UNOPTIMISED = "unoptimised"
    AGENTS = "agents"
    MAPPED = "mapped"


class WholeModel:
    """One session; one at a time in memory."""

    def __init__(self, path: Path, way: Way = Way.DEFAULT, *, threads: int | None = None) -> None:
        """`threads`: as many, which spin while they wait, as they do by default. None: one for each
        processor, without spinning. Raises `ModelUnusable`.
        """
        warm_up()
        _trim()
        self._mark = _Mark()
        self.floor_bytes = _status_bytes("VmRSS")
        self.peak_bytes = 0
        try:
            with _named_in_utf8(path) as named:
                self._session = onnxruntime.InferenceSession(
                    named,
                    _options(way, threads),
                    providers=_PROVIDERS,
                    disabled_optimizers=_OFF if way is Way.AGENTS else None,
                )
        except Exception as error:  # ONNX Runtime's own classes share no base
            raise ModelUnusable(str(error)) from error
        self._read_mark()

    @property
    def output_names(self) -> list[str]:
        return [each.name for each in self._session.get_outputs()]

    @property
    def input_names(self) -> list[str]:
        return [each.name for each in self._session.get_inputs()]

    def run(self, names: Sequence[str], inputs: Arrays) -> dict[str, Array]:
        """The outputs of these names. Raises `ModelUnusable`."""
        self._mark.begin()
        try:
            outputs = self._session.run(list(names), dict(inputs))
        except Exception as error:  # as above
            raise ModelUnusable(str(error)) from error
        self._read_mark()
        return dict(zip(names, outputs, strict=True))

    def _read_mark(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._mark.read() - self.floor_bytes)


@contextmanager
def _named_in_utf8(path: Path) -> Iterator[str]:
    """A name of the model that ONNX Runtime takes: it asks for UTF-8. Where the path is no UTF-8,
    that is one in a folder of links, with the files beside the model, which may have its weights.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with TemporaryDirectory() as folder:
            for each in path.absolute().parent.iterdir():
                os.symlink(each, Path(folder, each.name))
            named = Path(folder, f"model-of-{os.getpid()}.onnx")
            named.symlink_to(path.absolute())
            yield str(named)
    else:
        yield str(path)


def _options(way: Way, threads: int | None) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    levels = onnxruntime.GraphOptimizationLevel
    if threads is None:
        # How a thread waits changes no result; threads that spin take two thirds of the processor.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    else:
        options.intra_op_num_threads = threads
    if way is Way.UNOPTIMISED:
        options.graph_optimization_level = levels.ORT_DISABLE_ALL
    if way is Way.AGENTS:
        options.graph_optimization_level = getattr(levels, LEVEL)
        options.add_session_config_entry(*EXACT_PRODUCTS)
        options.add_session_config_entry(*UNPACKED)
    if way is Way.MAPPED:
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.graph_optimization_level = levels.ORT_ENABLE_EXTENDED
    return options


def warm_up() -> None:
    """Run a model of one node: what that loads belongs to every floor."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "t", values[:1], values[1:])
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=_PROVIDERS)
    session.run(None, {"x": np.zeros(1, np.float32)})


class _Mark:
    """The kernel's mark of the most that was resident, from its making or from `begin` on."""

    def __init__(self) -> None:
        self._mark_before: int | None = None
        self.begin()

    def begin(self) -> None:
        """Let it start at what is resident now."""
        try:
            _CLEAR.write_text(_RESET_MARK)
        except OSError:
            self._mark_before = _status_bytes("VmHWM")

    def read(self) -> int:
        """The most since then, in bytes."""
        mark = _status_bytes("VmHWM")
        return _status_bytes("VmRSS") if mark == self._mark_before else mark


def _trim() -> None:
    """Give freed heap back. For the floor only: what the whole model hoards is its own."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")
