"""What stands in the store after a cut: files by digest, whole or not at all."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from chaining import manifest, run_chained, run_whole
from made_models import TOPOLOGIES, Made, W, weight
from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.preparation import cut_into_store
from shoal_compiler.cutting import cut_model
from shoal_compiler.errors import ModelRefused
from shoal_compiler.profile import profile_model
from shoal_planner.segments import Layout
from shoal_protocol.partition import PartitionDocument, document_from_json

CHAIN = TOPOLOGIES["a chain"]


def cut(path: Path, store: Path, made: Made = CHAIN) -> PartitionDocument:
    profile = profile_model(path, made.shapes)
    return cut_model(path, profile, Layout(profile).legal[::2], store)


def cut_order(path: Path) -> CutOrder:
    return CutOrder(
        name="chain",
        model="chain",
        path=path,
        digest=None,
        shapes={name: tuple(shape) for name, shape in CHAIN.shapes.items()},
        sample=None,
        fragments=2,
        max_bytes=None,
        tensors=(),
        devices=(),
    )


def no_progress(_done: int, _total: int | None) -> None:
    """Nobody looks."""


def content(store: Path) -> dict[str, str]:
    return {
        str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(store.rglob("*"))
        if path.is_file()
    }


def test_a_fragment_is_named_by_its_manifest_and_that_names_its_files(tmp_path: Path) -> None:
    store = tmp_path / "store"
    document = cut(CHAIN.save(tmp_path), store)
    for fragment in document.fragments:
        folder = store / "fragments" / fragment.digest.removeprefix("sha256:")
        text = (folder / "fragment.json").read_bytes()
        assert hashlib.sha256(text).hexdigest() == folder.name
        said = json.loads(text)
        assert text == json.dumps(said, sort_keys=True, separators=(",", ":")).encode()
        assert said["version"] == 1
        assert said["weight_bytes"] == fragment.weight_bytes
        assert said["resident_bytes"] == fragment.resident_bytes
        assert [each["name"] for each in said["inputs"]] == [each.name for each in fragment.inputs]
        assert set(said["files"]) == {"model.onnx", "weights.bin"}
        assert {path.name for path in folder.iterdir()} == {*said["files"], "fragment.json"}
        for name, file in said["files"].items():
            data = (folder / name).read_bytes()
            assert file == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def test_weights_are_mapped_from_where_the_manifest_says(tmp_path: Path) -> None:
    store = tmp_path / "store"
    path = TOPOLOGIES["a residual network"].save(tmp_path)
    profile = profile_model(path)
    (fragment,) = cut_model(path, profile, (), store).fragments
    said = manifest(store, fragment.digest)
    folder = store / "fragments" / fragment.digest.removeprefix("sha256:")
    initializers = said["initializers"]
    assert isinstance(initializers, dict)
    assert set(initializers) == {"W", "W2", "W3"}
    for name, place in initializers.items():
        assert place["offset"] % 4096 == 0
        assert place["dtype"] == "float"
        values = np.fromfile(
            folder / "weights.bin", "<f4", place["bytes"] // 4, offset=place["offset"]
        ).reshape(place["shape"])
        np.testing.assert_array_equal(values, TOPOLOGIES["a residual network"].weights[name])
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        where = {each.key: each.value for each in tensor.external_data}
        assert where["location"] == "weights.bin"
        assert int(where["offset"]) == initializers[tensor.name]["offset"]


def test_small_tensors_and_strings_stay_in_the_model(tmp_path: Path) -> None:
    path = TOPOLOGIES["initializers that a caller could override"].save(tmp_path)
    profile = profile_model(path)
    (fragment,) = cut_model(path, profile, (), tmp_path / "store").fragments
    folder = tmp_path / "store" / "fragments" / fragment.digest.removeprefix("sha256:")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    places = {each.name: each.data_location for each in model.graph.initializer}
    assert places == {"W": TensorProto.EXTERNAL, "b": TensorProto.DEFAULT}


def test_a_fragment_without_large_weights_has_no_file_for_them(tmp_path: Path) -> None:
    made = Made(text="g (float[N,16] x) => (float[N,16] y) { y = Relu(x) }", shapes={"x": (1, 16)})
    path = made.save(tmp_path)
    (fragment,) = cut_model(path, profile_model(path), (), tmp_path / "store").fragments
    assert set(manifest(tmp_path / "store", fragment.digest)["files"]) == {"model.onnx"}  # type: ignore[call-overload]


def test_cutting_twice_changes_nothing(tmp_path: Path) -> None:
    path, store = CHAIN.save(tmp_path), tmp_path / "store"
    first = cut(path, store)
    before, times = content(store), {each: each.stat().st_mtime_ns for each in store.rglob("*.bin")}
    assert cut(path, store) == first
    assert content(store) == before
    assert times == {each: each.stat().st_mtime_ns for each in store.rglob("*.bin")}


def test_a_fragment_does_not_depend_on_how_the_model_is_stored(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    inline = cut(CHAIN.save(tmp_path / "a"), tmp_path / "store")
    external = cut(CHAIN.save(tmp_path / "b", external=True), tmp_path / "store")
    assert [each.digest for each in inline.fragments] == [
        each.digest for each in external.fragments
    ]
    assert inline.model_digest != external.model_digest


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("step", range(6))
def test_a_cut_that_is_killed_leaves_nothing_that_passes_for_a_fragment(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, store = CHAIN.save(tmp_path), tmp_path / "store"
    calls = 0

    def sometimes(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > step:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("shoal_compiler.fragments.os.fsync", sometimes)
        with pytest.raises(Killed):
            cut(path, store)
    for folder in (store / "fragments").iterdir():
        if folder.is_dir() and folder.suffix != ".part":
            text = (folder / "fragment.json").read_bytes()
            assert hashlib.sha256(text).hexdigest() == folder.name
    document = cut(path, store)
    assert not list(store.rglob("*.part"))
    feeds = CHAIN.inputs()
    np.testing.assert_array_equal(
        run_chained(store, document, feeds)["y"], run_whole(path, feeds)["y"]
    )


def test_progress_is_told(tmp_path: Path) -> None:
    path = CHAIN.save(tmp_path)
    profile = profile_model(path)
    told: list[tuple[int, int]] = []
    cut_model(path, profile, (1, 2), tmp_path / "store", lambda done, of: told.append((done, of)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_model_that_is_another_than_was_profiled_is_refused(tmp_path: Path) -> None:
    profile = profile_model(CHAIN.save(tmp_path))
    path = TOPOLOGIES["a residual network"].save(tmp_path)
    with pytest.raises(ModelRefused, match="not the model that was profiled"):
        cut_model(path, profile, (), tmp_path / "store")


def test_impossible_positions_are_refused(tmp_path: Path) -> None:
    path = TOPOLOGIES["a sequence inside"].save(tmp_path)
    profile = profile_model(path)
    at = Layout(profile).makers["c"]
    for cuts in ((at,), (0,), (2, 1), (99,)):
        with pytest.raises(ModelRefused, match="cannot be cut"):
            cut_model(path, profile, cuts, tmp_path / "store")


TYPED: dict[str, tuple[int, np.ndarray]] = {
    "float": (TensorProto.FLOAT, W),
    "double": (TensorProto.DOUBLE, W.astype(np.float64)),
    "int64": (TensorProto.INT64, (W * 1000).astype(np.int64)),
    "int8": (TensorProto.INT8, np.tile(W * 100, (4, 1)).astype(np.int8)),
    "float16": (TensorProto.FLOAT16, np.tile(W, (4, 1)).astype(np.float16)),
    "uint64": (TensorProto.UINT64, (np.abs(W) * 1000).astype(np.uint64)),
    "bool": (TensorProto.BOOL, np.tile(W > 0, (4, 1))),
}


@pytest.mark.parametrize("name", TYPED)
def test_weights_in_typed_fields_come_out_the_same(name: str, tmp_path: Path) -> None:
    data_type, values = TYPED[name]
    flat = values.view(np.uint16) if name == "float16" else values
    tensor = helper.make_tensor("k", data_type, values.shape, flat.flatten().tolist(), raw=False)
    if name == "float16":
        tensor = TensorProto(name="k", data_type=data_type, dims=values.shape)
        tensor.int32_data.extend(int(each) for each in flat.flatten())
    assert not tensor.HasField("raw_data")
    y = helper.make_tensor_value_info("y", data_type, list(values.shape))
    graph = helper.make_graph([helper.make_node("Identity", ["k"], ["y"])], "g", [], [y], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    profile = profile_model(path)
    document = cut_model(path, profile, (), tmp_path / "store")
    assert manifest(tmp_path / "store", document.fragments[0].digest)["initializers"]
    np.testing.assert_array_equal(run_chained(tmp_path / "store", document, {})["y"], values)


def test_two_initializers_of_a_name_are_refused_with_that_name(tmp_path: Path) -> None:
    model = CHAIN.proto()
    wrong = numpy_helper.from_array(np.full((16, 16), 9, np.float32), "W2")
    model.graph.initializer.insert(0, wrong)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelRefused, match="two initializers of one name") as caught:
        profile_model(tmp_path / "model.onnx")
    assert caught.value.tensor == "W2"


def test_sparse_initializers_are_kept(tmp_path: Path) -> None:
    model = CHAIN.proto()
    dense = np.zeros((16, 16), np.float32)
    dense[3, 5], dense[7, 2] = 0.5, -0.25
    kept = [each for each in model.graph.initializer if each.name != "W2"]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    model.graph.sparse_initializer.append(
        helper.make_sparse_tensor(
            numpy_helper.from_array(np.array([0.5, -0.25], np.float32), "W2"),
            numpy_helper.from_array(np.array([3 * 16 + 5, 7 * 16 + 2], np.int64), "W2_indices"),
            [16, 16],
        )
    )
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    profile = profile_model(path)
    document = cut_model(path, profile, Layout(profile).legal, tmp_path / "store")
    feeds = CHAIN.inputs()
    got = run_chained(tmp_path / "store", document, feeds)["y"]
    np.testing.assert_array_equal(got, run_whole(path, feeds)["y"])


def test_large_tensors_inside_branches_go_to_the_weights_too(tmp_path: Path) -> None:
    made = TOPOLOGIES["a branch that captures"]
    model = made.proto()
    for number, node in enumerate(each for each in model.graph.node if each.op_type == "If"):
        for attribute in node.attribute:  # both branches have a tensor of the same name
            branch = attribute.g
            name = branch.node[-1].output[0]
            branch.node[-1].output[0] = "before"
            branch.initializer.append(numpy_helper.from_array(weight(16, 16, seed=9), "inner"))
            branch.node.append(helper.make_node("MatMul", ["before", "inner"], [name]))
        assert number == 0
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    profile = profile_model(path)
    document = cut_model(path, profile, Layout(profile).legal, tmp_path / "store")
    stored = set()
    for fragment in document.fragments:
        initializers = manifest(tmp_path / "store", fragment.digest)["initializers"]
        assert isinstance(initializers, dict)
        stored |= set(initializers)
    assert {"inner.1", "inner.2"} <= stored
    for seed in range(4):  # both branches are taken
        feeds = made.inputs(seed)
        got = run_chained(tmp_path / "store", document, feeds)["y"]
        np.testing.assert_array_equal(got, run_whole(path, feeds)["y"])


# ---- damage --------------------------------------------------------------------------------------

DAMAGES = ("a file is missing", "a byte is another", "a file is cut short", "the manifest is empty")


def damage(folder: Path, kind: str) -> None:
    """Spoil a fragment in the store, as a disk or a person may."""
    weights = folder / "weights.bin"
    match kind:
        case "a file is missing":
            weights.unlink()
        case "a byte is another":
            changed = bytearray(weights.read_bytes())
            changed[len(changed) // 2] ^= 1
            weights.write_bytes(changed)
        case "a file is cut short":
            weights.write_bytes(weights.read_bytes()[:-1])
        case _:
            (folder / "fragment.json").write_bytes(b"")


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_fragment_that_is_damaged_in_the_store_is_made_again_and_others_are_left(
    tmp_path: Path, kind: str
) -> None:
    store, path = tmp_path / "store", CHAIN.save(tmp_path)
    document = cut(path, store)
    right = content(store)
    folders = [
        store / "fragments" / each.digest.removeprefix("sha256:") for each in document.fragments
    ]
    stood = {folder: folder.stat().st_ino for folder in folders}
    damage(folders[0], kind)
    assert cut(path, store) == document
    assert content(store) == right
    assert [folder for folder in folders if folder.stat().st_ino != stood[folder]] == folders[:1]


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_was_cut_before_is_read_before_it_is_used_again(tmp_path: Path, kind: str) -> None:
    store = tmp_path / "store"
    order = cut_order(CHAIN.save(tmp_path))
    assert cut_into_store(order, store, no_progress)["warm"] is False
    right = content(store)
    assert cut_into_store(order, store, no_progress)["warm"] is True
    damage(next((store / "fragments").glob("*/weights.bin")).parent, kind)
    assert cut_into_store(order, store, no_progress)["warm"] is False
    assert content(store) == right
    assert cut_into_store(order, store, no_progress)["warm"] is True


# ---- without a store -----------------------------------------------------------------------------


def test_what_a_cut_would_make_is_known_without_writing_it(tmp_path: Path) -> None:
    path = CHAIN.save(tmp_path)
    before = content(tmp_path)
    profile = profile_model(path, CHAIN.shapes)
    cuts = Layout(profile).legal[::2]
    document = cut_model(path, profile, cuts, None)
    assert content(tmp_path) == before
    assert document == cut_model(path, profile, cuts, tmp_path / "store")


def test_without_fragments_only_the_partition_is_kept(tmp_path: Path) -> None:
    order = cut_order(CHAIN.save(tmp_path))
    only, store = tmp_path / "only", tmp_path / "store"
    cut_into_store(order, only, no_progress, fragments=False)
    cut_into_store(order, store, no_progress)
    assert not (only / "fragments").exists()
    name = "partitions/chain/partition.json"
    assert (only / name).read_bytes() == (store / name).read_bytes()


def test_a_cut_is_planned_for_the_largest_item_wherever_it_is(tmp_path: Path) -> None:
    samples = tmp_path / "samples"
    samples.mkdir()
    for name, rows in (("a", 3), ("b", 700), ("c", 5)):
        np.save(samples / f"{name}.npy", np.zeros((rows, 16), np.float32))
    order = replace(cut_order(CHAIN.save(tmp_path)), name="sampled", shapes={}, sample=samples)
    largest = replace(order, name="declared", shapes={"x": (700, 16)}, sample=None)
    documents = []
    for each in (order, largest):
        cut_into_store(each, tmp_path / "store", no_progress)
        path = tmp_path / "store" / "partitions" / each.name / "partition.json"
        documents.append(document_from_json(path.read_bytes()))
    assert documents[0] == documents[1]
    assert (documents[0].fragments[0].activation_bytes or 0) > 2 * 700 * 16 * 4


def test_sizes_that_another_fragment_computes_are_in_the_manifest(tmp_path: Path) -> None:
    made = Made(
        text="""g (float[N,16] x) => (float[M,8] y) {
            shape = Shape(x) more = Mul(shape, up) sizes = Div(more, down)
            a = Tanh(x) b = Concat<axis = 1>(a, a)
            y = Reshape(b, sizes) }""",
        weights={"up": np.array([4, 1], np.int64), "down": np.array([1, 2], np.int64)},
        shapes={"x": (6, 16)},
    )
    path = made.save(tmp_path)
    profile = profile_model(path, {"x": (6, 16)})
    position = next(at for at, node in enumerate(profile.nodes) if node.operator == "Reshape")
    document = cut_model(path, profile, (position,), tmp_path)
    last = document.fragments[-1]
    folder = tmp_path / "fragments" / last.digest.removeprefix("sha256:")
    manifest = json.loads((folder / "fragment.json").read_bytes())
    assert manifest["values"] == {"sizes": [24, 8]}


def test_a_fragment_that_no_device_would_take_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal_compiler.fragments.MAXIMUM_MANIFEST_BYTES", 100)
    with pytest.raises(ModelRefused, match=r"at most 100 B are taken: cut it into more fragments"):
        cut(CHAIN.save(tmp_path), tmp_path / "store")
    assert not list((tmp_path / "store" / "fragments").glob("[0-9a-f]*"))


@pytest.mark.parametrize("copies", [1, 0])
def test_what_a_node_takes_outside_of_the_arena_is_in_the_manifest(
    tmp_path: Path, copies: int
) -> None:
    """A copy of all positions, 8 bytes each."""
    scattered = "y = ScatterElements<axis = 0>(x, index, x)"
    made = Made(
        text=f"""g (float[N,16] x) => (float[N,16] y) {{
            shape = Shape(x) index = Expand(zero, shape)
            {scattered if copies else "float = Cast<to = 1>(index) y = Add(x, float)"} }}""",
        weights={"zero": np.zeros(1, np.int64)},
        shapes={"x": (6, 16)},
    )
    path = made.save(tmp_path)
    document = cut_model(path, profile_model(path, {"x": (600, 16)}), (), tmp_path)
    folder = tmp_path / "fragments" / document.fragments[0].digest.removeprefix("sha256:")
    manifest = json.loads((folder / "fragment.json").read_bytes())
    assert manifest.get("beside_bytes", 0) == 8 * 600 * 16 * copies
