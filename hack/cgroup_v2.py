#!/usr/bin/env python3
"""Run a command on a machine with cgroup v2, on any x86-64 Debian: Debian's kernel in QEMU.

    hack/cgroup_v2.py FOLDER COMMAND [ARGUMENT...]

    hack/cgroup_v2.py /tmp/v2 .venv/bin/pytest tests/cli/local/test_cgroups.py

The command runs as root in this project's folder. It sees the files of this machine; what it writes
goes to a disk in FOLDER, which is new each time. All memory controllers are the second version's.
Without `--kvm`, QEMU computes each instruction itself: the machine is some twenty times as slow.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
_NEEDED: Final = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "mkfs.ext4": "e2fsprogs",
    "depmod": "kmod",
}
_MODULES: Final = (
    *("virtio_pci", "virtio_blk", "ext4", "crc32c_generic"),
    *("9pnet_virtio", "9p", "overlay"),
)
_DISK_BYTES: Final = 16 << 30
_MEMORY_MIB: Final = 4096
_ENDED: Final = re.compile(rb"^the command ended with (\d+)\r?$")

_INIT: Final = """\
#!/bin/busybox sh
set -e
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
busybox mount -t devtmpfs dev /dev
for module in {modules}; do busybox insmod /modules/$module; done
busybox mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=1048576,cache=loose host /below
busybox mount -t ext4 /dev/vda /above
busybox mkdir -p /above/upper /above/work
busybox mount -t overlay -o lowerdir=/below,upperdir=/above/upper,workdir=/above/work none /root
exec busybox switch_root /root /bin/bash -c {start}
"""
_START: Final = """\
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
echo +memory > /sys/fs/cgroup/cgroup.subtree_control
ip link set lo up
cd {folder}
(trap '' INT; export HOME=/root PATH={path}; exec {command}) < /dev/null
echo "the command ended with $?"
sync
echo o > /proc/sysrq-trigger
while :; do :; done
"""


def main() -> None:
    """Prepare the folder where it is not, run the machine, and end as the command has."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--kvm", action="store_true", help="let the processor compute")
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("command", nargs=argparse.REMAINDER)
    given = arguments.parse_args()
    if not given.command:
        arguments.error("which command?")
    if missing := sorted({_NEEDED[each] for each in _NEEDED if shutil.which(each) is None}):
        raise SystemExit(f"install {' '.join(missing)}")
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.glob("kernel/boot/vmlinuz-*")):
        _fetch_kernel(folder)
    _write_first_files(folder, given.command)
    _write_disk(folder / "disk")
    raise SystemExit(_run(folder, kvm=given.kvm))


def _fetch_kernel(folder: Path) -> None:
    """The newest that this Debian has: the package that one without a number depends on."""
    said = subprocess.check_output(["apt-cache", "depends", "linux-image-amd64"], text=True)
    (name,) = re.findall(r"Depends: (linux-image-\S+)", said)[:1]
    settings = "-oAPT::Sandbox::User=root"
    subprocess.run(["apt-get", "-qq", settings, "download", name], cwd=folder, check=True)
    for package in folder.glob("linux-image-*.deb"):
        subprocess.run(["dpkg", "--extract", package, folder / "kernel"], check=True)


def _write_first_files(folder: Path, command: list[str]) -> None:
    """What the kernel starts: busybox, the modules that the disks need, and what to do."""
    first = folder / "first"
    shutil.rmtree(first, ignore_errors=True)
    for name in ("bin", "modules", "proc", "sys", "dev", "below", "above", "root"):
        (first / name).mkdir(parents=True)
    shutil.copy2(str(shutil.which("busybox")), first / "bin/busybox")
    (modules,) = (folder / "kernel/lib/modules").iterdir()
    names = []
    for path in _in_order(modules, _MODULES):
        names.append(path.name)
        shutil.copy2(path, first / "modules")
    places = f"{ROOT}/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    start = _START.replace("{folder}", shlex.quote(str(ROOT)))
    start = start.replace("{path}", shlex.quote(places))
    start = start.replace("{command}", shlex.join(command))
    init = first / "init"
    init.write_text(_INIT.format(modules=" ".join(names), start=shlex.quote(start)))
    init.chmod(0o755)
    listed = "\n".join(str(each.relative_to(first)) for each in sorted(first.rglob("*")))
    with (folder / "first.cpio").open("wb") as file:
        subprocess.run(
            ["cpio", "--quiet", "--create", "--format=newc"],
            input=listed.encode(),
            stdout=file,
            cwd=first,
            check=True,
        )


def _in_order(modules: Path, wanted: tuple[str, ...]) -> list[Path]:
    """Modules behind those that they need; what the kernel has built in is left out."""
    needs = {}
    subprocess.run(["depmod", "--basedir", modules.parents[2], modules.name], check=True)
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[Path(path).stem] = (path, others.split())

    def all_of(name: str) -> Iterator[str]:
        if name in needs:
            path, others = needs[name]
            yield from reversed(others)
            yield path

    found = dict.fromkeys(path for name in wanted for path in all_of(name))
    return [modules / path for path in found]


def _write_disk(disk: Path) -> None:
    disk.unlink(missing_ok=True)
    with disk.open("wb") as file:
        file.truncate(_DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", disk], check=True)


def _run(folder: Path, *, kvm: bool) -> int:
    (kernel,) = folder.glob("kernel/boot/vmlinuz-*")
    command = ["qemu-system-x86_64", "-no-reboot", "-machine", "q35", "-smp", "2"]
    command += ["-display", "none", "-monitor", "none", "-serial", "stdio"]
    command += ["-m", str(_MEMORY_MIB), "-cpu", "host" if kvm else "max"]
    command += ["-accel", "kvm" if kvm else "tcg,thread=multi"]
    command += ["-kernel", str(kernel), "-initrd", str(folder / "first.cpio")]
    command += ["-append", "console=ttyS0 panic=-1 quiet mitigations=off"]
    command += ["-drive", f"file={folder / 'disk'},if=virtio,format=raw,cache=unsafe"]
    share = "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"
    command += ["-virtfs", share]
    ended = 1
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as machine:
        assert machine.stdout is not None
        for line in machine.stdout:
            if (said := _ENDED.match(line)) is not None:
                ended = int(said[1])
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
    return ended


if __name__ == "__main__":
    main()
