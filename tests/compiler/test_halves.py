"""Fragments of half precision: what is reckoned, and in which form tensors are there, against what
ONNX Runtime takes and does."""

import random
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from chaining import Tensors, run_chained, run_whole
from compiler.test_resident_estimate import MIB, measured
from half_models import FAMILIES
from made_models import Made
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_planner.arena import Arena
from shoal_planner.cuts import CutRequest, Frames, Refusal, choose_cuts
from shoal_planner.halves import HalfTensors
from shoal_planner.least_limit import least_around, least_needs
from shoal_planner.profile import Halves
from shoal_planner.segments import Growing, Layout

ROOT = Path(__file__).resolve().parents[2]
INSERTED = "InsertedPrecisionFreeCast_"
OFTEN = ("values that are moved", "weights that are made single", "a table")
CASES = [
    pytest.param(name, count, marks=() if name in OFTEN else pytest.mark.minutes)
    for name in FAMILIES
    for count in (1, 3, 5)
    if count == 1 or name not in ("weights that are made single", "a table")
]


@pytest.mark.parametrize(("name", "count"), CASES)
def test_no_fragment_takes_more_than_is_reckoned_nor_much_less(
    name: str, count: int, tmp_path: Path
) -> None:
    made = FAMILIES[name]()
    path, item = tmp_path / "model.onnx", dict(made.item)
    onnx.save(made.model, path)
    profile = profile_model(path, {key: value.shape for key, value in item.items()})
    legal = Layout(profile).legal
    cuts = tuple(legal[len(legal) * part // count] for part in range(1, count))
    document = cut_model(path, profile, cuts, tmp_path)
    kept: dict[int, Tensors] = {}
    assert_equal(run_chained(tmp_path, document, item, kept), run_whole(path, item))
    for fragment in document.fragments:
        tensors = {
            tensor: kept[edge.producer][tensor]
            for edge in document.into(fragment.index)
            for tensor in edge.tensors
        }
        folder = tmp_path / "fragments" / fragment.digest.removeprefix("sha256:")
        limit = fragment.resident_bytes + fragment.resident_bytes // 5
        taken = measured(folder, tensors, tmp_path, limit_bytes=limit)
        assert taken <= fragment.resident_bytes < 1.35 * taken + 3 * MIB


def assert_equal(got: Tensors, wanted: Tensors) -> None:
    """To the bit, and of one type."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype, name
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("name", ["a detector", "values that are moved"])
def test_a_search_reckons_with_no_less_than_a_fragment_carries(name: str, tmp_path: Path) -> None:
    made = FAMILIES[name]()
    onnx.save(made.model, tmp_path / "model.onnx")
    layout = Layout(profile_model(tmp_path / "model.onnx"))
    for start in (0, *layout.legal):
        growing, least = Growing(layout, start), 0
        for end in (*layout.legal, len(layout.profile.nodes)):
            while growing.end < end:
                growing.grow()
            if end > start:
                carried = layout.segment(start, end).resident_bytes
                assert growing.resident_bytes >= carried - MIB // 64, (start, end)
                assert growing.resident_bytes >= growing.least_bytes >= least, (start, end)
                least = growing.least_bytes


def random_model(seed: int, opset: int = 17) -> onnx.ModelProto:
    """Nodes of single and half precision, some that move values, and conversions. In the set 18
    some are made of several others."""
    chance = random.Random(seed)  # noqa: S311 - nothing is secret
    halves, singles = ["x", "z"], ["f"]
    weights: dict[str, Any] = {
        "w": np.ones((4, 4), np.float16),
        "s": np.ones(4, np.float16),
        "shape": np.array([4, 4]),
        "begin": np.array([0]),
        "end": np.array([4]),
    }
    nodes: list[onnx.NodeProto] = []
    no: dict[str, Any] = {}

    def half() -> str:
        return chance.choice(halves[-4:])

    for number in range(chance.randint(3, 12)):
        operator, inputs, attributes = chance.choice(
            [
                *[("Neg", [half()], no)] * 2,
                ("Add", [half(), half()], no),
                ("Add", [half(), "w"], no),
                ("Transpose", [half()], {"perm": [1, 0]}),
                ("Relu", [half()], no),
                ("HardSigmoid", [half()], no),
                ("Reshape", [half(), "shape"], no),
                ("Slice", [half(), "begin", "end"], no),
                ("Max", [half(), half()], no),
                ("Max", [half(), "w"], no),
                ("LayerNormalization", [half(), "s", "s"], no),
                ("Cast", [half()], {"to": TensorProto.FLOAT}),
                ("Cast", [chance.choice(singles)], {"to": TensorProto.FLOAT16}),
                ("Abs", [chance.choice(singles)], no),
            ]
        )
        is_single = operator == "Abs" or attributes.get("to") == TensorProto.FLOAT
        (singles if is_single else halves).append(f"t{number}")
        nodes.append(helper.make_node(operator, inputs, [f"t{number}"], **attributes))
    used = {name for node in nodes for name in node.input}
    results = [n.output[0] for n in nodes if n.output[0] not in used or chance.random() < 0.15]

    def value(name: str) -> onnx.ValueInfoProto:
        kind = TensorProto.FLOAT16 if name in halves else TensorProto.FLOAT
        return helper.make_tensor_value_info(name, kind, [4, 4])

    graph = helper.make_graph(
        nodes,
        "g",
        list(map(value, ("x", "z", "f"))),
        list(map(value, results)),
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def with_numbers(model: onnx.ModelProto, seed: int) -> Tensors:
    """Give the weights numbers that rounding changes; such an item."""
    chance = np.random.default_rng(seed)
    for weight in model.graph.initializer:
        if weight.data_type == TensorProto.FLOAT16:
            values = chance.standard_normal(tuple(weight.dims)).astype(np.float16)
            weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    item = {}
    for each in model.graph.input:
        dtype = helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type)
        item[each.name] = chance.standard_normal((4, 4)).astype(dtype)
    return item


def widens_what_others_read(model: onnx.ModelProto) -> bool:
    """Whether the model itself makes single precision of halves that something else takes too."""
    read = [name for node in model.graph.node for name in node.input]
    read += [each.name for each in model.graph.output]
    return any(
        node.op_type == "Cast"
        and node.attribute[0].i == TensorProto.FLOAT
        and read.count(node.input[0]) > 1
        for node in model.graph.node
    )


@pytest.mark.parametrize("seeds", [range(60), range(60, 120)], ids=str)
def test_what_the_whole_model_keeps_in_single_precision_is_rounded_at_no_cut(
    seeds: range, tmp_path: Path
) -> None:
    cut = 0
    for seed in seeds:
        model = random_model(seed, opset=18 - seed % 2)
        if widens_what_others_read(model):
            continue  # it may be rounded by a conversion that is in another fragment
        path, item = tmp_path / "model.onnx", with_numbers(model, seed)
        onnx.save(model, path)
        whole, profile = run_whole(path, item), profile_model(path)
        legal = Layout(profile).legal
        for cuts in ((), legal, *((each,) for each in legal)):
            document = cut_model(path, profile, cuts, tmp_path / str(seed))
            assert_equal(run_chained(tmp_path / str(seed), document, item), whole)
            sent = [tensor for edge in document.edges for tensor in edge.tensors]
            cut += any(profile.tensors[each].sent_single for each in sent)
    assert cut > len(seeds)


def test_what_is_made_of_halves_that_are_an_output_is_rounded_at_no_cut(tmp_path: Path) -> None:
    def numbers(*shape: int) -> np.ndarray:
        return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float16) / 8

    made = Made(
        text="""g (float16[N,64] x) => (float16[N,64] a, float[N,64] y) {
            a = MatMul(x, W) b = Cast<to = 1>(a) c = Mul(b, k) y = Tanh(c) }""",
        weights={"W": numbers(64, 64), "k": np.array(1, np.float32)},
        feeds={"x": numbers(4, 64)},
    )
    path, item = made.save(tmp_path), made.inputs()
    whole, profile = run_whole(path, item), profile_model(path)
    for cuts in ((), *((each,) for each in Layout(profile).legal)):
        document = cut_model(path, profile, cuts, tmp_path / "store")
        assert_equal(run_chained(tmp_path / "store", document, item), whole)


def converted_by_the_runtime(model: onnx.ModelProto, folder: Path) -> tuple[set[str], set[str]]:
    """Of which tensors it makes single precision, and of which halves."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    singles, halves = set[str](), set[str]()
    for node in onnx.load(options.optimized_model_filepath).graph.node:
        if node.op_type == "Cast":
            is_single = node.attribute[0].i == TensorProto.FLOAT
            (singles if is_single else halves).add(node.output[0].removeprefix(INSERTED))
    return singles, halves


def converted_as_reckoned(path: Path) -> tuple[set[str], set[str]]:
    profile = profile_model(path)
    growing = Growing(Layout(profile), 0, asked_once=True)
    while growing.end < len(profile.nodes):
        growing.grow()
    tensors = growing._tensors
    if not isinstance(tensors, HalfTensors):
        return set(), set()
    forms = tensors._replay(Arena(), frozenset()).forms
    singles, halves = set[str](), set[str]()
    for at in forms.running:
        node = forms.ran[at].node
        singles |= {
            name
            for name, form in forms.taken[at]
            if form not in (name, forms.same.get(name)) and not forms.is_made_single(name)
        }
        if node.halves is Halves.WIDENED or (
            node.halves is Halves.KEPT and node.operator == "Cast"
        ):
            singles |= set(node.outputs) - forms.same.keys()
        if at in forms.converts or node.halves is Halves.NARROWED:
            halves |= {name for name in node.outputs if name in forms.lasts}
    halves = set(filter(forms.is_half, halves))
    # Outputs that nodes read are made under another name, and given by nodes of their own.
    return {name.split("/")[0] for name in singles}, {name.split("/")[0] for name in halves}


@pytest.mark.parametrize("seeds", [range(60), range(60, 120)], ids=str)
def test_all_that_the_runtime_converts_is_reckoned(seeds: range, tmp_path: Path) -> None:
    same = 0
    for seed in seeds:
        model = random_model(seed)
        path = tmp_path / "model.onnx"
        onnx.save(model, path)
        theirs, ours = converted_by_the_runtime(model, tmp_path), converted_as_reckoned(path)
        assert theirs[0] <= ours[0], seed
        assert theirs[1] <= ours[1], seed
        same += theirs == ours
    # The rest are conversions of the model that undo one another.
    assert same >= len(seeds) - 4


def test_the_table_of_kernels_is_that_of_the_runtime() -> None:
    command = [sys.executable, str(ROOT / "hack" / "halves.py"), "--check"]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


PICTURE = "float16[1,32,256,256]"
BODIES = {
    "a loop": f"""g ({PICTURE} x) => ({PICTURE} y) {{ y = Loop(n, go, x) <body =
        b (int64 i, bool c, {PICTURE} a) => (bool d, {PICTURE} z)
        {{ d = Identity(c) e = Exp(a) z = Neg(e) }}> }}""",
    "a choice": f"""g ({PICTURE} x) => ({PICTURE} y) {{ m = ReduceMax<keepdims = 0>(x)
        c = Cast<to = 9>(m) y = If(c) <then_branch = t () => ({PICTURE} a)
        {{ e = Exp(x) a = Neg(e) }}, else_branch =
        o () => ({PICTURE} b) {{ b = Identity(x) }}> }}""",
}


@pytest.mark.parametrize("text", BODIES.values(), ids=BODIES)
def test_halves_inside_of_loops_and_choices_are_converted_as_well(
    text: str, tmp_path: Path
) -> None:
    weights = {"n": np.array(3), "go": np.array(True)} if "Loop" in text else {}
    path = Made(text=text, weights=weights).save(tmp_path)
    (fragment,) = cut_model(path, profile_model(path), (), tmp_path).fragments
    folder = tmp_path / "fragments" / fragment.digest.removeprefix("sha256:")
    item = {"x": np.ones((1, 32, 256, 256), np.float16)}
    taken = measured(folder, item, tmp_path, limit_bytes=256 * MIB)
    assert taken <= fragment.resident_bytes < 1.5 * taken


def test_a_limit_that_a_constant_of_half_precision_keeps_by_itself_is_found(
    tmp_path: Path,
) -> None:
    """A search counts more of halves that become single precision than a fragment needs of them."""
    weights: dict[str, Any] = {
        "half": np.zeros((512, 600), np.float16),
        "plain": np.zeros((600, 1000), np.float32),
        "rows": np.zeros((3000, 1000), np.float32),
        "from": np.array([0]),
        "to": np.array([1000]),
    }
    nodes = [
        helper.make_node("Cast", ["half"], ["single"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "single"], ["a"]),
        helper.make_node("MatMul", ["a", "plain"], ["b"]),
        helper.make_node("Slice", ["rows", "from", "to", "from"], ["picked"]),
        helper.make_node("MatMul", ["b", "picked"], ["y"]),
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, size])
        for name, size in (("x", 512), ("y", 1000))
    )
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "halves", [x], [y], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "model.onnx")
    profile = profile_model(tmp_path / "model.onnx")
    refused = choose_cuts(profile, CutRequest(max_bytes=1))
    assert isinstance(refused, Refusal)
    assert refused.need_bytes is not None
    for more in (0, MIB, 3 * MIB, 6 * MIB, 12 * MIB):
        cuts = choose_cuts(profile, CutRequest(max_bytes=refused.need_bytes + more))
        assert isinstance(cuts, tuple), more


@pytest.mark.parametrize("name", ["a U-Net", "islands of single precision", "a table"])
def test_no_fragment_of_halves_needs_less_than_the_bounds_of_what_is_in_it(
    name: str, tmp_path: Path
) -> None:
    onnx.save(FAMILIES[name]().model, tmp_path / "model.onnx")
    layout = Layout(profile_model(tmp_path / "model.onnx"))
    bounds = list(least_needs(layout))
    positions = (0, *layout.legal, len(layout.profile.nodes))
    around = {piece: least_around(layout, range(*piece)) for piece in pairwise(positions)}
    for start, end in combinations(positions, 2):
        need = layout.segment(start, end).resident_bytes
        assert max(bounds[start:end]) <= need
        for piece, least in around.items():
            if start <= piece[0] < end:
                assert max(least[each] for each in positions if start <= each <= piece[0]) <= need


@pytest.mark.parametrize("name", FAMILIES)
def test_every_limit_that_some_cut_of_halves_keeps_is_found(name: str, tmp_path: Path) -> None:
    """Where a fragment ends, halves are made that are not where it goes on: a longer one may need
    less."""
    onnx.save(FAMILIES[name]().model, tmp_path / "model.onnx")
    profile = profile_model(tmp_path / "model.onnx")
    for frames in Frames:
        refused = choose_cuts(profile, CutRequest(max_bytes=1, frames=frames))
        assert isinstance(refused, Refusal)
        assert refused.need_bytes is not None
        for percent in (0, 1, 2, 4, 8):
            limit = refused.need_bytes * (100 + percent) // 100
            cuts = choose_cuts(profile, CutRequest(max_bytes=limit, frames=frames))
            assert isinstance(cuts, tuple), percent


def test_a_weight_of_half_precision_without_elements_takes_nothing(tmp_path: Path) -> None:
    """As exporters write the region of a Resize that has none."""
    weights: dict[str, Any] = {
        "none": np.zeros(0, np.float16),
        "scales": np.array([1, 1, 2, 2], np.float32),
    }
    text = """g (float16[1,4,8,8] x) => (float16[1,4,16,16] y) {
        r = Resize(x, none, scales) y = Exp(r) }"""
    path = Made(text=text, weights=weights).save(tmp_path)
    profile = profile_model(path)
    item = {"x": np.random.default_rng(0).standard_normal((1, 4, 8, 8)).astype(np.float16)}
    document = cut_model(path, profile, Layout(profile).legal, tmp_path)
    assert len(document.fragments) == 2
    assert_equal(run_chained(tmp_path, document, item), run_whole(path, item))
