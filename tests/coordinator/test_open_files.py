"""Sockets of a coordinator, where each process may have few open unless it asks for more."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

DEVICES = 40


@pytest.mark.real
def test_a_coordinator_serves_more_devices_than_a_process_has_files_open_by_default(
    tmp_path: Path,
) -> None:
    socket = tmp_path / "c"
    command = (
        *("sh", "-c", 'ulimit -S -n 64 && exec "$@"', "sh"),
        *(sys.executable, "-m", "shoal_coordinator"),
        *("--listen", f"unix:{socket}", "--store", str(tmp_path / "store"), "--exit-with-parent"),
    )
    with subprocess.Popen(command, cwd=tmp_path) as coordinator:
        try:
            give_up = time.monotonic() + 60
            while not socket.exists():
                assert coordinator.poll() is None
                assert time.monotonic() < give_up
                time.sleep(0.01)
            limits = Path(f"/proc/{coordinator.pid}/limits").read_text().splitlines()
        finally:
            coordinator.kill()
    (allowed,) = (line.split()[3] for line in limits if line.startswith("Max open files"))
    assert allowed == "unlimited" or int(allowed) >= 4 * DEVICES
