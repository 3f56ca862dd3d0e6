"""ONNX files from strangers: refused with a reason, before anything follows what they say."""

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from compiler.cut_everywhere import assert_same_as_whole
from made_models import TOPOLOGIES, tiny
from shoal_compiler.errors import ModelRefused
from shoal_compiler.profile import profile_model
from shoal_compiler.safety import NEWEST_IR_VERSION, NEWEST_OPSET, open_model
from shoal_planner.profile import Profile

CHAIN = TOPOLOGIES["a chain"]
FOLDER = Path(tempfile.mkdtemp(prefix="shoal-fuzz-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def refusal(path: Path) -> ModelRefused:
    with pytest.raises(ModelRefused) as caught:
        open_model(path)
    return caught.value


def written(folder: Path, model: onnx.ModelProto) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def external(folder: Path, change: Callable[[dict[str, str]], None]) -> Path:
    """A model with external data, in which the first tensor's reference is changed."""
    path = CHAIN.save(folder, external=True)
    model = onnx.load(path, load_external_data=False)
    entries = model.graph.initializer[0].external_data
    place = {each.key: each.value for each in entries}
    change(place)
    del entries[:]
    for key, value in place.items():
        entries.add(key=key, value=value)
    return written(folder, model)


def test_good_models_pass(tmp_path: Path) -> None:
    for made in TOPOLOGIES.values():
        assert not open_model(made.save(tmp_path)).external
    assert list(open_model(CHAIN.save(tmp_path, external=True)).external) == ["data.bin"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a model at all",
        b"\x08",
        b"\x3a\xff\xff\xff\xff\x0f",
        bytes(4096),
        b"PK\x03\x04zip",
    ],
)
def test_what_is_no_model_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert refusal(path).path == path


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert "is not a file" in refusal(tmp_path).reason
    assert "No such file" in refusal(tmp_path / "missing.onnx").reason
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in refusal(tmp_path / "pipe").reason


@pytest.mark.parametrize("location", ["../data.bin", "/etc/passwd", "a/../../data.bin", ""])
def test_external_data_outside_of_the_folder_is_refused(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    path = external(folder, lambda place: place.update(location=location))
    (tmp_path / "data.bin").write_bytes((folder / "data.bin").read_bytes())
    assert "outside of the folder" in refusal(path).reason


@pytest.mark.parametrize(
    ("location", "mark"), [("C:data.bin", ":"), ("a\\data.bin", "\\"), ("a/../data.bin", "..")]
)
def test_a_refusal_of_external_data_says_what_in_its_path_is_not_taken(
    location: str, mark: str, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    path = external(tmp_path, lambda place: place.update(location=location))
    assert f"no path with {mark!r} is taken" in refusal(path).reason


def test_a_length_of_zero_says_nothing(tmp_path: Path) -> None:
    path = external(tmp_path, lambda place: place.update(length="0"))
    assert_same_as_whole(path, CHAIN.inputs())


@pytest.mark.parametrize("location", ["./data.bin", ".//data.bin"])
def test_a_file_of_external_data_may_be_named_in_several_ways(
    location: str, tmp_path: Path
) -> None:
    path = external(tmp_path, lambda place: place.update(location=location))
    sizes = [each.stat().st_size for each in (path, tmp_path / "data.bin")]
    assert profile_model(path).size_bytes == sum(sizes)
    assert_same_as_whole(path, CHAIN.inputs())


def test_external_data_through_links_is_refused(tmp_path: Path) -> None:
    path = CHAIN.save(tmp_path, external=True)
    secret = tmp_path / "elsewhere"
    (tmp_path / "data.bin").rename(secret)
    (tmp_path / "data.bin").symlink_to(secret)
    assert "symbolic link" in refusal(path).reason
    (tmp_path / "data.bin").unlink()
    os.link(secret, tmp_path / "data.bin")
    assert "hard links" in refusal(path).reason
    (tmp_path / "data.bin").unlink()
    assert "No such file" in refusal(path).reason


def test_a_linked_folder_on_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = external(tmp_path / "model", lambda place: place.update(location="sub/data.bin"))
    (tmp_path / "outside").mkdir()
    (tmp_path / "model" / "data.bin").rename(tmp_path / "outside" / "data.bin")
    (tmp_path / "model" / "sub").symlink_to(tmp_path / "outside")
    assert "symbolic link" in refusal(path).reason


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offset", "99999999"),
        ("offset", "-1"),
        ("offset", "0x10"),
        ("length", "12"),
        ("length", "99999999999999999999"),
        ("offset", "9223372036854775807"),
    ],
)
def test_external_data_outside_of_its_file_is_refused(key: str, value: str, tmp_path: Path) -> None:
    path = external(tmp_path, lambda place: place.update({key: value}))
    assert refusal(path).tensor == "W"


def test_a_model_cannot_point_into_itself(tmp_path: Path) -> None:
    path = external(tmp_path, lambda place: place.update(location="\0", offset="0"))
    with pytest.raises(ModelRefused):
        profile_model(path)


@pytest.mark.parametrize(
    "dims", [[2**40, 2**40], [-1, 4], [2**62, 2**62, 0], [0, 2**62], [2**61, 0], [3, 5]]
)
def test_a_shape_that_its_bytes_do_not_fill_is_refused(dims: list[int], tmp_path: Path) -> None:
    model = CHAIN.proto()
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend(dims)
    assert refusal(written(tmp_path, model)).tensor == "W"


@pytest.mark.parametrize("dims", [[0, 2**62], [2**61, 0]])
def test_an_empty_tensor_of_an_impossible_shape_is_refused(dims: list[int], tmp_path: Path) -> None:
    model = tiny()
    model.graph.initializer.append(TensorProto(name="e", data_type=TensorProto.FLOAT, dims=dims))
    with pytest.raises(ModelRefused, match="more elements than can be"):
        profile_model(written(tmp_path, model))


def test_an_unknown_domain_is_named_with_its_node(tmp_path: Path) -> None:
    model = tiny()
    model.graph.node[0].domain = "evil.ops"
    model.graph.node[0].name = "first"
    refused = refusal(written(tmp_path, model))
    assert "'evil.ops'" in refused.reason
    assert refused.node == "first (Relu)"


def test_an_unknown_domain_inside_a_branch_or_a_function_is_found(tmp_path: Path) -> None:
    model = TOPOLOGIES["a branch that captures"].proto()
    branch = next(node for node in model.graph.node if node.op_type == "If")
    branch.attribute[0].g.node[0].domain = "evil"
    assert "evil" in refusal(written(tmp_path, model)).reason
    model = TOPOLOGIES["functions in functions"].proto()
    model.functions[1].node[0].domain = "evil"
    assert "evil" in refusal(written(tmp_path, model)).reason


@pytest.mark.parametrize("opset", [1, 6, 99])
def test_opsets_that_are_too_old_or_too_new_are_refused(opset: int, tmp_path: Path) -> None:
    model = tiny()
    model.opset_import[0].version = opset
    assert f"opset {opset}" in refusal(written(tmp_path, model)).reason


@pytest.mark.parametrize("domain", ["", "ai.onnx", "com.microsoft"])
def test_an_operator_set_may_be_imported_again(domain: str, tmp_path: Path) -> None:
    """Tools append what is there already, and the runtime does not mind."""
    model = tiny()
    version = 1 if domain == "com.microsoft" else model.opset_import[0].version
    model.opset_import.extend([helper.make_opsetid(domain, version)] * 2)
    assert profile_model(written(tmp_path, model)).opset == model.opset_import[0].version


@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_two_operator_sets_of_one_domain_are_refused(domain: str, tmp_path: Path) -> None:
    model = tiny()
    model.opset_import[0].version = 13
    model.opset_import.append(helper.make_opsetid(domain, 17))
    reason = refusal(written(tmp_path, model)).reason
    assert reason == "imports two operator sets of ai.onnx: 13 and 17"


@pytest.mark.parametrize("opset", range(7, NEWEST_OPSET + 1))
def test_opsets_from_seven_on_pass(opset: int, tmp_path: Path) -> None:
    model = tiny()
    model.opset_import[0].version = opset
    assert profile_model(written(tmp_path, model)).opset == opset


def test_a_model_is_refused_for_its_versions_where_the_runtime_refuses_it(tmp_path: Path) -> None:
    """onnx writes both versions newer than the runtime opens them, where nobody names others."""
    model = tiny()
    for opset in (NEWEST_OPSET, NEWEST_OPSET + 1):
        for ir_version in (NEWEST_IR_VERSION, NEWEST_IR_VERSION + 1):
            model.opset_import[0].version, model.ir_version = opset, ir_version
            path = written(tmp_path, model)
            try:
                onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            except onnxruntime.capi.onnxruntime_pybind11_state.Fail:
                assert "ONNX Runtime takes" in refusal(path).reason
            else:
                assert open_model(path).proto == model


def nested(depth: int) -> onnx.GraphProto:
    value = helper.make_tensor_value_info("y", TensorProto.FLOAT, [])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [], [value])
    for _ in range(depth):
        node = helper.make_node("If", ["c"], ["y"], then_branch=graph, else_branch=graph)
        graph = helper.make_graph([node], "g", [], [value])
    return graph


def test_graphs_nested_too_deep_are_refused(tmp_path: Path) -> None:
    model = tiny()
    graph = nested(1)
    for _ in range(20):  # one branch only: the other would double the file each time
        node = helper.make_node("If", ["c"], ["y"])
        node.attribute.append(helper.make_attribute("then_branch", graph))
        graph = onnx.GraphProto(node=[node], output=graph.output)
    model.graph.CopyFrom(graph)
    assert "deep" in refusal(written(tmp_path, model)).reason


def test_functions_that_recurse_or_explode_are_refused(tmp_path: Path) -> None:
    text = TOPOLOGIES["functions in functions"]
    model = text.proto()
    model.functions[1].node[0].op_type = "twice"
    model.functions[1].node[0].domain = "local"
    assert "calls itself" in refusal(written(tmp_path, model)).reason
    model = text.proto()
    del model.functions[:]
    for level in range(12):
        calls = [
            helper.make_node(f"f{level + 1}" if level < 11 else "Relu", ["v"], [f"r{each}"])
            for each in range(10)
        ]
        for call in calls:
            call.domain = "local" if level < 11 else ""
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
        model.functions.append(
            helper.make_function("local", f"f{level}", ["v"], ["r0"], calls, opsets)
        )
    assert "functions written out" in refusal(written(tmp_path, model)).reason


def test_cycles_and_missing_tensors_are_refused_with_the_node(tmp_path: Path) -> None:
    model = tiny()
    model.graph.node[0].input[0] = "y"
    with pytest.raises(ModelRefused, match="its own output"):
        profile_model(written(tmp_path, model))
    model.graph.node[0].input[0] = "nowhere"
    with pytest.raises(ModelRefused, match="nothing makes"):
        profile_model(written(tmp_path, model))
    model = tiny()
    model.graph.node.append(helper.make_node("Tanh", ["x"], ["y"]))
    with pytest.raises(ModelRefused, match="made elsewhere"):
        profile_model(written(tmp_path, model))


def test_a_model_whose_inputs_are_no_tensors_is_refused(tmp_path: Path) -> None:
    model = tiny()
    sequence = helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, [4])
    del model.graph.input[:], model.graph.node[:]
    model.graph.input.append(sequence)
    model.graph.node.append(helper.make_node("ConcatFromSequence", ["x"], ["y"], axis=0))
    with pytest.raises(ModelRefused, match="sequence"):
        profile_model(written(tmp_path, model))


SEEDS = [
    CHAIN.proto().SerializeToString(),
    TOPOLOGIES["a branch that captures"].proto().SerializeToString(),
    TOPOLOGIES["functions in functions"].proto().SerializeToString(),
    TOPOLOGIES["shapes computed and used far away"].proto().SerializeToString(),
    TOPOLOGIES["quantised weights"].proto().SerializeToString(),
]


def profile_or_refusal(path: Path) -> Profile | ModelRefused:
    try:
        return profile_model(path, {"x": (2, 16)})
    except ModelRefused as refused:
        return refused


@pytest.mark.parametrize(
    "topology", ["shapes computed and used far away", "a branch that captures"]
)
def test_a_constant_without_an_output_is_refused(topology: str, tmp_path: Path) -> None:
    proto = TOPOLOGIES[topology].proto()
    graphs = [proto.graph, *(each.g for node in proto.graph.node for each in node.attribute)]
    constants = [node for graph in graphs for node in graph.node if node.op_type == "Constant"]
    del constants[0].output[:]
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    assert "has no output" in refusal(path).reason


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_damaged_models_are_refused_or_profiled_but_never_anything_else(
    data: st.DataObject,
) -> None:
    content = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "drop", "repeat"])):
            case "flip":
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del content[max(1, at) :]
            case "drop":
                del content[at : at + data.draw(st.integers(1, 40))]
            case "repeat":
                content[at:at] = content[at : at + data.draw(st.integers(1, 40))]
        if not content:
            content = bytearray(b"\0")
    path = FOLDER / "model.onnx"
    path.write_bytes(content)
    match profile_or_refusal(path):
        case ModelRefused() as refused:
            assert str(refused)
        case Profile() as profile:
            assert profile.digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
            assert all(size >= 0 for size in profile.weights.values())
            assert profile.weight_bytes == sum(profile.weights.values())
            made = {name for node in profile.nodes for name in node.outputs}
            assert made <= profile.tensors.keys()


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=400))
def test_noise_is_refused(content: bytes) -> None:
    path = FOLDER / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelRefused):
        open_model(path)
