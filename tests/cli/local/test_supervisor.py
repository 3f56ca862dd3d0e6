"""The supervisor with real processes."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from shoal_cli.local import supervisor as module
from shoal_cli.local.supervisor import (
    Death,
    ProcessHopeless,
    ProcessSpec,
    Supervisor,
    child_environment,
)
from shoal_coordinator.dispatch.limits import Limits
from small_disk import small_disk

STUBBORN = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "open({ready!r}, 'w').close()\n"
    "time.sleep(600)\n"
)

KILLED = """
import asyncio, os, pathlib, signal, sys
from shoal_cli.local.supervisor import ProcessSpec, Supervisor

async def main():
    supervisor = Supervisor(lambda death: None)
    command, log = tuple(sys.argv[2:]), pathlib.Path(sys.argv[1])
    await supervisor.start(ProcessSpec(name="c", title="c", command=command, log=log))
    print(supervisor.process_id("c"), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
"""Starts a child and is killed at once."""

ADOPTING = """
import ctypes, os, signal, subprocess, sys, time

PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
child = int(subprocess.run(sys.argv[1:], stdout=subprocess.PIPE).stdout)
until = time.monotonic() + 60
while time.monotonic() < until:
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        print("ended", os.waitstatus_to_exitcode(status))
        sys.exit()
    time.sleep(0.01)
os.kill(child, signal.SIGKILL)
print("lives")
"""
"""Runs a process, and takes the child that it leaves behind, as systemd and some shells do."""


def spec(name: str, folder: Path, *code: str) -> ProcessSpec:
    command = (sys.executable, "-c", *code)
    return ProcessSpec(
        name=name, title=f"device {name}", command=command, log=folder / f"{name}.log"
    )


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


def is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_killed_child_is_started_again_and_counted(tmp_path: Path) -> None:
    deaths: list[Death] = []
    supervisor = Supervisor(deaths.append)
    await supervisor.start(spec("agent", tmp_path, "import time; time.sleep(600)"))
    first = supervisor.process_id("agent")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: supervisor.process_id("agent") not in (None, first))
    assert [death.cause for death in deaths] == ["killed by SIGKILL"]
    assert supervisor.restarts("agent") == 1
    second = supervisor.process_id("agent")
    assert second is not None
    await supervisor.stop()
    assert is_gone(second)
    assert supervisor.restarts("agent") == 1


@pytest.mark.parametrize(
    "program",
    ["shoal_coordinator --store {0}/store --listen", "shoal_agent --budget 8Mi --coordinator"],
)
async def test_a_child_ends_also_where_the_runner_is_killed_while_the_child_starts(
    tmp_path: Path, program: str
) -> None:
    """Its parent is then whoever takes orphans, and not always the process 1."""
    command = [*program.format(tmp_path).split(), f"unix:{tmp_path}/s", "--exit-with-parent"]
    adopting = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ADOPTING, sys.executable, "-c", KILLED, tmp_path / "log"),
        *(sys.executable, "-m", *command),
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await asyncio.wait_for(adopting.communicate(), 120)
    assert told.decode().split() == ["ended", "1"]
    assert "the process that started this one has ended already" in (tmp_path / "log").read_text()


async def test_a_child_that_ignores_term_is_killed_after_the_grace(tmp_path: Path) -> None:
    supervisor = Supervisor(lambda death: None)
    ready = tmp_path / "ready"
    await supervisor.start(spec("stubborn", tmp_path, STUBBORN.format(ready=str(ready))))
    await until(ready.exists)
    process = supervisor.process_id("stubborn")
    assert process is not None
    await supervisor.stop(grace_seconds=0.1)
    assert is_gone(process)


async def test_grandchildren_go_with_the_child(tmp_path: Path) -> None:
    supervisor = Supervisor(lambda death: None)
    note = tmp_path / "grandchild"
    code = (
        "import subprocess, sys, pathlib, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"part = pathlib.Path({str(note)!r} + '.part')\n"
        f"part.write_text(str(child.pid)); part.rename({str(note)!r})\n"
        "time.sleep(600)\n"
    )
    await supervisor.start(spec("parent", tmp_path, code))
    await until(note.exists)
    await supervisor.stop()
    grandchild = int(note.read_text())
    await until(lambda: is_gone(grandchild))
    assert is_gone(grandchild)


async def test_a_child_that_never_works_is_given_up_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_SECONDS", 0.001)
    monkeypatch.setattr(module, "HOPELESS_DEATHS", 3)
    supervisor = Supervisor(lambda death: None)
    await supervisor.start(spec("broken", tmp_path, "raise SystemExit('no such bus')"))
    with pytest.raises(ProcessHopeless) as hopeless:
        await asyncio.wait_for(supervisor.wait_for_failure(), 20)
    await supervisor.stop()
    assert str(hopeless.value).splitlines() == [
        "device broken ended 3 times in a row within 10 s of its start, last: exited with status "
        f"1; see {tmp_path}/broken.log, which ends so:",
        *["no such bus"] * 3,
        "Results that were written are kept; the next run continues with what is missing.",
    ]


async def test_a_child_that_is_killed_again_and_again_hints_at_its_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_SECONDS", 0.001)
    monkeypatch.setattr(module, "HOPELESS_DEATHS", 2)
    supervisor = Supervisor(lambda death: None)
    await supervisor.start(spec("pi-4", tmp_path, "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(ProcessHopeless, match=r"killed by SIGKILL(.|\n)*raise the budget"):
        await asyncio.wait_for(supervisor.wait_for_failure(), 20)
    await supervisor.stop()


async def test_the_hint_at_the_limit_says_that_the_work_folder_counts_where_it_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HOPELESS_DEATHS", 1)
    with small_disk(tmp_path / "memory", "64k"):
        supervisor = Supervisor(lambda death: None)
        killed = spec("pi-4", tmp_path / "memory", "import os; os.kill(os.getpid(), 9)")
        await supervisor.start(killed)
        with pytest.raises(ProcessHopeless, match="Files on a tmpfs count towards that limit"):
            await asyncio.wait_for(supervisor.wait_for_failure(), 20)
        await supervisor.stop()


async def test_a_child_that_was_stable_in_between_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_SECONDS", 0.001)
    monkeypatch.setattr(module, "STABLE_SECONDS", 0.0)
    monkeypatch.setattr(module, "HOPELESS_DEATHS", 2)
    deaths: list[Death] = []
    supervisor = Supervisor(deaths.append)
    await supervisor.start(spec("flaky", tmp_path, "pass"))
    await until(lambda: len(deaths) >= 4)
    await supervisor.stop()
    assert [death.restarts for death in deaths[:4]] == [0, 1, 2, 3]


async def test_stopping_while_a_child_waits_to_be_started_again_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_SECONDS", 600.0)
    died = asyncio.Event()
    supervisor = Supervisor(lambda death: died.set())
    await supervisor.start(spec("short", tmp_path, "pass"))
    stops: Awaitable[object] = asyncio.wait_for(died.wait(), 20)
    await stops
    await supervisor.stop()
    assert supervisor.process_id("short") is None


async def test_a_child_inherits_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("AWS_SECRET_ACCESS_KEY", "HTTP_BEARER_TOKEN", "OCI_PASSWORD", "HTTPS_PROXY")
    for name in (*secrets, "LC_TIME", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "C")
    supervisor = Supervisor(lambda death: None)
    agent = spec("agent", tmp_path, "import os; print(*os.environ, 'end', sep='\\n', flush=True)")
    await supervisor.start(agent)
    await until(lambda: agent.log.exists() and "end" in agent.log.read_text().split())
    await supervisor.stop()
    inherited = set(agent.log.read_text().split())
    assert inherited >= {"PATH", "LC_TIME", "OMP_NUM_THREADS"}
    assert not inherited & set(secrets)


def test_a_child_starts_no_threads_for_linear_algebra_unless_somebody_asks_for_them() -> None:
    assert child_environment({"SECRET": "x"}) == {"OPENBLAS_NUM_THREADS": "1"}
    assert child_environment({"OPENBLAS_NUM_THREADS": "2"}) == {"OPENBLAS_NUM_THREADS": "2"}


async def test_a_child_that_work_ends_is_given_up_when_so_much_of_it_was_left_out_that_none_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_SECONDS", 0.001)
    monkeypatch.setattr(module, "HOPELESS_DEATHS", 2)
    deaths: list[Death] = []

    def on_death(death: Death) -> None:
        deaths.append(death)
        if death.restarts in (2, 5):
            supervisor.progressed()  # an item was left out, or done by another

    supervisor = Supervisor(on_death)
    supervisor.bear(2)
    await supervisor.start(spec("pi-4", tmp_path, "pass"))
    with pytest.raises(ProcessHopeless, match="ended 4 times in a row"):
        await asyncio.wait_for(supervisor.wait_for_failure(), 20)
    await supervisor.stop()
    assert len(deaths) == 3 + 3 + 3


def test_the_coordinator_leaves_an_item_out_before_its_agents_are_given_up() -> None:
    assert Limits().kills < module.HOPELESS_DEATHS
