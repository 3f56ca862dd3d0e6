"""Hypothesis draws models: DAGs with skips, branches, shapes, masks and loose ends."""

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from made_models import weight

WIDTH = 16
OPERATORS = {
    "unary": ["Relu", "Tanh", "Sigmoid"],
    "work": ["MatMul"],
    "join": ["Add", "Mul", "Max"],
    "shape": ["Shape"],
    "constant": ["Neg"],
    "scale": ["Mul"],
    "branch": ["If"],
    "mask": ["Expand"],
    "reshape": ["Reshape"],
}
WEIGHTS = {f"W{number}": weight(WIDTH, WIDTH, seed=number) for number in range(3)}


Node = tuple[str, list[str], str]


@st.composite
def models(draw: st.DrawFn) -> onnx.ModelProto:
    """DAGs of [N, 16] tensors: work, skips, shapes, masks, constants, branches, loose ends."""
    inputs = [f"x{number}" for number in range(draw(st.integers(1, 3)))]
    made, shapes, constants, nodes = list(inputs), ["s"], ["half"], list[Node]()
    nodes.append(("Shape", [inputs[-1]], "s"))

    def one_of(names: list[str]) -> str:
        return draw(st.sampled_from(names))

    kinds = ["unary", "work", "join", "shape", "constant", "scale", "branch", "mask", "reshape"]
    for number in range(draw(st.integers(3, 16))):
        kind, name = one_of(kinds), f"t{number}"
        reads = {
            "unary": [one_of(made)],
            "work": [one_of(made), one_of(sorted(WEIGHTS))],
            "join": [one_of(made), one_of(made)],
            "shape": [one_of(made)],
            "constant": [one_of(constants)],
            "scale": [one_of(made), one_of(constants)],
            "branch": [one_of(made), one_of(made), one_of(constants)],
            "mask": [one_of(constants), one_of(shapes)],
            "reshape": [one_of(made), one_of(shapes)],
        }
        nodes.append((one_of(OPERATORS[kind]), reads[kind], name))
        {"shape": shapes, "constant": constants}.get(kind, made).append(name)
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    return model(inputs, outputs, nodes)


def model(inputs: list[str], outputs: list[str], nodes: list[Node]) -> onnx.ModelProto:
    def value(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", WIDTH])

    protos = []
    for operator, reads, name in nodes:
        if operator == "If":
            first, second, constant = reads
            protos.append(helper.make_node("ReduceSum", [first], [f"{name}.s"], keepdims=0))
            protos.append(helper.make_node("Greater", [f"{name}.s", constant], [f"{name}.c"]))
            graphs = [
                helper.make_graph(
                    [helper.make_node(inner, [second, other], [f"{name}.{inner}"])],
                    inner,
                    [],
                    [value(f"{name}.{inner}")],
                )
                for inner, other in (("MatMul", "W0"), ("Mul", constant))
            ]
            protos.append(
                helper.make_node(
                    "If", [f"{name}.c"], [name], then_branch=graphs[0], else_branch=graphs[1]
                )
            )
        else:
            protos.append(helper.make_node(operator, reads, [name]))
    weights = [numpy_helper.from_array(each, name) for name, each in WEIGHTS.items()]
    weights.append(numpy_helper.from_array(np.array(0.5, np.float32), "half"))
    graph = helper.make_graph(
        protos, "g", [value(each) for each in inputs], [value(each) for each in outputs], weights
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
