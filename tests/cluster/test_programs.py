"""The programs of a cluster are the pinned ones, or those that the user offers and that fit."""

from pathlib import Path

import pytest

from shoal_cluster import programs
from shoal_cluster.build import PROGRAMS, place, version
from shoal_cluster.machine import MachineLacks, install, missing_packages
from shoal_cluster.programs import find, find_all


@pytest.fixture(autouse=True)
def nothing_found_before() -> None:
    find.cache_clear()


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in KUBEBUILDER_ASSETS; nothing is built, and PATH is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "assets"))
    (tmp_path / "assets").mkdir()
    return tmp_path / "assets"


def offer(folder: Path, name: str, says: str) -> Path:
    program = folder / name
    program.write_text(f"#!/bin/sh\necho {says}\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_is_pinned_and_its_place_says_by_what(name: str) -> None:
    program = PROGRAMS[name]
    assert version(program)[0].isdigit()
    assert place(program).parent.name.startswith(f"{program.folder}-")


def test_an_offered_program_of_the_same_minor_version_is_taken(offered: Path) -> None:
    kubelet = offer(offered, "kubelet", "Kubernetes v1.35.99")
    assert find("kubelet") == kubelet


@pytest.mark.parametrize("says", ["Kubernetes v1.31.0", "nothing of the kind"])
def test_an_offered_program_of_another_version_is_not_taken(offered: Path, says: str) -> None:
    offer(offered, "kubelet", says)
    with pytest.raises(MachineLacks, match="make cluster-build"):
        find("kubelet")


def test_kubectl_may_be_one_minor_version_away(offered: Path) -> None:
    kubectl = offer(offered, "kubectl", "Client Version: v1.36.0")
    assert find("kubectl") == kubectl


def test_everything_that_has_to_be_built_is_named_at_once(offered: Path) -> None:
    offer(offered, "kubelet", "Kubernetes v1.35.0")
    with pytest.raises(MachineLacks, match=r"make etcd, kube-proxy\)"):
        find_all(("etcd", "kubelet", "kube-proxy"))
    assert programs.unbuilt(("etcd", "kubelet")) == ["etcd"]


def test_where_packages_cannot_be_installed_the_command_is_said(offered: Path) -> None:
    here = offer(offered, "ip", "")
    wanted = {"no-runc": "runc", "no-ctr": "containerd", str(here): "iproute2"}
    assert missing_packages(wanted) == ("containerd", "runc")
    with pytest.raises(MachineLacks, match="apt-get install containerd runc"):
        install(wanted)
