"""Layers with a large weight in parts: what they compute, and what stays whole."""

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from chaining import manifest, run_chained, run_whole
from made_models import weight
from shoal_compiler.cutting import cut_model
from shoal_compiler.layers import CHANNELS
from shoal_compiler.profile import Source, profile_model
from shoal_planner.profile import Profile, Role
from shoal_planner.segments import Layout
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.partition import PartitionDocument

LIMIT = 16 << 10

Shape = Sequence[int]


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_compiler.profile.SLICE_BYTES", (LIMIT,))


def model(
    nodes: list[onnx.NodeProto], x: Shape, weights: dict[str, Shape], kind: int = TensorProto.FLOAT
) -> onnx.ModelProto:
    """Nodes that make `y` of `x`."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(np.asarray(weight(*shape, seed=seed)), name)
            for seed, (name, shape) in enumerate(weights.items())
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def profiled(made: onnx.ModelProto, folder: Path, *, external: bool = False) -> Profile:
    onnx.save(
        copy.deepcopy(made),  # saving moves the weights out of it
        folder / "model.onnx",
        save_as_external_data=external,
        location="data",
        size_threshold=0,
    )
    return profile_model(folder / "model.onnx")


def cut_everywhere(folder: Path, profile: Profile, feeds: np.ndarray) -> PartitionDocument:
    """Cut at every position; what the fragments give is what the whole gives."""
    path, store = folder / "model.onnx", folder / "store"
    document = cut_model(path, profile, Layout(profile).legal, store)
    (want,) = (each.astype(np.float64) for each in run_whole(path, {"x": feeds}).values())
    chained = run_chained(store, document, {"x": feeds})
    (got,) = (each.astype(np.float64) for each in chained.values())
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1.0, np.abs(want).max()))
    return document


@st.composite
def layers(draw: st.DrawFn) -> tuple[onnx.ModelProto, Shape]:
    """One layer of a few hundred channels, and the shape of its input."""
    channels, depth = draw(st.integers(100, 400)), draw(st.integers(50, 90))
    rows = draw(st.integers(1, 3))
    has_bias = draw(st.booleans())
    bias: dict[str, Shape] = {"b": (channels,)} if has_bias else {}
    x: Shape
    shape: Shape
    reads = ["x", "w", *bias]
    match draw(st.sampled_from(["Gemm", "MatMul", "Conv"])):
        case "Gemm":
            first, second = draw(st.booleans()), draw(st.booleans())
            if has_bias:
                bias = {"b": draw(st.sampled_from([(channels,), (1, channels), (), (1,), (1, 1)]))}
            node = helper.make_node(
                "Gemm", reads, ["y"], transA=int(first), transB=int(second), alpha=0.5, beta=2.0
            )
            x = (depth, rows) if first else (rows, depth)
            shape = (channels, depth) if second else (depth, channels)
        case "MatMul":
            node = helper.make_node("MatMul", ["x", "w"], ["y"])
            x = draw(st.sampled_from([(depth,), (rows, depth), (2, rows, depth)]))
            shape, bias = (depth, channels), {}
        case _:
            size = draw(st.integers(1, 3))
            node = helper.make_node("Conv", reads, ["y"], pads=[1, 1, 1, 1], strides=[2, 2])
            x, shape = (rows, depth, 5, 6), (channels, depth, size, size)
    return model([node], x, {"w": shape, **bias}), x


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=layers(), external=st.booleans())
def test_a_layer_in_parts_gives_what_it_gives_whole(
    made: tuple[onnx.ModelProto, Shape], external: bool
) -> None:
    proto, shape = made
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        profile = profiled(proto, folder, external=external)
        whole = numpy_helper.to_array(proto.graph.initializer[0])
        parts = [size for name, size in profile.weights.items() if name.startswith("w.")]
        assert len(parts) > 1
        assert sum(parts) == whole.nbytes
        channel = whole.nbytes // proto_channels(proto)
        assert max(parts) <= max(LIMIT, channel)
        assert profile.parameters == sum(
            numpy_helper.to_array(each).size for each in proto.graph.initializer
        )
        x = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
        document = cut_everywhere(folder, profile, x)
        assert len(document.fragments) == len(parts) + 1


def proto_channels(proto: onnx.ModelProto) -> int:
    node, dims = proto.graph.node[0], proto.graph.initializer[0].dims
    transposed = any(each.name == "transB" and each.i for each in node.attribute)
    return dims[0] if node.op_type == "Conv" or transposed else dims[1]


def test_strips_are_the_same_read_by_themselves_and_out_of_whole_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])], (1, 700), {"w": (700, 1000)})
    profile = profiled(made, tmp_path)
    gathered = cut_model(tmp_path / "model.onnx", profile, (), tmp_path / "store")
    monkeypatch.setattr("shoal_compiler.safety.SHORT_STRIP_BYTES", 1)
    alone = cut_model(tmp_path / "model.onnx", profile, (), tmp_path / "other")
    assert alone == gathered
    (fragment,) = alone.fragments
    for store in (tmp_path / "store", tmp_path / "other"):
        assert FragmentStore(store).is_sound(fragment.digest)


def test_parts_are_whole_steps_of_the_kernels_where_they_can_be(tmp_path: Path) -> None:
    profile = profiled(
        model([helper.make_node("MatMul", ["x", "w"], ["y"])], (1, 64), {"w": (64, 200)}), tmp_path
    )
    columns = [size // 4 // 64 for name, size in profile.weights.items()]
    assert columns == [64, 64, 64, 200 - 3 * 64]
    assert columns[0] % CHANNELS == 0


def test_parts_of_one_shape_are_reshaped_to_one_that_is_made_once(tmp_path: Path) -> None:
    """Nodes that make shapes are in the first fragment, and each costs memory there."""
    nodes, reads, weights = list[onnx.NodeProto](), "x", dict[str, Shape]()
    for layer, gives in enumerate(("t", "y")):
        rows, whole = f"rows {layer}", f"shape {layer}"
        nodes += [
            helper.make_node("Shape", ["x"], [rows], start=0, end=1),
            helper.make_node("Concat", [rows, "channels"], [whole], axis=0),
            helper.make_node("MatMul", [reads, f"w{layer}"], [f"flat {layer}"]),
            helper.make_node("Reshape", [f"flat {layer}", whole], [gives]),
        ]
        reads, weights[f"w{layer}"] = gives, (200, 200)
    made = model(nodes, (3, 200), weights)
    made.graph.initializer.append(numpy_helper.from_array(np.array([200]), "channels"))
    profile = profiled(made, tmp_path)
    shapes = [each for each in profile.nodes if each.label.endswith("(Concat)")]
    shapes = [each for each in shapes if each.role is Role.SHAPE]
    parts = [each for each in profile.nodes if each.label.endswith("(MatMul)")]
    assert len(parts) == 2 * 7
    assert len(shapes) == 2 * 2, "all parts of a layer but the last have as many channels"
    cut_everywhere(tmp_path, profile, np.ones((3, 200), np.float32))


def test_a_model_is_parted_more_finely_as_long_as_that_makes_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal_compiler.profile.SLICE_BYTES", (LIMIT, LIMIT // 2, LIMIT // 4, 1))
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])], (1, 40), {"w": (40, 200)})
    onnx.save(made, tmp_path / "model.onnx")
    sources = list(Source.open(tmp_path / "model.onnx").slicings())
    assert [each.slicing for each in sources] == [0, 1], "columns would be too short after that"
    assert [len(each.graph.nodes) for each in sources] == [4, 8]


STAY: dict[str, tuple[list[onnx.NodeProto], Shape, dict[str, Shape]]] = {
    "a weight that something else reads too": (
        [
            helper.make_node("MatMul", ["x", "w"], ["t"]),
            helper.make_node("Add", ["t", "w"], ["y"]),
        ],
        (100, 100),
        {"w": (100, 100)},
    ),
    "a weight of which columns are channels, and rows": (
        [
            helper.make_node("MatMul", ["x", "w"], ["t"]),
            helper.make_node("Gemm", ["t", "w"], ["y"], transB=1),
        ],
        (1, 100),
        {"w": (100, 100)},
    ),
    "a bias that is computed": (
        [
            helper.make_node("ReduceSum", ["x"], ["c"], keepdims=0),
            helper.make_node("Gemm", ["x", "w", "c"], ["y"]),
        ],
        (1, 100),
        {"w": (100, 100)},
    ),
    "a bias for every element": (
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"])],
        (3, 100),
        {"w": (100, 100), "b": (3, 100)},
    ),
    "a bias for every row, of which there are as many as columns": (
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"])],
        (100, 100),
        {"w": (100, 100), "b": (100, 1)},
    ),
    "a table of which columns are gathered": (
        [
            helper.make_node("MatMul", ["x", "w"], ["t"]),
            helper.make_node("ArgMax", ["t"], ["i"], axis=1),
            helper.make_node("Gather", ["w", "i"], ["y"], axis=1),
        ],
        (1, 100),
        {"w": (100, 100)},
    ),
    "columns that are short strips of the file": (
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        (1, 1000),
        {"w": (1000, 20)},
    ),
}


@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_that_several_layers_have_is_parted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, transposed: bool
) -> None:
    monkeypatch.setattr("shoal_compiler.sharing.LEAST_BYTES", 1 << 10)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["t"]),
        helper.make_node("MatMul", ["t", "w"], ["u"]),
        helper.make_node("Gemm", ["u", "w", "b"], ["y"]),
    ]
    if transposed:
        for node in nodes:
            node.input[1] = f"columns of {node.output[0]}"
        turns = [helper.make_node("Transpose", ["w"], [node.input[1]]) for node in nodes]
        nodes = [*turns, *nodes]
    profile = profiled(model(nodes, (1, 100), {"w": (100, 100), "b": (100,)}), tmp_path)
    weights = [size for name, size in profile.weights.items() if name.startswith("w")]
    assert len(weights) == 4
    assert sum(weights) == 4 * 100 * 100
    assert len(profile.nodes) == 3 * (len(weights) * (1 + transposed) + 1)
    document = cut_everywhere(tmp_path, profile, np.ones((1, 100), np.float32))
    stored = {
        path.stat().st_ino: path.stat().st_size
        for fragment in document.fragments
        for path in (tmp_path / "store/fragments" / fragment.digest[7:]).glob("*.bin")
        if path.name != "blocks.bin"
    }
    assert sum(stored.values()) < 2 * 4 * 100 * 100, "each part is one file for all"


@pytest.mark.parametrize("opset", [9, 10, 11])
def test_sizes_behind_a_layer_in_parts_are_known_in_old_models_too(
    tmp_path: Path, opset: int
) -> None:
    """Before opset 11, nothing is inferred of a Concat whose axis counts from the end."""
    made = model(
        [
            helper.make_node("MatMul", ["x", "w"], ["t"]),
            helper.make_node("Reshape", ["t", "shape"], ["u"]),
            helper.make_node("Gemm", ["u", "v", "b"], ["y"]),
        ],
        (2, 1, 100),
        {"w": (100, 90), "v": (90, 200), "b": (200,)},
    )
    made.graph.initializer.append(numpy_helper.from_array(np.array([-1, 90]), "shape"))
    made.opset_import[0].version = opset
    profile = profiled(made, tmp_path)
    assert {"w.0", "v.0"} <= set(profile.weights)
    assert [name for name, each in profile.tensors.items() if each.sizes is None] == []
    cut_everywhere(tmp_path, profile, np.ones((2, 1, 100), np.float32))


@pytest.mark.parametrize("name", STAY)
def test_what_cannot_be_parted_stays_whole(tmp_path: Path, name: str) -> None:
    nodes, shape, weights = STAY[name]
    profile = profiled(model(nodes, shape, weights), tmp_path)
    assert len(profile.nodes) == len(nodes)
    assert set(profile.weights) == set(weights)
    cut_everywhere(tmp_path, profile, np.ones(shape, np.float32))


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("MatMul", ["w"], ["y"]),
        helper.make_node("MatMul", ["x", "w"], ["y", "z"]),
        helper.make_node("Gather", ["w"], ["y"]),
    ],
)
def test_a_malformed_layer_is_left_to_the_runtime_to_refuse(
    tmp_path: Path, node: onnx.NodeProto
) -> None:
    made = model([node], (1, 100), {"w": (100, 100)})
    made.graph.node.append(helper.make_node("Identity", ["x"], ["t"]))
    made.graph.output[0].name = "t" if "y" not in node.output else "y"
    assert "w.0" not in profiled(made, tmp_path).weights


@pytest.mark.parametrize(
    "output",
    [
        [helper.make_node("Gemm", ["t", "table"], ["y"], transB=1)],
        [
            helper.make_node("Transpose", ["table"], ["columns"]),
            helper.make_node("MatMul", ["t", "columns"], ["y"]),
        ],
    ],
)
def test_a_table_that_is_the_output_layer_too_is_stored_once(
    tmp_path: Path, output: list[onnx.NodeProto]
) -> None:
    words, width = 300, 64
    nodes = [helper.make_node("Gather", ["table", "x"], ["t"]), *output]
    made = model(nodes, (2,), {"table": (words, width)}, TensorProto.INT64)
    profile = profiled(made, tmp_path)
    assert profile.parameters == words * width
    assert len(profile.nodes) > len(nodes)
    path, store, feeds = tmp_path / "model.onnx", tmp_path / "store", np.array([3, 299])
    (fragment,) = cut_model(path, profile, (), store).fragments
    said = manifest(store, fragment.digest)
    size = 4 * words * width
    assert fragment.weight_bytes == said["files"]["weights.bin"]["bytes"] == size  # type: ignore[index]
    assert len(said["initializers"]) == len(profile.weights) > 2  # type: ignore[arg-type]
    cut_everywhere(tmp_path, profile, feeds)


def test_layers_without_names_have_parts_of_different_names(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["t"]),
        helper.make_node("MatMul", ["t", "v"], ["y"]),
    ]
    profile = profiled(model(nodes, (1, 100), {"w": (100, 100), "v": (100, 200)}), tmp_path)
    # Which node of the user's a message is about can be told, whatever has become of the graph.
    assert {"t (Concat)", "y (Concat)"} < {each.label for each in profile.nodes}
    store = tmp_path / "store"
    document = cut_model(tmp_path / "model.onnx", profile, (), store)
    feeds = {"x": np.ones((1, 100), np.float32)}
    want, got = run_whole(tmp_path / "model.onnx", feeds), run_chained(store, document, feeds)
    np.testing.assert_allclose(got["y"], want["y"], rtol=0, atol=1e-5)  # type: ignore[arg-type]


def test_names_that_the_model_has_already_are_not_given_again(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Tanh", ["x"], ["y.0"]),
        helper.make_node("MatMul", ["y.0", "w"], ["t"]),
        helper.make_node("Add", ["t", "w.0"], ["y"]),
    ]
    made = model(nodes, (1, 100), {"w": (100, 100), "w.0": (100,)})
    made.graph.node[1].output[0] = "y"
    made.graph.node[2].input[0], made.graph.node[2].output[0] = "y", "y.1"
    made.graph.output[0].name = "y.1"
    profile = profiled(made, tmp_path)
    assert len(profile.nodes) > len(nodes)
    cut_everywhere(tmp_path, profile, np.ones((1, 100), np.float32))


CHANNELS_OF_LAYER = 300


def reshaped(shape: Sequence[int | None], folder: Path, reads: int = 1) -> Profile:
    """A layer of 300 channels whose output is reshaped; of the sizes, None is the input's first,
    as the runtime finds it."""
    sizes = [f"s{index}" for index in range(len(shape))]
    constants = {f"s{index}": size for index, size in enumerate(shape) if size is not None}
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["t"]),
        helper.make_node("Shape", ["x"], ["all"], end=1),
        *(helper.make_node("Identity", ["all"], [s]) for s in sizes if s not in constants),
        helper.make_node("Concat", sizes, ["shape"], axis=0),
        *(helper.make_node("Reshape", ["t", "shape"], [f"r{index}"]) for index in range(reads)),
        helper.make_node("Sum", [f"r{index}" for index in range(reads)], ["y"]),
    ]
    made = model(nodes, (2, 64), {"w": (64, CHANNELS_OF_LAYER)})
    for name, size in constants.items():
        made.graph.initializer.append(numpy_helper.from_array(np.array([size], np.int64), name))
    profile = profiled(made, folder)
    assert "w.0" in profile.weights
    return profile


@pytest.mark.parametrize(
    ("shape", "joined"),
    [
        ((1, None, 300), True),
        ((-1, 1, 300), True),
        # A size of 0 stands for one of the layer's output; channels that are not last.
        ((0, 300), False),
        ((None, 300, 1), False),
        ((2, -1, 150), False),
    ],
)
def test_parts_are_reshaped_before_they_are_joined_where_channels_stay_last(
    shape: Sequence[int | None], joined: bool, tmp_path: Path
) -> None:
    profile = reshaped(shape, tmp_path)
    operators = [node.operator for node in profile.nodes if node.role is Role.COMPUTE]
    assert (operators[-2] == "Concat") == joined
    cut_everywhere(tmp_path, profile, np.ones((2, 64), np.float32))


@pytest.mark.parametrize(
    ("reads", "sizes"),
    [([], ["s"]), (["t"], ["s"]), (["t", "shape"], []), (["t", "shape"], ["f"])],
)
def test_a_malformed_reshape_is_left_to_the_runtime_to_refuse(
    reads: list[str], sizes: list[str], tmp_path: Path
) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["t"]),
        helper.make_node("Concat", sizes, ["shape"], axis=0),
        helper.make_node("Reshape", reads, ["r"]),
        helper.make_node("Sum", ["r", "t"] if "t" not in reads else ["r"], ["y"]),
    ]
    made = model(nodes, (2, 64), {"w": (64, CHANNELS_OF_LAYER), "f": (2,)})
    size = np.array([CHANNELS_OF_LAYER], np.int64)
    made.graph.initializer.append(numpy_helper.from_array(size, "s"))
    assert "w.0" in profiled(made, tmp_path).weights


def test_what_several_nodes_reshape_is_joined_first(tmp_path: Path) -> None:
    profile = reshaped((1, None, 300), tmp_path, reads=2)
    assert [node.operator for node in profile.nodes][-4:-1] == ["Concat", "Reshape", "Reshape"]
    cut_everywhere(tmp_path, profile, np.ones((2, 64), np.float32))
