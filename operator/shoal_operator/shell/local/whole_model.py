"""The whole model in ONNX Runtime, as anybody would load it, and the memory that this takes.

Memory is measured as an agent measures its own: the floor is what is resident once ONNX Runtime is
loaded and has run a first tiny model, freed heap given back. The peak is the kernel's mark of
resident memory (`VmHWM`) less the floor. The mark is reset before the session is made and before
each run, and read after each, so that reading inputs and comparing results have no part in it.
"""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnx import TensorProto, helper

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

_PROVIDERS: Final = ["CPUExecutionProvider"]


class ModelUnusable(Exception):
    """ONNX Runtime does not load or run the model."""


class WholeModel:
    """A session of default settings, or one without any optimisation; one at a time in memory."""

    def __init__(self, path: Path, *, optimised: bool = True) -> None:
        """Raises `ModelUnusable`."""
        warm_up()
        _trim()
        self.floor_bytes = _begin_mark()
        self.peak_bytes = 0
        options = onnxruntime.SessionOptions()
        if not optimised:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=_PROVIDERS)
        except Exception as error:  # ONNX Runtime's own classes share no base
            raise ModelUnusable(str(error)) from error
        self._read_mark()

    def run(self, names: Sequence[str], inputs: Arrays) -> dict[str, Array]:
        """The outputs of these names. Raises `ModelUnusable`."""
        _begin_mark()
        try:
            outputs = self._session.run(list(names), dict(inputs))
        except Exception as error:  # as above
            raise ModelUnusable(str(error)) from error
        self._read_mark()
        return dict(zip(names, outputs, strict=True))

    def _read_mark(self) -> None:
        self.peak_bytes = max(self.peak_bytes, _status_bytes("VmHWM") - self.floor_bytes)


def warm_up() -> None:
    """Run a model of one node: what that loads belongs to every floor."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "t", values[:1], values[1:])
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=_PROVIDERS)
    session.run(None, {"x": np.zeros(1, np.float32)})


def _begin_mark() -> int:
    """Let the kernel's mark start at what is resident now; those bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


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
