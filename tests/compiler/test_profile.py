"""What a profile says of models whose numbers are known."""

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from made_models import TOPOLOGIES, Made, weight
from shoal_compiler.errors import ModelRefused
from shoal_compiler.profile import Source, profile_model
from shoal_compiler.profiler import Profiler
from shoal_planner.profile import Role
from shoal_planner.segments import Growing, Layout

CONVOLUTION = Made(
    text="""g (float[N,3,8,8] x) => (float[N,10] y) {
        a = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, K) b = Relu(a)
        c = GlobalAveragePool(b) d = Flatten(c) y = Gemm(d, G, bias) }""",
    weights={"K": weight(16, 3, 3, 3), "G": weight(16, 10), "bias": weight(10)},
)


def test_costs_are_those_of_the_book(tmp_path: Path) -> None:
    profile = profile_model(CONVOLUTION.save(tmp_path), {"x": (2, 3, 8, 8)})
    cost = {node.operator: node for node in profile.nodes}
    assert cost["Conv"].flops == 2 * (2 * 16 * 8 * 8) * (3 * 3 * 3)
    assert cost["Conv"].parameter_bytes == 16 * 27 * 4
    assert cost["Conv"].activation_bytes == 2 * 16 * 8 * 8 * 4
    assert cost["Relu"].flops == 2 * 16 * 8 * 8
    assert cost["Gemm"].flops == 2 * 2 * 10 * 16
    assert cost["Gemm"].parameter_bytes == (160 + 10) * 4
    assert profile.parameters == 16 * 27 + 160 + 10
    assert profile.weight_bytes == 4 * profile.parameters


@pytest.mark.parametrize("shapes", [{}, {"x": (2, 3, 8, 8)}])
def test_what_was_inferred_to_part_layers_is_what_a_profile_infers(
    shapes: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    source = Source.open(CONVOLUTION.save(tmp_path)).fitted(shapes)
    assert source.fitted(shapes, {}).known_shapes(shapes, None) is not None
    anew = Profiler.of(source.graph, shapes).profile(source.model, *source.digests)
    assert source.profile(shapes) == anew
    assert source.known_shapes({"x": (3, 3, 8, 8)}, None) is None
    other = {"x": (3, 3, 8, 8)}  # which it is not fitted to
    assert source.profile(other) == Source.open(source.path).fitted(other).profile(other) != anew


@pytest.mark.parametrize("name", [*TOPOLOGIES, "open"])
def test_inputs_are_known_without_a_profile(name: str, tmp_path: Path) -> None:
    model = TOPOLOGIES.get(name, CONVOLUTION).proto()
    if name == "open":  # it does not say how many axes its input has
        model.graph.input[0].type.tensor_type.ClearField("shape")
    onnx.save(model, path := tmp_path / "model.onnx")
    source = Source.open(path)
    assert source.inputs({}) == source.profile().inputs


def test_what_is_unknown_is_none_and_not_zero(tmp_path: Path) -> None:
    profile = profile_model(CONVOLUTION.save(tmp_path))
    cost = {node.operator: node for node in profile.nodes}
    assert cost["Conv"].flops is None
    assert cost["Conv"].activation_bytes is None
    assert profile.flops is None
    assert cost["Conv"].parameter_bytes == 16 * 27 * 4
    assert profile.tensors["a"].bytes is None
    assert profile.tensors["a"].spec.shape == ("N", 16, 8, 8)


def test_inputs_and_outputs_keep_their_symbolic_axes(tmp_path: Path) -> None:
    profile = profile_model(CONVOLUTION.save(tmp_path), {"x": (2, 3, 8, 8)})
    assert [(each.name, each.dtype, each.shape) for each in profile.inputs] == [
        ("x", "float", ("N", 3, 8, 8))
    ]
    assert [(each.name, each.shape) for each in profile.outputs] == [("y", ("N", 10))]


def test_shapes_are_known_through_what_computes_them(tmp_path: Path) -> None:
    made = TOPOLOGIES["shapes computed and used far away"]
    profile = profile_model(made.save(tmp_path), {"x": (5, 4, 4)})
    assert profile.tensors["f"].bytes == 5 * 16 * 4
    assert profile.tensors["y"].bytes == 5 * 16 * 4
    roles = {node.outputs[0]: node.role for node in profile.nodes}
    assert roles["s"] is roles["n"] is roles["full"] is Role.SHAPE
    assert roles["f"] is Role.COMPUTE


def test_constants_come_first_and_shapes_directly_behind_what_they_are_of(tmp_path: Path) -> None:
    profile = profile_model(TOPOLOGIES["a mask made from shapes"].save(tmp_path))
    assert [node.outputs[0] for node in profile.nodes] == ["a", "s", "m", "b", "c", "y"]
    profile = profile_model(TOPOLOGIES["constants computed from constants"].save(tmp_path))
    assert [node.role for node in profile.nodes][:2] == [Role.CONSTANT, Role.CONSTANT]


def test_chance_is_never_repeated(tmp_path: Path) -> None:
    profile = profile_model(TOPOLOGIES["chance"].save(tmp_path))
    assert {node.role for node in profile.nodes} == {Role.COMPUTE}


def test_the_digest_is_the_files(tmp_path: Path) -> None:
    path = CONVOLUTION.save(tmp_path)
    own = hashlib.sha256(path.read_bytes()).hexdigest()
    profile = profile_model(path)
    assert profile.digest == profile.graph_digest == f"sha256:{own}"
    assert profile.size_bytes == path.stat().st_size


def test_the_digest_covers_external_data(tmp_path: Path) -> None:
    path = CONVOLUTION.save(tmp_path, external=True)
    before = profile_model(path)
    data = tmp_path / "data.bin"
    lines = "".join(
        f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in (path, data)
    )
    assert before.digest == f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"
    changed = bytearray(data.read_bytes())
    changed[0] ^= 1
    data.write_bytes(changed)
    after = profile_model(path)
    assert after.digest != before.digest
    assert after.graph_digest == before.graph_digest


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"nobody": (1,)}, "no input nobody"),
        ({"x": (1, 3, 8)}, "cannot have the shape"),
        ({"x": (1, 4, 8, 8)}, "cannot have the shape"),
        ({"x": (-1, 3, 8, 8)}, "cannot have the shape"),
    ],
)
def test_shapes_that_contradict_the_model_are_refused(
    shapes: dict[str, tuple[int, ...]], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelRefused, match=reason):
        profile_model(CONVOLUTION.save(tmp_path), shapes)


def test_the_same_file_has_the_same_profile(tmp_path: Path) -> None:
    path = TOPOLOGIES["a branch that captures"].save(tmp_path)
    assert profile_model(path) == profile_model(path)


def table(reader: str) -> Made:
    """A table of 1000 rows of 4 KiB, from which `reader` makes y."""
    text = f"g (int64[N,L] i, float[N,1000] f) => (float[A,B,C] y) {{ y = {reader} }}"
    return Made(text=text, weights={"T": weight(1000, 1024)})


@pytest.mark.parametrize(
    ("reader", "indices", "touched"),
    [
        # For each row what the kernel maps around it.
        ("Gather(T, i)", (1, 8), 8 * (64 << 10)),
        ("Gather(T, i)", (1, 4096), 1000 * 4096),
        ("Gather(T, i)", None, 1000 * 4096),
        ("Gather<axis = 1>(T, i)", (1, 8), 1000 * 4096),
        ("MatMul(f, T)", (1, 8), 1000 * 4096),
    ],
)
def test_of_a_table_the_rows_that_an_item_reads_are_reckoned(
    reader: str, indices: tuple[int, int] | None, touched: int, tmp_path: Path
) -> None:
    shapes = {} if indices is None else {"i": indices}
    profile = profile_model(table(reader).save(tmp_path), shapes)
    for items in (1, 2):
        growing = Growing(Layout(profile, row_items=items), 0)
        growing.grow()
        assert growing.weight_bytes == min(items * touched, 1000 * 4096)
    assert profile.weight_bytes == 1000 * 4096


@pytest.mark.parametrize(
    ("node", "table"),
    [
        (
            helper.make_node(
                "GatherBlockQuantized", ["T", "i", "scales"], ["y"], bits=8, block_size=64
            ),
            np.zeros((4000, 1024), np.uint8),
        ),
        (
            helper.make_node(
                "EmbedLayerNormalization", ["i", "", "T", "P", "", "g", "g"], ["y", "lengths"]
            ),
            np.zeros((1000, 1024), np.float32),
        ),
    ],
)
def test_of_tables_of_the_runtimes_own_operators_rows_are_reckoned_too(
    node: onnx.NodeProto, table: npt.NDArray[np.generic], tmp_path: Path
) -> None:
    node.domain = "com.microsoft"
    weights = {"T": table, "P": weight(16, 1024), "g": weight(1024), "scales": weight(4000, 16)}
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("i", TensorProto.INT32, (1, 8))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weights[name], name) for name in weights if name in node.input],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "model.onnx")
    (only,) = profile_model(tmp_path / "model.onnx").nodes
    assert dict(only.touched)["T"] == 8 * (64 << 10)


def test_a_table_that_is_read_whole_as_well_counts_whole(tmp_path: Path) -> None:
    made = Made(
        text="""g (int64[1,8] i) => (float[1,8,1000] y) {
            rows = Gather(T, i) columns = Transpose(T) y = MatMul(rows, columns) }""",
        weights={"T": weight(1000, 1024)},
    )
    layout = Layout(profile_model(made.save(tmp_path)))
    assert layout.segment(0, len(layout.profile.nodes)).resident_bytes > 1000 * 4096
    (gather,) = [node for node in layout.profile.nodes if node.operator == "Gather"]
    assert dict(gather.touched) == {"T": 8 * (64 << 10)}


def test_an_outputs_declared_shape_is_not_believed_where_nothing_confirms_it(
    tmp_path: Path,
) -> None:
    wrong = Made(
        text="""g (float[N,3,8,8] x) => (float[1,words] y, float[N,3,8,8] z) {
            y = Flatten(x) z = Reshape(x, to) }""",
        weights={"to": np.array([-1, 3, 8, 8], np.int64)},
    )
    outputs = profile_model(wrong.save(tmp_path)).outputs
    assert [each.shape for each in outputs] == [("N", "words"), ("N", 3, 8, 8)]


def test_shapes_are_known_through_operators_as_older_opsets_had_them(tmp_path: Path) -> None:
    made = Made(
        text="""g (float[N,16] x) => (float[M,K] y) {
            s = Shape(x) one = Constant<value = int64 {1}>() n = Gather<axis = 0>(s, one)
            many = Unsqueeze<axes = [0]>(n) rest = Constant<value = int64[1] {-1}>()
            to = Concat<axis = 0>(many, rest) y = Reshape(x, to) }""",
        opset=11,
    )
    profile = profile_model(made.save(tmp_path), {"x": (2, 16)})
    assert profile.tensors["y"].sizes == (16, 2)


def test_sizes_are_known_behind_operators_that_the_runtime_has_of_its_own(tmp_path: Path) -> None:
    model = Made(
        text="""g (float[rows,1,16] x, uint8[rows,8] q) => (float[a,b,c,d] y, uint8[rows,8] sum) {
            a = DynamicQuantizeMatMul(x, W, scale)
            b = DynamicQuantizeLSTM<hidden_size = 4>(a, WL, RL, B, , , , , s, z, s, z)
            y = Relu(b)
            sum = QLinearAdd(q, scale, zero, q, scale, zero, scale, zero) }""",
        weights={
            "W": np.zeros((16, 8), np.int8),
            "WL": np.zeros((1, 8, 16), np.int8),
            "RL": np.zeros((1, 4, 16), np.int8),
            "B": weight(1, 32),
            "s": weight(1),
            "z": np.zeros(1, np.int8),
            "scale": np.array(0.1, np.float32),
            "zero": np.array(0, np.uint8),
        },
    ).proto()
    model.opset_import.add(domain="com.microsoft", version=1)
    for node in model.graph.node:
        node.domain = "" if node.op_type == "Relu" else "com.microsoft"
    onnx.save(model, tmp_path / "model.onnx")
    profile = profile_model(tmp_path / "model.onnx", {"x": (5, 1, 16), "q": (5, 8)})
    sizes = {name: profile.tensors[name].sizes for name in ("a", "b", "y", "sum")}
    assert sizes == {"a": (5, 1, 8), "b": (5, 1, 1, 4), "y": (5, 1, 1, 4), "sum": (5, 8)}


def test_a_product_with_weights_of_four_bits_has_as_many_columns_as_it_says(tmp_path: Path) -> None:
    model = Made(
        text="""g (float[1,rows,64] x) => (float[1,rows,32] y) {
            a = MatMulNBits<K = 64, N = 32, bits = 4, block_size = 32>(x, packed, scales)
            y = Relu(a) }""",
        weights={"packed": np.zeros((32, 2, 16), np.uint8), "scales": weight(64)},
    ).proto()
    model.opset_import.add(domain="com.microsoft", version=1)
    model.graph.node[0].domain = "com.microsoft"
    onnx.save(model, tmp_path / "model.onnx")
    profile = profile_model(tmp_path / "model.onnx", {"x": (1, 5, 64)})
    assert {name: profile.tensors[name].sizes for name in "ay"} == dict.fromkeys("ay", (1, 5, 32))


SPOKEN = Made(
    text="""g (float[1,8] x, int64[1] frames) => (float[1,4] y) {
        t0 = Relu(x) t1 = ReduceMax<axes = [0, 1], keepdims = 0>(t0)
        minus = Constant<value_ints = [-1]>() eight = Constant<value_ints = [8]>()
        both = Concat<axis = 0>(frames, eight)
        t2 = Expand(t1, both)
        t3 = MatMul(t2, W) y = ReduceMax<axes = [0], keepdims = 1>(t3) }""",
    weights={"W": weight(8, 4)},
)
"""As many rows as an input says."""


def test_sizes_that_follow_from_what_inputs_hold_are_those_that_were_seen(tmp_path: Path) -> None:
    source = Source.open(SPOKEN.save(tmp_path))
    unseen = source.profile()
    assert (unseen.tensors["t2"].bytes, unseen.tensors["t3"].bytes) == (None, None)
    seen = source.profile(None, {"t2": (100, 8), "x": (7, 7), "nowhere": (1,)})
    assert seen.tensors["t2"].sizes == (100, 8)
    assert seen.tensors["t3"].sizes == (100, 4), "others follow from it"
    assert seen.tensors["x"].sizes == (1, 8), "what the graph says holds"


def test_inputs_of_no_known_shape_have_the_one_that_was_seen(tmp_path: Path) -> None:
    source = Source.open(CONVOLUTION.save(tmp_path))
    assert source.profile({}, {"x": (2, 3, 8, 8)}).tensors["a"].sizes == (2, 16, 8, 8)
    shaped = source.profile({"x": (1, 3, 8, 8)}, {"x": (2, 3, 8, 8)})
    assert shaped.tensors["a"].sizes == (1, 16, 8, 8)


def test_what_is_no_tensor_has_no_sizes_to_be_seen(tmp_path: Path) -> None:
    made = Made(
        text="""g (float[1,8] x, int64[1] n) => (float[1,8] y) {
            s = SequenceConstruct(x) zero = Constant<value_int = 0>()
            y = SequenceAt(s, zero) }""",
        weights={},
    )
    source = Source.open(made.save(tmp_path))
    assert source.profile({}, {"s": (7, 7)}).tensors == source.profile().tensors
