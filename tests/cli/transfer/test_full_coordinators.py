"""A command that finds no room on a coordinator's volume says so, with a status of its own."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from made_models import deep

WITHOUT_ROOM = 4


@pytest.fixture
def target() -> Iterator[str]:
    """A coordinator whose store may take 2 MiB."""
    with tempfile.TemporaryDirectory() as folder:  # a socket's path has 108 bytes at most
        address = f"unix:{folder}/c"
        command = [sys.executable, "-m", "shoal_coordinator", "--listen", address]
        options = ["--store", f"{folder}/store", "--store-size", "2Mi", "--exit-with-parent"]
        process = subprocess.Popen([*command, *options])
        try:
            yield address
        finally:
            process.kill()
            process.wait()


def test_fragments_without_room_end_the_command_with_a_status_of_its_own(
    target: str, tmp_path: Path
) -> None:
    model = deep(4).save(tmp_path)
    command = [sys.executable, "-c", "import shoal_cli; shoal_cli.main()", "partition", str(model)]
    options = ["--fragments", "1", "--to", target]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == WITHOUT_ROOM, done.stderr
    assert "shoal: no room there" in done.stderr
    assert "would need 4 MiB" in done.stderr
    assert "of 1.7 MiB are free on the coordinator's volume" in done.stderr
    assert "Traceback" not in done.stderr
