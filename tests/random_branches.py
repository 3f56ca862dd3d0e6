"""Hypothesis draws models whose Ifs have long branches, one inside another at times.

A branch reads what is around it, has constants of its own, and gives what it has made, or what is
around it.
"""

from dataclasses import dataclass

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from made_models import weight

WIDTH = 16
WEIGHTS = {f"W{number}": weight(WIDTH, WIDTH, seed=number) for number in range(4)}
_DEEPEST = 2


@dataclass
class _Net:
    """What is drawn so far."""

    draw: st.DrawFn
    conditions: tuple[str, ...]
    count: int = 0

    def fresh(self, kind: str) -> str:
        """A name that nothing else has."""
        self.count += 1
        return f"{kind}{self.count}"

    def nodes(self, known: list[str], depth: int, most: int) -> list[onnx.NodeProto]:
        """Nodes that each give a tensor of [N, 16], which is then known."""
        made = []
        for _ in range(self.draw(st.integers(1, most))):
            kinds = ["Relu", "MatMul", "Add", "Constant", "Reshape", "If"]
            kind = self.draw(st.sampled_from(kinds[: len(kinds) - (depth == _DEEPEST)]))
            made += self.node(kind, known, depth)
            known.append(made[-1].output[0])
        return made

    def node(self, kind: str, known: list[str], depth: int) -> list[onnx.NodeProto]:
        one, two = (self.draw(st.sampled_from(known)) for _ in range(2))
        output = self.fresh("t")
        match kind:
            case "MatMul":
                name = self.draw(st.sampled_from(sorted(WEIGHTS)))
                return [helper.make_node("MatMul", [one, name], [output])]
            case "Add":
                return [helper.make_node("Add", [one, two], [output])]
            case "Constant":
                value = numpy_helper.from_array(np.full(WIDTH, self.count, np.float32))
                constant = helper.make_node("Constant", [], [self.fresh("c")], value=value)
                return [constant, helper.make_node("Mul", [one, constant.output[0]], [output])]
            case "Reshape":
                shape = helper.make_node("Shape", [one], [self.fresh("s")])
                return [shape, helper.make_node("Reshape", [two, shape.output[0]], [output])]
            case "If":
                return [self.choice(known, depth + 1)]
        return [helper.make_node(kind, [one], [output])]

    def choice(self, known: list[str], depth: int) -> onnx.NodeProto:
        count = self.draw(st.integers(1, 2))
        condition = self.draw(st.sampled_from(self.conditions))
        branches = {
            f"{which}_branch": self.branch(list(known), depth, count) for which in ("then", "else")
        }
        outputs = [self.fresh("t") for _ in range(count)]
        made = helper.make_node("If", [condition], outputs, name=outputs[0])
        made.attribute.extend(helper.make_attribute(*each) for each in branches.items())
        return made

    def branch(self, known: list[str], depth: int, count: int) -> onnx.GraphProto:
        nodes = self.nodes(known, depth, 4)
        given = [self.draw(st.sampled_from(known)) for _ in range(count)]
        outputs = []
        for name in given:  # a graph gives what it has made itself
            outputs.append(self.fresh("g"))
            nodes.append(helper.make_node("Identity", [name], outputs[-1:]))
        return helper.make_graph(nodes, "branch", [], [_value(name) for name in outputs])


@st.composite
def branching_models(draw: st.DrawFn) -> onnx.ModelProto:
    """Inputs are x and z of [N, 16], and the conditions p and q."""
    net = _Net(draw, ("p", "q"))
    known = ["x", "z"]
    nodes = net.nodes(known, 0, 3)
    last = net.choice(known, 1)
    known += last.output
    nodes += [last, *net.nodes(known, 0, 3)]
    outputs = draw(st.lists(st.sampled_from(known[2:]), min_size=1, max_size=3, unique=True))
    inputs = [_value("x"), _value("z")]
    inputs += [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("p", "q")]
    graph = helper.make_graph(
        nodes,
        "g",
        inputs,
        [_value(name) for name in outputs],
        [numpy_helper.from_array(each, name) for name, each in WEIGHTS.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", WIDTH])
