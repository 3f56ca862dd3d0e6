"""An agent that may not have the threads that it takes does not begin, and says why."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agent.conftest import environment

ROOTS = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group for 20 threads."""
    for root in ROOTS:
        folder = root / f"shoal-threads-{os.getpid()}"
        with suppress(OSError):
            folder.mkdir()
            try:
                (folder / "pids.max").write_text("20")
                yield folder
                return
            finally:
                folder.rmdir()
    pytest.skip("no control group for processes can be made here: not root, or no controller")


@pytest.mark.real
def test_an_agent_that_may_have_too_few_threads_says_what_it_takes_and_has(
    tmp_path: Path, group: Path
) -> None:
    script = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    ended = subprocess.run(
        [
            *("sh", "-c", script, "sh", sys.executable, "-OO", "-m", "shoal_agent", "--insecure"),
            *("--coordinator", "127.0.0.1:1", "--name", "pi-4", "--budget", "24Mi"),
            *("--threads", "2", "--cache", str(tmp_path / "cache"), "--speed", os.devnull),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr == (
        "shoal agent: an agent takes up to 34 threads here, this process may start 18: raise its "
        "limit of processes (pids.max of its control group, TasksMax, ulimit -u)\n"
    )
