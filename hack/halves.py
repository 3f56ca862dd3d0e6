"""Writes compiler/shoal_compiler/halves.json: what ONNX Runtime does with float16 on a processor.
It is asked itself, in the version that is installed; with --check, says whether the file is stale.

.venv/bin/python hack/halves.py [--check]

`kernels` are the operators that have a kernel for float16, with the versions of their sets: from
the first to the last, or none where there is no last one. `made_of` are those that have none, and
that are made of several nodes instead: what these have at once, in tensors as large as the output,
besides what goes in. What comes out has the place of that.
"""

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import onnx
import onnxruntime
from onnx import TensorProto, helper, shape_inference
from onnxruntime.capi import onnxruntime_pybind11_state as state

from shoal_compiler.costs import in_place

TABLE: Final = Path(__file__).resolve().parent.parent / "compiler/shoal_compiler/halves.json"
HALF: Final = "tensor(float16)"
LAST: Final = 2**31 - 1
FIRST_SET: Final = 13
SHAPE: Final = (1, 8, 16, 16)
_BOOL_PART: Final = 0.25
_WHERE: Final = 2.0
"""What choosing works in: see `shoal_compiler.workspaces.others`."""
_MADE_OF: Final = (
    "Celu Elu Gelu HardSigmoid HardSwish LeakyRelu LogSoftmax Mish Relu Selu Softmax Softplus "
    "Softsign Swish ThresholdedRelu"
)


def table() -> dict[str, Any]:
    """What is in the file."""
    return {
        "onnxruntime": onnxruntime.__version__,
        "kernels": dict(sorted(_kernels().items())),
        "made_of": {name: found for name in _MADE_OF.split() if (found := list(_made_of(name)))},
    }


# ---- kernels -------------------------------------------------------------------------------------


def _kernels() -> dict[str, list[list[int | None]]]:
    schemas: dict[tuple[str, str], list[Any]] = {}
    for each in state.get_all_operator_schema():
        schemas.setdefault((each.domain, each.name), []).append(each)
    found: dict[str, set[tuple[int, int]]] = {}
    for kernel in state.get_all_opkernel_def():
        if kernel.provider != "CPUExecutionProvider":
            continue
        first, last = kernel.version_range
        versions = [
            each
            for each in schemas.get((kernel.domain, kernel.op_name), [])
            if first <= each.since_version <= last
        ]
        if any(_takes_halves(each, kernel.type_constraints) for each in versions):
            name = f"{kernel.domain}.{kernel.op_name}" if kernel.domain else kernel.op_name
            found.setdefault(name, set()).add((first, last))
    return {name: _joined(sorted(ranges)) for name, ranges in found.items()}


def _takes_halves(schema: Any, constraints: Mapping[str, Iterable[str]]) -> bool:
    """Whether a kernel takes float16 wherever its operator does; it may take less of what is a type
    of its own."""
    may_be = {
        each.type_param_str for each in schema.type_constraints if HALF in each.allowed_type_strs
    }
    taken = {each.typeStr for each in schema.inputs if each.typeStr in may_be}
    return bool(taken) and all(HALF in constraints.get(each, (HALF,)) for each in taken)


def _joined(ranges: Iterable[tuple[int, int]]) -> list[list[int | None]]:
    joined: list[list[int | None]] = []
    for first, last in ranges:
        end = None if last == LAST else last
        if joined and joined[-1][1] is not None and first <= joined[-1][1] + 1:
            joined[-1][1] = end
        else:
            joined.append([first, end])
    return joined


# ---- what is made of several nodes ---------------------------------------------------------------


def _made_of(operator: str) -> Iterator[list[float | None]]:
    """For each first set in which it is so: that, the last one, and how much."""
    newest = onnx.defs.onnx_opset_version()
    runs: list[list[Any]] = []
    for opset in range(FIRST_SET, newest + 1):
        found = _more(operator, opset)
        if runs and runs[-1][1:] == [opset - 1, found]:
            runs[-1][1] = opset
        else:
            runs.append([opset, opset, found])
    for first, last, found in runs:
        if found is not None:
            yield [first, None if last == newest else last, found]


def _more(operator: str, opset: int) -> float | None:
    """None: it is one node, or there is no such operator."""
    try:
        model = _optimised(operator, opset)
    except Exception:  # ONNX Runtime's have no common base but this
        return None
    nodes = [node for node in model.graph.node if node.op_type not in ("Neg", "Constant")]
    if [node.op_type for node in nodes if node.op_type != "Cast"] == [operator]:
        return None
    return _most(model) - 1


def _optimised(operator: str, opset: int) -> onnx.ModelProto:
    """Between two nodes that compute in single precision."""
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node(operator, ["a"], ["b"]),
        helper.make_node("Neg", ["b"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, SHAPE)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, SHAPE)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "model.onnx")
        onnxruntime.InferenceSession(
            model.SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["ConstantFolding"],
        )
        return shape_inference.infer_shapes(onnx.load(options.optimized_model_filepath))


def _most(model: onnx.ModelProto) -> float:
    """The most that the nodes between the two have at once, in tensors of single precision."""
    sizes = {each.name: _size(each.type.tensor_type) for each in model.graph.value_info}
    nodes = list(model.graph.node)
    places = [index for index, node in enumerate(nodes) if node.op_type == "Neg"]
    alive, most = {nodes[places[0]].output[0]}, 0.0
    for index in range(places[0] + 1, places[1]):
        node = nodes[index]
        later = {name for other in nodes[index + 1 :] for name in other.input}
        ends = {name for name in node.input if name in alive and name not in later}
        replaces = any(
            in_place(node, same_shape=sizes[name] == sizes[node.output[0]]) for name in ends
        )
        works_in = _WHERE if node.op_type == "Where" else 0.0
        alive |= set(node.output)
        held = sum(sizes.get(name, 0.0) for name in alive)
        replaced = max(sizes[name] for name in ends) if replaces else 0.0
        most = max(most, held + works_in - replaced)
        alive -= ends
    return most


def _size(kind: onnx.TypeProto.Tensor) -> float:
    elements = 1
    for axis in kind.shape.dim:
        elements *= axis.dim_value
    if elements < 8 * 16 * 16:
        return 0.0
    if kind.elem_type == TensorProto.BOOL:
        return _BOOL_PART
    return 0.5 if kind.elem_type == TensorProto.FLOAT16 else 1.0


def main() -> int:
    text = json.dumps(table(), indent=None).replace("], ", "],\n") + "\n"
    if "--check" in sys.argv[1:]:
        return int(TABLE.read_text() != text)
    TABLE.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
