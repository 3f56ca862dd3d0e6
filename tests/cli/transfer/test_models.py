"""Models by their addresses: fetched once, checked on the way, with all that belongs to them."""

import hashlib
import os
from pathlib import Path

import onnx
import pytest

from cli.transfer.servers import S3, Registry
from cli.transfer.web_server import Web
from made_models import tiny, weight
from shoal_cli.transfer.addresses import Access
from shoal_cli.transfer.models import Fetching
from shoal_cli.transfer.places import TransferBroken, TransferRefused
from shoal_compiler.errors import ModelRefused
from shoal_compiler.external import external_locations
from shoal_compiler.profile import profile_model


@pytest.fixture
def fetching(tmp_path: Path) -> Fetching:
    access = Access(base=tmp_path, volumes={"models": tmp_path / "claim"})
    return Fetching(access=access, cache=tmp_path / "cache")


@pytest.fixture
def model(tmp_path: Path) -> bytes:
    onnx.save(tiny(), tmp_path / "tiny.onnx")
    return (tmp_path / "tiny.onnx").read_bytes()


def with_external_data(folder: Path) -> dict[str, bytes]:
    """A model of three files, by their names."""
    folder.mkdir()
    made = onnx.helper.make_model(
        onnx.helper.make_graph(
            [
                onnx.helper.make_node("MatMul", ["x", "w"], ["a"]),
                onnx.helper.make_node("MatMul", ["a", "v"], ["y"]),
            ],
            "external",
            [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 64])],
            [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 64])],
            [
                onnx.numpy_helper.from_array(weight(64, 64, seed=n), name)
                for n, name in ((1, "w"), (2, "v"))
            ],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 17)],
        ir_version=9,
    )
    onnx.save(
        made,
        folder / "m.onnx",
        save_as_external_data=True,
        all_tensors_to_one_file=False,
        size_threshold=0,
    )
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


async def test_a_model_is_fetched_once(web: Web, fetching: Fetching, model: bytes) -> None:
    web.files["/m.onnx"] = model
    path = await fetching.model(f"{web.url}/m.onnx", sha256(model))
    assert (path.name, path.read_bytes()) == ("m.onnx", model)
    web.asked.clear()
    assert await fetching.model(f"{web.url}/m.onnx", sha256(model)) == path
    assert web.asked == [("/m.onnx", "bytes=0-0")]
    web.files["/m.onnx"] = other = model + b"\x1a\x00"  # an empty producer version
    changed = await fetching.model(f"{web.url}/m.onnx")
    assert (changed != path, changed.read_bytes()) == (True, other)


async def test_what_broke_off_is_not_fetched_again(
    web: Web, fetching: Fetching, model: bytes
) -> None:
    # A model with much in it: a doc string, which nobody reads.
    proto = onnx.load_model_from_string(model)
    proto.doc_string = "x" * (32 << 20)
    web.files["/m.onnx"] = content = proto.SerializeToString()
    # Of what is sent before a connection breaks, a client that is late does not get all.
    web.break_after, web.breaks = 4 << 20, 10
    with pytest.raises(TransferBroken):
        await Fetching(access=fetching.access, cache=fetching.cache).model(f"{web.url}/m.onnx")
    web.breaks = 0
    web.asked.clear()
    path = await fetching.model(f"{web.url}/m.onnx", sha256(content))
    (_, first), (_, second) = web.asked
    assert first == "bytes=0-0"
    assert int(str(second).removeprefix("bytes=")[:-1]) > 1 << 20
    assert path.read_bytes() == content


async def test_another_digest_is_refused_and_nothing_is_kept(
    web: Web, fetching: Fetching, model: bytes
) -> None:
    web.files["/m.onnx"] = model
    wanted = sha256(b"another")
    with pytest.raises(TransferRefused, match=f"is {sha256(model)}, not {wanted}"):
        await fetching.model(f"{web.url}/m.onnx", wanted)
    assert not list(fetching.cache.rglob("*.onnx"))


async def test_a_server_that_names_no_version_is_asked_every_time(
    web: Web, fetching: Fetching, model: bytes
) -> None:
    web.tags = False
    web.files["/m.onnx"] = model
    await fetching.model(f"{web.url}/m.onnx")
    web.files["/m.onnx"] = other = model[:-1] + bytes([model[-1] ^ 1])
    try:
        path = await fetching.model(f"{web.url}/m.onnx")
    except ModelRefused:
        return  # the last byte mattered, and was seen
    assert path.read_bytes() == other


async def test_more_than_allowed_is_not_fetched(web: Web, fetching: Fetching, model: bytes) -> None:
    web.files["/m.onnx"] = model
    small = Fetching(access=fetching.access, cache=fetching.cache, limit_bytes=10)
    with pytest.raises(TransferRefused, match="at most 10 B are fetched"):
        await small.model(f"{web.url}/m.onnx")
    assert [wanted for _, wanted in web.asked] == ["bytes=0-0"]


async def test_external_data_comes_along(web: Web, fetching: Fetching, tmp_path: Path) -> None:
    files = with_external_data(tmp_path / "model")
    digest = profile_model(tmp_path / "model/m.onnx").digest
    web.files = {f"/deep/{name}": content for name, content in files.items()}
    path = await fetching.model(f"{web.url}/deep/m.onnx?key=1", digest)
    for name, content in files.items():
        assert path.with_name(name).read_bytes() == content
    assert profile_model(path).digest == digest
    assert {asked.partition("?")[2] for asked, _ in web.asked} == {"key=1"}
    web.asked.clear()
    await fetching.model(f"{web.url}/deep/m.onnx?key=1", digest)
    assert [wanted for _, wanted in web.asked] == ["bytes=0-0"] * 3
    del web.files["/deep/w"]
    with pytest.raises(TransferRefused, match="404"):
        await fetching.model(f"{web.url}/deep/m.onnx?key=1")


async def test_external_data_outside_of_the_folder_is_not_fetched(
    web: Web, fetching: Fetching, tmp_path: Path
) -> None:
    files = with_external_data(tmp_path / "model")
    proto = onnx.load(tmp_path / "model/m.onnx", load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = "../secret"
    web.files = {"/m.onnx": proto.SerializeToString(), "/secret": files["w"]}
    with pytest.raises(ModelRefused, match="outside of the folder"):
        await fetching.model(f"{web.url}/m.onnx")
    assert all(asked != "/secret" for asked, _ in web.asked)


async def test_a_model_and_its_data_lie_in_a_bucket(
    s3: S3, fetching: Fetching, tmp_path: Path
) -> None:
    files = with_external_data(tmp_path / "model")
    (s3.folder / "models/m").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (s3.folder / "models/m" / name).write_bytes(content)
    digest = profile_model(tmp_path / "model/m.onnx").digest
    for uri in ("s3://lines/models/m/m.onnx", "s3://lines/models/m/"):
        path = await fetching.model(uri, digest)
        assert profile_model(path).digest == digest
    with pytest.raises(TransferRefused, match="there is no"):
        await fetching.model("s3://lines/models/none.onnx")
    (s3.folder / "models/m/second.onnx").write_bytes(b"x")
    with pytest.raises(TransferRefused, match=r"there are 2 models, m\.onnx, second\.onnx"):
        await fetching.model("s3://lines/models/m/")


async def test_an_artifact_of_a_registry_is_a_model(
    registry: Registry, fetching: Fetching, tmp_path: Path, model: bytes
) -> None:
    digest = registry.push("models/tiny", "v1", {"model.onnx": model}, titles=False)
    for reference in ("models/tiny:v1", f"models/tiny@{digest}"):
        path = await fetching.model(f"oci://{registry.host}/{reference}", sha256(model))
        assert (path.name, path.read_bytes()) == ("model.onnx", model)
    files = with_external_data(tmp_path / "model")
    registry.push("models/external", "latest", {**files, "README.md": b"read me"})
    path = await fetching.model(f"oci://{registry.host}/models/external")
    assert profile_model(path).digest == profile_model(tmp_path / "model/m.onnx").digest
    with pytest.raises(TransferRefused, match="404"):
        await fetching.model(f"oci://{registry.host}/models/none:v1")
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [
            {
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": digest,
                "size": 1,
                "platform": {"architecture": "amd64", "os": "linux"},
            }
        ],
    }
    registry.put_manifest("models/tiny", "index", index)
    with pytest.raises(TransferRefused, match=r"an index of several|404"):
        await fetching.model(f"oci://{registry.host}/models/tiny:index")


async def test_local_models_stay_where_they_are(
    fetching: Fetching, tmp_path: Path, model: bytes
) -> None:
    (tmp_path / "claim").mkdir()
    (tmp_path / "claim/m.onnx").write_bytes(model)
    expected = tmp_path / "claim/m.onnx"
    for uri in ("pvc://models/m.onnx", "pvc://models/", "claim/m.onnx", expected.as_uri()):
        assert await fetching.model(uri) == expected
    with pytest.raises(TransferRefused, match="there is no file"):
        await fetching.model("pvc://models/other.onnx")
    assert not fetching.cache.exists()


def test_locations_are_found_wherever_a_tensor_is(tmp_path: Path) -> None:
    tensor = onnx.TensorProto(name="t", data_type=1, dims=[1], data_location="EXTERNAL")
    tensor.external_data.add(key="location", value="deep/in.bin")
    inner = onnx.helper.make_graph([], "inner", [], [], [tensor])
    node = onnx.helper.make_node("If", ["c"], ["y"], then_branch=inner)
    proto = onnx.helper.make_model(onnx.helper.make_graph([node], "outer", [], []))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    assert external_locations(tmp_path / "m.onnx") == ("deep/in.bin",)
    (tmp_path / "m.onnx").write_bytes(os.urandom(64))
    with pytest.raises(ModelRefused):
        external_locations(tmp_path / "m.onnx")
