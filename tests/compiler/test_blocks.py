"""The blocks of fragments: what they compute, what they refer to, and that files carry them."""

import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from chaining import manifest, run_blocks, run_chained, run_whole
from made_models import WORDS, Made, vocabulary, weight
from random_graphs import WIDTH, models
from real_models import MODELS, find
from shoal_compiler.blocks import as_model
from shoal_compiler.cutting import cut_model
from shoal_compiler.graph import normalise
from shoal_compiler.models import make_model
from shoal_compiler.profile import profile_model
from shoal_compiler.safety import open_model
from shoal_compiler.weight_files import Place, is_stored
from shoal_planner.cuts import CutRequest, Refusal, choose_cuts
from shoal_planner.segments import Layout
from shoal_protocol.blocks import Block, joins_from_json, least_bytes
from shoal_protocol.digests import Digest
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.manifest import BLOCKS, WEIGHTS
from shoal_protocol.partition import PartitionDocument

MIB = 1 << 20
LAYERS = 8


def chain_of_megabytes(path: Path, rows: str | int = 1) -> Path:
    """Layers of 1 MiB each."""
    nodes, width = [], 512
    for number in range(LAYERS):
        nodes.append(helper.make_node("MatMul", [f"t{number}", f"w{number}"], [f"m{number}"]))
        nodes.append(helper.make_node("Tanh", [f"m{number}"], [f"t{number + 1}"]))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, width])
        for name in ("t0", f"t{LAYERS}")
    ]
    weights = [
        numpy_helper.from_array(weight(width, width, seed=number), f"w{number}")
        for number in range(LAYERS)
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=9), path)
    return path


def cut(path: Path, store: Path | None, fragments: int = 1) -> PartitionDocument:
    profile = profile_model(path)
    cuts = choose_cuts(profile, CutRequest(fragments=fragments))
    assert not isinstance(cuts, Refusal)
    return cut_model(path, profile, cuts, store)


def blocks_of(store: Path, digest: Digest) -> tuple[Block, ...]:
    return FragmentStore(store).manifest(digest).blocks


def check_facts(store: Path, digest: Digest) -> None:
    """Every weight is the fragment's own, where that is; every value is given before it is taken;
    the models lie one behind the other."""
    folder, said = FragmentStore(store).folder(digest), manifest(store, digest)
    content, end = (folder / BLOCKS).read_bytes(), 0
    values = {each["name"] for each in said["inputs"]}  # type: ignore[attr-defined]
    read = set[str]()
    for block in blocks_of(store, digest):
        assert block.model_offset == end
        end += block.model_bytes
        assert {each.indices for each in block.gathers} <= values
        values |= {each.rows for each in block.gathers}
        assert set(block.takes) <= values
        values |= set(block.gives)
        model = onnx.ModelProto.FromString(content[block.model_offset : end])
        assert [each.name for each in model.graph.input] == list(block.takes)
        assert [each.name for each in model.graph.output] == list(block.gives)
        read.update(each.table for each in block.gathers)
        mapped = 0
        for tensor in model.graph.initializer:
            if tensor.data_location != TensorProto.EXTERNAL:
                continue
            place = {each.key: each.value for each in tensor.external_data}
            known = said["initializers"][tensor.name]  # type: ignore[index]
            assert place == {
                "location": known.get("file", "weights.bin"),
                "offset": str(known["offset"]),
                "length": str(known["bytes"]),
            }
            read.add(tensor.name)
            mapped += known["bytes"]
        assert block.weight_bytes <= mapped
    assert end == len(content)
    assert read == set(said["initializers"])  # type: ignore[call-overload]
    assert {each["name"] for each in said["outputs"]} <= values  # type: ignore[attr-defined]


def test_a_fragment_is_stored_with_its_blocks(tmp_path: Path) -> None:
    path = chain_of_megabytes(tmp_path / "model.onnx")
    document = cut(path, tmp_path / "store", 2)
    for fragment in document.fragments:
        check_facts(tmp_path / "store", fragment.digest)
        blocks = blocks_of(tmp_path / "store", fragment.digest)
        assert fragment.least_bytes == least_bytes(blocks) < fragment.resident_bytes
    feeds = {"t0": weight(1, 512, seed=99)}
    got = run_chained(tmp_path / "store", document, feeds)
    np.testing.assert_array_equal(got[f"t{LAYERS}"], run_whole(path, feeds)[f"t{LAYERS}"])


def test_what_is_said_without_a_store_is_what_is_stored(tmp_path: Path) -> None:
    path = chain_of_megabytes(tmp_path / "model.onnx")
    assert cut(path, None) == cut(path, tmp_path / "store")


def test_where_sizes_are_unknown_there_are_no_blocks(tmp_path: Path) -> None:
    path = chain_of_megabytes(tmp_path / "model.onnx", rows="N")
    (fragment,) = cut(path, tmp_path / "store").fragments
    assert fragment.least_bytes == fragment.resident_bytes
    assert blocks_of(tmp_path / "store", fragment.digest) == ()
    assert not (FragmentStore(tmp_path / "store").folder(fragment.digest) / BLOCKS).exists()


def test_where_little_would_be_saved_there_are_no_blocks(tmp_path: Path) -> None:
    path = chain_of_megabytes(tmp_path / "model.onnx", rows=16 * 1024)
    (fragment,) = cut(path, tmp_path / "store").fragments
    assert fragment.activation_bytes is not None
    assert fragment.least_bytes == fragment.resident_bytes


def test_an_output_that_is_made_in_parts_is_never_there_twice(tmp_path: Path) -> None:
    rows, path, store = 64, tmp_path / "model.onnx", tmp_path / "store"
    onnx.save(vocabulary(), path)
    x = np.random.default_rng(0).standard_normal((1, rows, 256), np.float32)
    profile = profile_model(path, {"x": x.shape})
    document = cut_model(path, profile, (), store)
    (fragment,) = document.fragments
    (join,) = joins_from_json(manifest(store, fragment.digest).get("joins"))
    assert (join.output, join.axis, sum(join.sizes)) == ("y", 2, WORDS)
    assert all("y" not in block.gives for block in blocks_of(store, fragment.digest))
    weights = max(block.weight_bytes for block in blocks_of(store, fragment.digest))
    assert fragment.least_bytes < weights + 2 * 4 * rows * WORDS
    run_chained(store, document, {"x": x})


def test_an_output_that_another_node_reads_is_joined_by_a_block(tmp_path: Path) -> None:
    path, model = tmp_path / "model.onnx", vocabulary()
    model.graph.node.append(helper.make_node("Tanh", ["y"], ["z"]))
    model.graph.output.add().CopyFrom(
        helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, "rows", WORDS])
    )
    onnx.save(model, path)
    document = cut_model(path, profile_model(path, {"x": (1, 8, 256)}), (), tmp_path / "store")
    assert "joins" not in manifest(tmp_path / "store", document.fragments[0].digest)


@pytest.mark.parametrize(
    ("quantised", "said"), [("v = DequantizeLinear (W, s)", True), ("v = Identity (W)", False)]
)
def test_blocks_say_whether_nothing_but_weights_is_quantised(
    quantised: str, said: bool, tmp_path: Path
) -> None:
    layers = [
        f"{quantised.replace('v', f'v{n}').replace('W', f'W{n}')}\n"
        f"{'y' if n == 2 else f'h{n}'} = MatMul ({f'h{n - 1}' if n else 'x'}, v{n})\n"
        for n in range(3)
    ]
    kind = np.int8 if said else np.float32
    made = Made(
        text="agraph (float[1, 1500] x) => (float[1, 1500] y) {\n" + "".join(layers) + "}",
        weights={"s": np.array(0.01, np.float32)}
        | {f"W{n}": np.ones((1500, 1500), kind) for n in range(3)},
    )
    path, store = made.save(tmp_path), tmp_path / "store"
    (fragment,) = cut_model(path, profile_model(path), (), store).fragments
    blocks = blocks_of(store, fragment.digest)
    assert len(blocks) > 1
    assert {block.dequantises for block in blocks if block.weight_bytes} == {said}


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("h = Identity (x) y = MatMul (h, w)", True),
        ("q = QuantizeLinear (x, s, z) h = DequantizeLinear (q, s, z) y = MatMul (h, w)", False),
        (
            "q = QuantizeLinear (x, s, z) h = DequantizeLinear (q, s, z) r = Relu (h)"
            " y = Gemm <transB = 1> (r, w)",
            False,
        ),
        ("p = MatMul (x, w) q = QuantizeLinear (p, s, z) y = DequantizeLinear (q, s, z)", True),
    ],
    ids=[
        "of floats",
        "of quantised values",
        "of transposed weights",
        "of floats, quantised afterwards",
    ],
)
def test_a_fragment_says_whether_its_products_would_copy_quantised_weights(
    nodes: str, said: bool, tmp_path: Path
) -> None:
    made = Made(
        text="agraph (float[1, 64] x) => (float[1, 64] y) { w = DequantizeLinear (W, s, z)"
        + nodes
        + "}",
        weights={
            "s": np.array(0.01, np.float32),
            "z": np.array(0, np.int8),
            "W": np.ones((64, 64), np.int8),
        },
    )
    path, store = made.save(tmp_path), tmp_path / "store"
    (fragment,) = cut_model(path, profile_model(path), (), store).fragments
    assert manifest(store, fragment.digest).get("dequantises", False) is said


def test_a_fragment_that_takes_text_has_no_blocks(tmp_path: Path) -> None:
    path = chain_of_megabytes(tmp_path / "model.onnx")
    model = onnx.load(path)
    for names, name in ((model.graph.input, "text"), (model.graph.output, "same")):
        names.append(helper.make_tensor_value_info(name, TensorProto.STRING, [1]))
    model.graph.node.append(helper.make_node("Identity", ["text"], ["same"]))
    onnx.save(model, path)
    (fragment,) = cut(path, tmp_path / "store").fragments
    assert fragment.activation_bytes is not None
    assert fragment.least_bytes == fragment.resident_bytes


def test_damaged_blocks_are_found_and_made_again(tmp_path: Path) -> None:
    path, store = chain_of_megabytes(tmp_path / "model.onnx"), tmp_path / "store"
    (fragment,) = cut(path, store).fragments
    place = FragmentStore(store).folder(fragment.digest) / BLOCKS
    right = place.read_bytes()
    place.write_bytes(right[:-1] + b"?")
    assert not FragmentStore(store).is_sound(fragment.digest)
    assert cut(path, store).fragments == (fragment,)
    assert place.read_bytes() == right


@pytest.mark.parametrize(
    "name",
    [
        "ppocr_rec",
        "silero_vad",
        "minilm_l6",
        "mobilenet_v2",
        pytest.param("resnet18", marks=pytest.mark.slow),
        pytest.param("efficientnet_b1", marks=pytest.mark.slow),
    ],
)
def test_the_blocks_of_real_models_refer_to_their_weights(name: str, tmp_path: Path) -> None:
    path, model = find(name), MODELS[name]
    profile = profile_model(path, model.shapes())
    (fragment,) = cut_model(path, profile, (), tmp_path).fragments
    assert fragment.least_bytes <= fragment.resident_bytes
    if fragment.least_bytes < fragment.resident_bytes:
        check_facts(tmp_path, fragment.digest)
        feeds = model.inputs(0)
        folder = FragmentStore(tmp_path).folder(fragment.digest)
        blocks = blocks_of(tmp_path, fragment.digest)
        got = run_blocks(folder, blocks, (folder / BLOCKS).read_bytes(), feeds)
        for output, value in run_whole(folder / "model.onnx", feeds).items():
            np.testing.assert_array_equal(got[output], value, err_msg=f"{name}, {output}")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made=models(), data=st.data())
def test_random_blocks_of_random_fragments_give_what_the_fragments_give(
    made: onnx.ModelProto, data: st.DataObject
) -> None:
    feeds = {
        each.name: np.random.default_rng(seed).uniform(-1, 1, (3, WIDTH)).astype(np.float32)
        for seed, each in enumerate(made.graph.input)
    }

    def some(legal: tuple[int, ...]) -> tuple[int, ...]:
        chosen = st.sets(st.sampled_from(legal), max_size=4) if legal else st.just(set[int]())
        return tuple(sorted(data.draw(chosen)))

    with tempfile.TemporaryDirectory() as place:
        path, store = Path(place) / "model.onnx", Path(place) / "store"
        onnx.save(made, path)
        profile = profile_model(path, {name: value.shape for name, value in feeds.items()})
        cuts = some(Layout(profile).legal)
        document = cut_model(path, profile, cuts, store)
        kept: dict[int, dict[str, np.ndarray]] = {}
        run_chained(store, document, feeds, kept)  # type: ignore[arg-type]
        graph = normalise(open_model(path))
        for fragment, piece in zip(document.fragments, Layout(profile).pieces(cuts), strict=True):
            weights = [graph.weights[name] for name in piece.weights]
            known = manifest(store, fragment.digest)["initializers"]
            places = {
                each.tensor.name: Place(WEIGHTS, known[each.tensor.name]["offset"])  # type: ignore[index]
                for each in weights
                if is_stored(each)
            }
            own = as_model(graph, profile, piece, make_model(graph, profile, piece, places), places)
            blocks = own.blocks(some(own.layout.legal))
            taken = {
                name: kept[edge.producer][name]
                for edge in document.into(fragment.index)
                for name in edge.tensors
            }
            folder = FragmentStore(store).folder(fragment.digest)
            got = run_blocks(folder, blocks.blocks, blocks.content, taken)
            for name, value in kept[fragment.index].items():
                np.testing.assert_array_equal(got[name], value, err_msg=name)
