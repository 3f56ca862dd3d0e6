"""Real agents, as processes, joined to a scripted coordinator over a Unix socket."""

import asyncio
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.control_groups import control_group
from agent.forking import ForkedProcess, ForkServer
from agent.in_process import Thread, make_fragments
from agent.scripted_coordinator import PATIENCE_SECONDS, ConnectedDevice, ScriptedCoordinator
from shoal_agent.runtime.fragments import Fragments

SOURCES = Path(__file__).parents[2]
MARK_ERROR_BYTES = 256 << 10
"""The kernel's highest mark may be so much too high, on two processors (`process_memory`)."""
_MARKS = ("--relayed", "--measured")
"""Of a test's wishes, those that are no options of the agent."""


@dataclass
class AgentProcess:
    """A running agent; `errors` collects its stderr."""

    process: asyncio.subprocess.Process | ForkedProcess
    cache: Path
    address: str
    errors: Path

    def status(self, field: str) -> int:
        """A field of /proc/PID/status, in bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith(f"{field}:"))
        return int(line.split()[1]) << 10

    def without_libraries(self) -> int:
        """Resident bytes but for clean pages of libraries, which come and go as they are used."""

        def counted(access: str, path: str) -> str:
            library = access.startswith("r-") and path[0] == "/" and "/fragments/" not in path
            return "Anonymous:" if library else "Rss:"

        return self._counted(counted)

    def mapped_bytes(self) -> int:
        """Resident bytes of what is mapped of fragments."""
        return self._counted(lambda _, path: "Rss:" if "/fragments/" in path else "none")

    def _counted(self, field_of: Callable[[str, str], str]) -> int:
        """Bytes of all mappings: for each, the field that its access and path call for."""
        size, counted = 0, ""
        for line in Path(f"/proc/{self.process.pid}/smaps").read_text().splitlines():
            if not line[0].isupper():  # the next mapping, and not one of its fields
                _, access, *_, path = line.split(maxsplit=5)
                counted = field_of(access, path)
            elif line.startswith(counted):
                size += int(line.split()[1]) << 10
        return size

    def mapped(self) -> set[str]:
        """Fragments whose weights are mapped in the process."""
        text = Path(f"/proc/{self.process.pid}/maps").read_text()
        return {
            f"sha256:{digest}"
            for digest in re.findall(r"/fragments/(\w+)/.*weights\.bin$", text, re.MULTILINE)
        }

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), PATIENCE_SECONDS)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


StartAgent = Callable[..., Awaitable[AgentProcess]]


def environment() -> dict[str, str]:
    """An agent's: it finds nothing of the other parts."""
    path = os.pathsep.join(str(SOURCES / each) for each in ("agent", "protos"))
    return {**os.environ, "PYTHONPATH": path}


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """What the agents of tests with the mark `forked` are forked from."""
    server = ForkServer(environment())
    yield server
    server.stop()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose name is short enough for Unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="shoal-"))
    yield path
    if not os.environ.get("KEEP"):
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group whose memory is limited."""
    with control_group() as made:
        yield made


@pytest.fixture
async def processor() -> AsyncIterator[Thread]:
    with Thread(1, "processor") as thread:
        yield thread


@pytest.fixture
def make(tmp_path: Path, processor: Thread) -> Callable[..., Fragments]:
    """Fragments over a cache that holds what the test wrote to its folder."""
    return partial(make_fragments, tmp_path, processor)


@pytest.fixture
def store(folder: Path) -> Path:
    """The coordinator's fragments; a module whose tests only read them may keep one for all."""
    return folder / "store"


@pytest.fixture
async def coordinator(folder: Path, store: Path) -> AsyncIterator[ScriptedCoordinator]:
    coordinator = ScriptedCoordinator(store)
    await coordinator.start(f"unix:{folder}/c.sock")
    yield coordinator
    await coordinator.stop()


@pytest.fixture
async def start_agent(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[StartAgent]:
    """Starts agents by name; all of them end with the test."""
    agents: list[AgentProcess] = []

    async def start(
        name: str = "pi-4",
        *arguments: str,
        budget: str = "64Mi",
        file_limit_bytes: int | None = None,
    ) -> AgentProcess:
        address = f"unix:{folder}/{name}.sock"
        errors = folder / f"{name}.err"
        command = ["--name", name, "--budget", budget]
        command += ["--cache", str(folder / f"cache-{name}"), "--threads", "1"]
        command += ["--log-level", "info", "--exit-with-parent"]
        if "--speed" not in arguments and "--measured" not in arguments:
            command += ["--speed", os.devnull]  # to measure takes a second
        if "--coordinator" not in arguments:
            command += ["--coordinator", f"unix:{folder}/c.sock"]
        if "--listen" not in arguments and "--relayed" not in arguments:
            command += ["--listen", address]
        command += [argument for argument in arguments if argument not in _MARKS]
        process: asyncio.subprocess.Process | ForkedProcess
        if request.node.get_closest_marker("forked"):
            server: ForkServer = request.getfixturevalue("fork_server")
            process = server.start(command, errors, environment())
        else:
            with errors.open("ab") as file:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-OO", "-m", "shoal_agent"),
                    *command,
                    stderr=file,
                    env=environment(),
                )
        if file_limit_bytes is not None:
            # The nearest thing to a full disk that needs no mount: writes past this fail.
            limits = (file_limit_bytes, file_limit_bytes)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)
        agent = AgentProcess(process, folder / f"cache-{name}", address, errors)
        agents.append(agent)
        return agent

    yield start
    for agent in agents:
        await agent.kill()


@dataclass
class Joined:
    """An agent's process, and its session."""

    agent: AgentProcess
    device: ConnectedDevice


@pytest.fixture
async def join(
    coordinator: ScriptedCoordinator, start_agent: StartAgent
) -> Callable[..., Awaitable[Joined]]:
    """Starts an agent and waits for its session."""

    async def join(name: str = "pi-4", *arguments: str, **options: Any) -> Joined:
        agent = await start_agent(name, *arguments, **options)
        joining = asyncio.create_task(coordinator.device())
        ending = asyncio.create_task(agent.process.wait())
        await asyncio.wait((joining, ending), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not joining.done():
            joining.cancel()
            pytest.fail(agent.errors.read_text())
        return Joined(agent, joining.result())

    return join
