"""In a container: the limit of memory is the idle agent's allowance and the budget together."""

import asyncio
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from agent.conftest import SOURCES
from agent.control_groups import LIMIT, charged, limit
from agent.fragment_making import InBlocks, dense_model, write_fragment
from agent.scripted_coordinator import PATIENCE_SECONDS, ScriptedCoordinator
from agent.test_huge_pages import advised
from agent.test_memory_in_blocks import run
from shoal_agent.telemetry import machine
from shoal_agent.telemetry.machine import Machine
from shoal_agent.transport.addresses import advertised


def with_a_library(folder: Path, size: int) -> Path:
    """A folder on the path of Python, from which each process maps a large library. It is in
    nobody's page cache, where a hole takes its place as well: the first that reads it is charged.
    """
    folder.mkdir()
    library = folder / "library.so"
    with library.open("wb") as file:
        file.truncate(size)
    (folder / "sitecustomize.py").write_text(
        f"import mmap, numpy\n"
        f"file = open({str(library)!r}, 'rb')\n"
        f"library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        f"read = int(numpy.frombuffer(library, numpy.uint8)[::4096].sum())\n"
    )
    return folder


@pytest.mark.real
@pytest.mark.parametrize(("budget", "fits"), [("64Mi", True), ("590Mi", False)])
async def test_an_agent_that_passes_its_allowance_says_so_and_takes_no_work(
    coordinator: ScriptedCoordinator, folder: Path, group: Path, budget: str, fits: bool
) -> None:
    command = [sys.executable, "-m", "shoal_agent", "--name", "pi-4", "--budget", budget]
    command += ["--speed", os.devnull]
    command += ["--coordinator", f"unix:{folder}/c.sock", "--cache", str(folder / "cache")]
    command += ["--threads", "1", "--log-level", "info", "--metrics-address", "127.0.0.1:0"]
    errors = folder / "agent.err"
    path = os.pathsep.join(str(SOURCES / each) for each in ("agent", "protos"))
    joins = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]
    with errors.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *joins, stderr=file, env=os.environ | {"PYTHONPATH": path}
        )
    try:
        said = "session " if fits else "no session: the idle agent takes"
        async with asyncio.timeout(PATIENCE_SECONDS):
            while said not in errors.read_text():
                await asyncio.sleep(0.1)
        url = errors.read_text().split("metrics at ")[1].split("/metrics")[0]
        status, text = await asyncio.to_thread(_get, f"{url}/readyz")
        if fits:
            assert status == 200
        else:
            assert status == 503
            assert "the limit of 600 MiB leaves 10 MiB beside the budget of 590 MiB" in text
            assert "or lower the budget" in text
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), PATIENCE_SECONDS)


@pytest.mark.real
def test_an_agent_that_has_no_room_to_begin_says_so(group: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal_agent", "--name", "pi-4", "--budget", "16Mi"]
    command += ["--coordinator", "unix:/nowhere/s", "--cache", str(tmp_path / "cache")]
    path = os.pathsep.join(str(SOURCES / each) for each in ("agent", "protos"))
    joins = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]
    for size in (32 << 20, 44 << 20):
        limit(group, size)
        ended = subprocess.run(
            joins,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert ended.returncode == 2, "the kernel has not ended it"
        told = f"the limit of this control group is {size >> 20} MiB: raise it"
        assert told in ended.stderr


@pytest.mark.real
async def test_a_limit_that_changes_is_followed_by_the_budget(
    coordinator: ScriptedCoordinator, folder: Path, group: Path
) -> None:
    blocks = InBlocks(16)
    made = write_fragment(coordinator.store, dense_model([1024] * 17), 70 << 20, blocks)
    command = [sys.executable, "-m", "shoal_agent", "--name", "pi-4", "--budget", "96Mi"]
    command += ["--speed", os.devnull]
    command += ["--coordinator", f"unix:{folder}/c.sock", "--cache", str(folder / "cache")]
    command += ["--threads", "1", "--log-level", "info"]
    errors = folder / "agent.err"
    sources = (str(SOURCES / each) for each in ("agent", "protos"))
    path = os.pathsep.join((str(with_a_library(folder / "large", 200 << 20)), *sources))
    joins = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]
    with errors.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *joins, stderr=file, env=os.environ | {"PYTHONPATH": path}
        )

    async def says(words: str) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while words not in errors.read_text():
                await asyncio.sleep(0.1)

    try:
        device = await coordinator.device()
        # The kubelet lowers no limit below what is charged, libraries' files included.
        assert charged(group) <= device.hello.floor_bytes + (96 << 20)
        assert (await device.load(made.digest, made.resident_bytes)).HasField("loaded")
        output = (await run(device, made, 0))[1]
        for item, budget in enumerate((32 << 20, 10 << 20), 1):
            limit(group, device.hello.floor_bytes + budget)
            await says(f"the budget is {budget >> 20} MiB now")
            await says(f"runs within {budget >> 20} MiB now")
            reply, again = await run(device, made, item)
            assert np.array_equal(again, output)
            assert reply.WhichOneof("outcome") == "executed", reply
            assert reply.executed.peak_bytes <= budget
            # It was granted all that there is: the kernel may not read ahead.
            flags = advised(folder, process.pid)
            assert flags
            assert all("rr" in each for each in flags)
        limit(group, LIMIT)
        await says("the budget is 96 MiB now")
        await says("runs within 70 MiB now")
        assert np.array_equal((await run(device, made, 3))[1], output)
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), PATIENCE_SECONDS)


@pytest.mark.real
async def test_it_is_counted_how_often_a_process_was_at_the_limit_of_its_group(
    folder: Path, group: Path
) -> None:
    file = folder / "file"
    file.write_bytes(bytes(96 << 20))
    os.sync()
    reads = (
        "from shoal_agent.telemetry.machine import Machine\n"
        "found = Machine()\n"
        "before = found.memory_limit_hits()\n"
        f"with open({str(file)!r}, 'rb') as file:\n"
        "    while file.read(1 << 16): pass\n"
        "print(before, found.memory_limit_hits())\n"
    )
    joins = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    path = os.pathsep.join(str(SOURCES / each) for each in ("agent", "protos"))

    async def counted() -> list[int]:
        with file.open("rb") as cached:  # so that its pages are those of who reads it
            os.posix_fadvise(cached.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        process = await asyncio.create_subprocess_exec(
            *(*joins, sys.executable, "-c", reads),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        )
        said, _ = await process.communicate()
        return [int(each) for each in said.split()]

    before, after = await counted()
    assert after == before, "there was room"
    limit(group, 64 << 20)
    before, after = await counted()
    assert after > before


def test_a_group_of_either_version_says_what_it_allows_and_how_often_that_was_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    events = "low 5\nhigh 6\nmax 7\noom 1\noom_kill 1\n"
    versions = (
        ("memory.max", "memory.current", "memory.events", events, 13),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.failcnt", "7\n", 7),
    )
    for allowed, usage, hits, text, number in versions:
        for name, content in ((allowed, "4096\n"), (usage, "512\n"), (hits, text)):
            (tmp_path / name).write_text(content)
        found = Machine()
        assert found.memory_limit_bytes() == 4096
        assert found.memory_charged_bytes() == 512
        assert found.memory_limit_hits() == number
        (tmp_path / hits).unlink()
        assert found.memory_limit_hits() == 0
        (tmp_path / allowed).unlink()


@pytest.mark.parametrize(
    ("most", "slow_from", "limit"),
    [("max", "268435456", 256 << 20), ("4096", "8192", 4096), ("4096", "max", 4096)],
)
def test_what_a_group_slows_its_processes_down_at_is_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str, slow_from: str, limit: int
) -> None:
    """As `MemoryHigh=` of a unit of systemd says it."""
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    (tmp_path / "memory.max").write_text(f"{most}\n")
    (tmp_path / "memory.high").write_text(f"{slow_from}\n")
    found = Machine()
    assert found.memory_limit_bytes() == limit
    assert found.memory_bytes == min(limit, found.physical_bytes)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_fragments_do_without_while_memory_is_short_and_get_it_back(
    coordinator: ScriptedCoordinator, folder: Path
) -> None:
    made = write_fragment(coordinator.store, dense_model([1024] * 17), 70 << 20, InBlocks(16))
    pressure = folder / "pressure"
    pressure.write_text("some avg10=33.00 avg60=9.00 avg300=2.00 total=1\n")
    memory = folder / "meminfo"
    memory.write_text("MemTotal: 1000000 kB\nMemAvailable: 100000 kB\n")
    command = [sys.executable, "-m", "shoal_agent", "--name", "pi-4", "--budget", "96Mi"]
    command += ["--speed", os.devnull]
    command += ["--coordinator", f"unix:{folder}/c.sock", "--cache", str(folder / "cache")]
    command += ["--threads", "1", "--log-level", "info"]
    errors = folder / "agent.err"
    path = os.pathsep.join(str(SOURCES / each) for each in ("agent", "protos"))
    mounts = f"mount --bind {pressure} /proc/pressure/memory"
    mounts += f' && mount --bind {memory} /proc/meminfo && exec "$@"'
    trying = ["unshare", "--mount", "sh", "-c", mounts, "sh", "true"]
    if subprocess.run(trying, check=False).returncode:
        pytest.skip("no mount can be made here: not root, or a kernel without PSI")
    with errors.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *("unshare", "--mount", "sh", "-c", mounts, "sh", *command),
            stderr=file,
            env=os.environ | {"PYTHONPATH": path},
        )

    async def says(words: str) -> None:
        async with asyncio.timeout(3 * PATIENCE_SECONDS):
            while words not in errors.read_text():
                await asyncio.sleep(0.1)

    try:
        await says("session ")
        device = await coordinator.device()
        assert (await device.load(made.digest, made.resident_bytes)).HasField("loaded")
        output = (await run(device, made, 0))[1]
        await says("runs within 48 MiB now")
        reply, again = await run(device, made, 1)
        assert np.array_equal(again, output)
        assert reply.WhichOneof("outcome") == "executed", reply
        assert reply.executed.peak_bytes <= 48 << 20
        pressure.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=2\n")
        await says("runs within 51 MiB now")
        assert np.array_equal((await run(device, made, 2))[1], output)
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), PATIENCE_SECONDS)


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - http on loopback
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as answer:
        with answer:
            return answer.code, answer.read().decode()


@pytest.mark.parametrize(
    ("address", "dialled"),
    [
        ("10.0.0.7", "10.0.0.7:7401"),
        ("10.0.0.7:0", "10.0.0.7:7401"),
        ("10.0.0.7:7777", "10.0.0.7:7777"),
        ("pi-4.local", "pi-4.local:7401"),
        ("fd00::7", "[fd00::7]:7401"),
        ("[fd00::7]", "[fd00::7]:7401"),
        ("[fd00::7]:7777", "[fd00::7]:7777"),
        ("unix:/run/a.sock", "unix:/run/a.sock"),
    ],
)
def test_peers_are_told_an_address_with_a_port(address: str, dialled: str) -> None:
    assert advertised(address, 7401) == dialled
