"""An active run, seen from other processes."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.local.test_running import until
from cli.local.workbench import Workbench, command, save_inputs

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]


@pytest.fixture
def work(bench: Workbench) -> Iterator[Path]:
    """The work folder of a run that has its first result, and is far from its end: each item takes
    its links two seconds, so it leaves the processors to those who look at it."""
    save_inputs(bench.inputs, files=6, stacked=25, rows=2048)
    slow = "link: {rate: 8M}, memory:"
    bench.manifest.write_text(bench.manifest.read_text().replace("memory:", slow, 3))
    work = bench.folder / "work"
    process = bench.start("run", bench.manifest, "--progress", "plain", "--work", work)
    until(lambda: list(bench.outputs.glob("*.npz")), process)
    yield work
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


def look(*arguments: str | Path) -> str:
    ran = command(*arguments)
    assert ran.status == 0, ran.err
    return ran.out


def seen(*arguments: str | Path) -> Any:
    return json.loads(look(*arguments, "--output", "json"))


def test_a_run_is_watched_described_and_explained_while_it_is_active(
    bench: Workbench, work: Path
) -> None:
    here = ("--work", work)
    view = seen("top", *here, "--interval", "0.1")
    assert {device["name"] for device in view["devices"]} == {"one", "two", "three"}
    assert all(device["budget_bytes"] == 32 << 20 for device in view["devices"])
    (job,) = view["jobs"]
    assert (job["name"], job["state"]) == ("job", "Running")
    assert job["succeeded"] > 0
    assert {held["name"] for each in view["devices"] for held in each["fragments"]} >= {
        f"job/{stage['index']}" for stage in job["stages"] if stage["devices"]
    }
    assert "3 of 3 devices" in " ".join(look("top", *here).split())
    assert look("describe", "one", *here).startswith("one\nstate")
    reasons = seen("why", "job", *here)
    assert reasons["headline"].startswith("job ")
    assert all(item["seconds"] > 0 for item in reasons["items"])
    assert reasons["items"]
    assert " on one" in reasons["plan"][0]
    logs = bench.run("logs", "coordinator", *here, "--tail", "1000").out
    assert "device one joined as session" in logs

    status, drawn = watch_on_a_terminal(bench, work)
    assert status == 0, drawn[-1000:]
    assert "3 of 3 devices ready" in drawn
    assert drawn.endswith("\x1b[?25h\x1b[?1049l")  # the terminal is as it was

    status, drawn = watch_on_a_terminal(bench, work, "dumb", interrupt=False)
    assert status == 0
    assert "3 of 3 devices ready" in " ".join(drawn.split())
    assert "…" not in drawn
    assert "\x1b" not in drawn


def watch_on_a_terminal(
    bench: Workbench, work: Path, terminal: str = "xterm", *, interrupt: bool = True
) -> tuple[int, str]:
    """`shoal top` until it has drawn something, and Control-C then: its status, and all it drew."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal_cli", "top", "--work", work],
        stdin=its,
        stdout=its,
        stderr=its,
        env={**os.environ, **bench.environment, "TERM": terminal},
    )
    os.close(its)
    drawn = b""
    while b"devices ready" not in drawn:
        drawn += os.read(ours, 65536)
    if interrupt:
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # nobody has the other end any more
        while piece := os.read(ours, 65536):
            drawn += piece
    os.close(ours)
    return process.wait(timeout=30), drawn.decode(errors="replace")


def test_what_is_not_there_is_said_with_what_is(tmp_path: Path) -> None:
    gone = command("top", "--work", tmp_path / "nowhere")
    assert gone.status == 2
    assert gone.err == (
        f"shoal: no coordinator\n  no active run has the work folder {tmp_path}/nowhere\n"
    )
    away = command("why", "job", "--coordinator", f"unix:{tmp_path}/none")
    assert away.status == 1
    assert away.err.startswith(f"shoal: coordinator not reached\n  unix:{tmp_path}/none: ")
    nothing = command("logs", "--work", tmp_path / "nowhere")
    assert nothing.status == 2
    assert nothing.err.startswith("shoal: no logs\n  ")
