"""What nodes work in is reckoned with: no fragment of one node takes more than its estimate, and
where nothing depends on the processor or on what the item says, not much less."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from chaining import Tensors
from compiler.test_resident_estimate import MIB, measured
from made_models import Made, weight
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model

OWN: Final = "com.microsoft"
LENGTH, WIDTH, HEADS, GROUPS = 1024, 512, 8, 2
HEAD: Final = WIDTH // HEADS
LIMIT_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """A node with what it reads by position; names that begin with `w` are weights, None is left
    out. `sure`: it takes about as much whatever the processor."""

    operator: str
    inputs: Mapping[str, Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = OWN
    outputs: Sequence[str] = ("y",)
    sure: bool = True

    def model(self) -> onnx.ModelProto:
        given = {name: value for name, value in self.inputs.items() if value is not None}
        node = helper.make_node(
            self.operator,
            [name if name in given else "" for name in self.inputs],
            self.outputs,
            domain=self.domain,
            **self.attributes,
        )
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid(OWN, 1)]
        graph = helper.make_graph(
            [node],
            "g",
            [
                helper.make_tensor_value_info(
                    name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
                )
                for name, value in self.item().items()
            ],
            [helper.make_empty_tensor_value_info(name) for name in self.outputs if name],
            [numpy_helper.from_array(given[name], name) for name in given if name[0] == "w"],
        )
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def item(self) -> Tensors:
        return {
            name: value
            for name, value in self.inputs.items()
            if value is not None and not name.startswith("w")
        }

    def halved(self) -> "Case":
        """The same of half precision."""
        inputs = {
            name: value.astype(np.float16) if value is not None and value.dtype == "f4" else value
            for name, value in self.inputs.items()
        }
        return replace(self, inputs=inputs, sure=False)


ROWS = weight(1, LENGTH, WIDTH)
FEW_ROWS = weight(1, LENGTH, GROUPS * HEAD)
APART = weight(1, HEADS, LENGTH, HEAD)
FEW_APART = weight(1, GROUPS, LENGTH, HEAD)
ALL_READ = np.ones((1, LENGTH), np.int32)
SAME = {"q": ROWS, "k": ROWS, "v": ROWS}
PROJECTED = {"x": ROWS, "w": weight(WIDTH, 3 * WIDTH), "wb": weight(3 * WIDTH)}
WITH_CACHE = ("y", "present_k", "present_v")
NOT_ASKED = dict.fromkeys(("no", "nor", "neither"))


def standard(
    inputs: Mapping[str, Any] = SAME, outputs: Sequence[str] = ("y",), **attributes: Any
) -> Case:
    if inputs["q"].ndim == 3:
        attributes = {"q_num_heads": HEADS, "kv_num_heads": HEADS} | attributes
    return Case("Attention", inputs, attributes, "", outputs)


def multi_head(
    inputs: Mapping[str, Any] = SAME, outputs: Sequence[str] = ("y",), **attributes: Any
) -> Case:
    return Case("MultiHeadAttention", inputs, {"num_heads": HEADS} | attributes, OWN, outputs)


def grouped(past: int = 0, **attributes: Any) -> Case:
    inputs = {
        "q": ROWS,
        "k": FEW_ROWS,
        "v": FEW_ROWS,
        "past_k": FEW_APART[:, :, :past],
        "past_v": FEW_APART[:, :, :past],
        "lengths": np.array([LENGTH + past - 1], np.int32),
        "total": np.array(LENGTH + past, np.int32),
    }
    heads = {"num_heads": HEADS, "kv_num_heads": GROUPS}
    return Case("GroupQueryAttention", inputs, heads | attributes, OWN, WITH_CACHE)


def few_bits(rows: int, bits: int = 4, block: int = 32, **attributes: Any) -> Case:
    depth, columns = 1024, 4096
    sizes = {"K": depth, "N": columns, "bits": bits, "block_size": block}
    inputs = {
        "x": weight(rows, depth),
        "w": np.ones((columns, depth // block, block * bits // 8), np.uint8),
        "ws": np.ones(columns * depth // block, np.float32),
    }
    return Case("MatMulNBits", inputs, sizes | attributes)


def experts(rows: int, number: int = 4, width: int = 256, inner: int = 1024) -> Case:
    inputs = {
        "x": weight(rows, width),
        "router": weight(rows, number),
        "w": weight(number, inner, width),
        "wb": weight(number, inner),
        "wt": weight(number, width, inner),
        "wc": weight(number, width),
    }
    return Case("MoE", inputs, {"k": 2, "activation_type": "gelu"}, sure=False)


def quantised_experts(rows: int, number: int = 4, width: int = 256, inner: int = 1024) -> Case:
    inputs = {
        "x": weight(rows, width),
        "router": weight(rows, number),
        "w": np.ones((number, inner, width // 2), np.uint8),
        "ws": np.ones((number, inner), np.float32),
        "no": None,
        "wt": np.ones((number, width, inner // 2), np.uint8),
        "wts": np.ones((number, width), np.float32),
    }
    attributes = {"k": 2, "activation_type": "gelu", "expert_weight_bits": 4}
    return Case("QMoE", inputs, attributes, sure=False)


PAST = {"mask": None, "past_k": APART, "past_v": APART}
CACHED = {**SAME, **NOT_ASKED, "past_k": APART, "past_v": APART}
BOOLS = np.ones((1, HEADS, LENGTH, LENGTH), bool)
NUMBERS = np.zeros((1, HEADS, LENGTH, LENGTH), np.float32)
CASES: dict[str, Case] = {
    "attention of onnx": standard(),
    "of heads that are apart": standard({"q": APART, "k": APART, "v": APART}),
    "of heads in groups": standard({"q": APART, "k": FEW_APART, "v": FEW_APART}),
    "causal": standard(is_causal=1),
    "causal, in two regions of one size": standard(
        {"q": weight(1, 256, 64), "k": weight(1, 7744, 64), "v": weight(1, 7744, 64)}, is_causal=1
    ),
    "causal, with an output outside the arena": standard(
        dict.fromkeys("qkv", weight(1, 1408, WIDTH)), is_causal=1
    ),
    "capped": standard(softcap=5.0),
    "with a mask of numbers": standard({**SAME, "mask": NUMBERS}),
    "with a mask of bools": standard({**SAME, "mask": BOOLS}),
    "with a mask of numbers, and causal": standard({**SAME, "mask": NUMBERS}, is_causal=1),
    "with a cache": standard({**SAME, **PAST}, WITH_CACHE),
    "giving its products": replace(standard(outputs=("y", "", "", "qk")), sure=False),
    "attention with its projections": Case("Attention", PROJECTED, {"num_heads": HEADS}),
    "with its projections, causal": Case(
        "Attention", PROJECTED, {"num_heads": 1, "unidirectional": 1}
    ),
    "with its projections and a cache": Case(
        "Attention",
        {**PROJECTED, "mask": None, "past": np.stack([APART, APART])},
        {"num_heads": HEADS, "unidirectional": 1},
        OWN,
        ("y", "present"),
    ),
    "attention of several heads": replace(multi_head(), sure=False),
    "of several heads, masked": multi_head({**SAME, "bias": None, "mask": ALL_READ}),
    "of several heads, with a bias": replace(
        multi_head({**SAME, "wb": weight(3 * WIDTH)}), sure=False
    ),
    "of several heads, with a cache": multi_head(CACHED, WITH_CACHE),
    "of several heads, giving a cache": multi_head(outputs=WITH_CACHE),
    "of several heads with keys apart": multi_head({"q": ROWS, "k": APART, "v": APART}),
    "grouped attention": grouped(),
    "grouped, with a cache": grouped(LENGTH),
    "grouped and capped": grouped(softcap=5.0),
    "grouped and smooth": grouped(smooth_softmax=1),
    "weights of four bits, one row": few_bits(1),
    "weights of four bits": few_bits(128),
    "weights of four bits, less accurate": few_bits(128, accuracy_level=4),
    "weights of eight bits": few_bits(4, bits=8, block=128),
    "experts": experts(1024),
    "experts of few bits": quantised_experts(1024),
}
CASES |= {
    f"{name}, of halves": CASES[name].halved()
    for name in (
        "attention of onnx",
        "with a mask of bools",
        "with a cache",
        "grouped attention",
        "grouped, with a cache",
        "weights of four bits",
        "experts",
        "experts of few bits",
    )
}
OFTEN: Final = (
    "attention of onnx",
    "causal, in two regions of one size",
    "causal, with an output outside the arena",
    "with a mask of bools",
    "attention with its projections",
    "of several heads, masked",
    "of several heads, giving a cache",
    "grouped attention, of halves",
    "grouped, with a cache",
    "weights of four bits, one row",
    "weights of four bits, of halves",
)


def reckoned_and_taken(model: onnx.ModelProto, item: Tensors, folder: Path) -> tuple[int, int]:
    """The estimate for a model as one fragment, and the peak over three items."""
    path = folder / "model.onnx"
    onnx.save(model, path)
    (fragment,) = cut_model(path, profile_model(path), (), folder).fragments
    place = folder / "fragments" / fragment.digest.removeprefix("sha256:")
    peak = measured(place, item, folder, limit_bytes=LIMIT_BYTES)
    print(f"{fragment.resident_bytes / MIB:.1f} MiB reckoned, {peak / MIB:.1f} MiB measured")
    return fragment.resident_bytes, peak


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each in OFTEN else pytest.mark.minutes) for each in CASES],
)
def test_what_a_node_works_in_is_reckoned(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    reckoned, taken = reckoned_and_taken(case.model(), case.item(), tmp_path)
    assert taken <= reckoned
    if case.sure:
        assert reckoned < 1.5 * taken + 4 * MIB


CHOICE = Made(
    text="""g (bool[1024,2048] c, int64[1024,2048] a, int64[1,2048] b) => (int64[1,2048] y) {
        chosen = Where(c, a, b) y = ReduceMax<keepdims = 1, axes = [0]>(chosen) }""",
    weights={},
    shapes={"c": (1024, 2048), "a": (1024, 2048), "b": (1, 2048)},
)


def test_numbers_that_are_chosen_have_the_size_of_their_type(tmp_path: Path) -> None:
    item = {
        "c": np.ones((1024, 2048), bool),
        "a": np.ones((1024, 2048), np.int64),
        "b": np.ones((1, 2048), np.int64),
    }
    reckoned, taken = reckoned_and_taken(CHOICE.proto(), item, tmp_path)
    assert 3 * 16 * MIB < taken <= reckoned


SIDE = 2048
LEFT = Made(
    text="""g (float[1,1024] x) => (float[1,4096] y) {
        most = ReduceMax<keepdims = 1>(x) column = Mul(most, c) square = MatMul(column, r)
        least = ReduceMin<keepdims = 1>(square) z = Add(x, least)
        y = com.microsoft.MatMulNBits<K = 1024, N = 4096, bits = 4, block_size = 32>(z, W, s) }""",
    weights={
        "c": weight(SIDE, 1),
        "r": weight(1, SIDE),
        "W": np.ones((4096, 32, 16), np.uint8),
        "s": np.ones(4096 * 32, np.float32),
    },
    shapes={"x": (1, 1024)},
)
"""16 MiB that are over when a node needs as many."""


def test_what_is_taken_beside_the_arena_has_no_place_that_others_left(tmp_path: Path) -> None:
    model = LEFT.proto()
    model.opset_import.append(helper.make_opsetid(OWN, 1))
    reckoned, taken = reckoned_and_taken(model, LEFT.inputs(), tmp_path)
    assert 32 * MIB < taken <= reckoned
