"""Nodes share the files of an image and nothing that is written."""

import shutil
from pathlib import Path

import pytest

from cluster_fixtures import or_skip
from shoal_cluster.cluster import require_machine
from shoal_cluster.image_store import ctr, fill, import_image, running, write_thin
from shoal_cluster.images import Image, pause_image

pytestmark = [pytest.mark.real, pytest.mark.nodes]


def inodes(root: Path) -> dict[str, int]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.stat().st_ino for path in files}


def test_nodes_share_layers_and_have_databases_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    or_skip(require_machine)
    images = [pause_image()]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one, other = tmp_path / "one", tmp_path / "other"
    fill(one, images, tmp_path)
    fill(other, images, tmp_path)
    first, second = inodes(one), inodes(other)
    assert first.keys() == second.keys()
    databases = {name for name in first if name.endswith(".db")}
    assert len(databases) > 1
    assert {name for name in first if first[name] != second[name]} == databases
    assert any("/blobs/" in name for name in first)
    assert any(name.endswith("/pause") for name in first)


def test_the_store_of_before_becomes_that_of_other_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    or_skip(require_machine)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    image = pause_image()
    other = Image("localhost/other:1", tmp_path / "other.tar")
    shutil.copy(image.archive, other.archive)
    fill(tmp_path / "one", [image], tmp_path)
    fill(tmp_path / "two", [other], tmp_path)
    assert len(list((tmp_path / "cache" / "shoal" / "cluster" / "stores").iterdir())) == 1
    # What a node has is its own to keep, and what the store has was not written again.
    first, second = inodes(tmp_path / "one"), inodes(tmp_path / "two")
    (layer,) = (name for name in first if "/blobs/" in name and size(tmp_path / "one", name) > 1e6)
    assert first[layer] == second[layer]
    for root, name in (("one", image.name), ("two", other.name)):
        assert any(file.endswith("/pause") for file in inodes(tmp_path / root))
        with running(tmp_path / root, tmp_path) as socket:
            assert ctr(socket, "--namespace=k8s.io", "image", "list", "--quiet").split() == [name]


def size(root: Path, name: str) -> int:
    return (root / name).stat().st_size


def test_what_is_left_out_must_be_there(tmp_path: Path) -> None:
    or_skip(require_machine)
    image = pause_image()
    layers = write_thin(image, (), tmp_path / "whole.tar")
    thin = Image(image.name, tmp_path / "thin.tar")
    assert write_thin(image, layers, thin.archive) == layers
    assert thin.archive.stat().st_size < 20_000 < image.archive.stat().st_size
    with running(tmp_path / "root", tmp_path) as socket, pytest.raises(OSError, match="not found"):
        import_image(socket, thin)
