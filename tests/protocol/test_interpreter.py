"""Processes of this program that begin wherever a user is."""

import subprocess
from pathlib import Path

import pytest

from shoal_protocol.interpreter import module_command


@pytest.mark.real
@pytest.mark.parametrize("module", ["shoal_agent", "shoal_coordinator", "shoal_cli"])
def test_a_process_imports_nothing_from_the_folder_in_which_it_begins(
    module: str, tmp_path: Path
) -> None:
    for name in ("random", "queue", "grpc"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')\n")
    command = [*module_command(module), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
