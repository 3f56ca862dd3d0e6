"""Nodes share the files of an image and nothing that is written."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cluster_fixtures import or_skip
from shoal_cluster.cluster import require_machine
from shoal_cluster.image_store import fill
from shoal_cluster.images import pause_image

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


def test_a_store_gives_way_to_that_of_other_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    or_skip(require_machine)
    image = pause_image()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rebuilt = replace(image, archive=tmp_path / "rebuilt.tar")
    shutil.copy(image.archive, rebuilt.archive)
    fill(tmp_path / "one", [image], tmp_path)
    fill(tmp_path / "other", [rebuilt], tmp_path)
    assert len(list((tmp_path / "cache" / "shoal" / "cluster" / "stores").iterdir())) == 1
    for root in (tmp_path / "one", tmp_path / "other"):  # what a node has is its own to keep
        assert any(name.endswith("/pause") for name in inodes(root))
