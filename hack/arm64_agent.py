#!/usr/bin/env python3
"""Run the agent as on a 64-bit Arm device, on any machine: under QEMU's user mode.

    hack/arm64_agent.py FOLDER [OPTION OF THE AGENT...]

The first time, FOLDER gets QEMU, Debian's arm64 Python and the locked packages of an agent, from
the Debian mirror and the package index that this machine is configured for (some 130 MB). Nothing
is installed on the machine. Debian's Python has to be of a version that the packages are locked
for.

QEMU shows the machine's own /proc/cpuinfo, in which ONNX Runtime finds no Arm processor and ends
while it is imported. So FOLDER has one of a Cortex-A72, a Raspberry Pi 4's.
"""

import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
_PROCESSOR: Final = "cortex-a72"
_CPUINFO: Final = """\
processor\t: 0
Features\t: fp asimd evtstrm crc32 cpuid
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd08
CPU revision\t: 3
"""
_PACKAGES: Final = ("python3", "libstdc++6", "libgomp1")
_WHEELS: Final = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")


def main() -> None:
    """Prepare the folder where it is not, and become the agent."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(f"usage: {Path(sys.argv[0]).name} FOLDER [OPTION OF THE AGENT...]")
    folder = Path(sys.argv[1]).resolve()
    python = folder / "python"
    if not python.exists():
        _prepare(folder)
    os.execv(python, [str(python), "-OO", "-m", "shoal_agent", *sys.argv[2:]])  # noqa: S606 - no shell


def _prepare(folder: Path) -> None:
    root = folder / "root"
    root.mkdir(parents=True, exist_ok=True)
    _fetch_system(folder / "apt", root)
    version = _python(root).name.removeprefix("python")
    _fetch_packages(folder / "packages", version)
    for name, text in {
        "proc/cpuinfo": _CPUINFO,
        "sys/devices/system/cpu/possible": "0\n",
        "sys/devices/system/cpu/present": "0\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    _write_python(folder, root)


def _fetch_system(apt: Path, root: Path) -> None:
    """QEMU for this machine, and Debian's Python with all that it needs for the other."""
    for name in ("lists/partial", "cache/archives/partial"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "true",
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
    }
    other = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    subprocess.run([*other, "update"], check=True)
    subprocess.run([*other, "--yes", "--download-only", "install", *_PACKAGES], check=True)
    subprocess.run(["apt-get", "-qq", "download", "qemu-user-static"], cwd=apt, check=True)
    for package in (*apt.glob("cache/archives/*.deb"), *apt.glob("*.deb")):
        subprocess.run(["dpkg", "--extract", package, root], check=True)


def _fetch_packages(folder: Path, python: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--require-hashes", "--requirement", str(ROOT / "requirements/agent.txt")]
    command += ["--python-version", python, "--only-binary", ":all:", "--dest", str(folder)]
    command += [f"--platform={each}_aarch64" for each in _WHEELS]
    subprocess.run(command, check=True)
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)


def _python(root: Path) -> Path:
    return next(root.glob("usr/bin/python3.[0-9]*"))


def _write_python(folder: Path, root: Path) -> None:
    """A command that is that Python, also where it starts itself."""
    python = folder / "python"
    sources = [folder / "packages", *(ROOT / name for name in ("protos", "agent"))]
    settings = {
        "PYTHONHOME": root / "usr",
        "PYTHONPATH": ":".join(map(str, sources)),
        "PYTHONPYCACHEPREFIX": folder / "bytecode",
        "QEMU_CPU": _PROCESSOR,
    }
    command = [root / "usr/bin/qemu-aarch64-static", "-0", python, "-L", root, _python(root)]
    lines = [f"export {name}={shlex.quote(str(value))}" for name, value in settings.items()]
    lines.append(f'exec {shlex.join(map(str, command))} "$@"')
    part = python.with_suffix(".part")
    part.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    part.chmod(0o755)
    part.rename(python)


if __name__ == "__main__":
    main()
