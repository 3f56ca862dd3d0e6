"""The generated code is what the .proto files give."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_generated_code_of_the_protocol_is_current() -> None:
    command = [sys.executable, str(ROOT / "hack" / "protos.py"), "--check"]
    check = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert check.returncode == 0, check.stderr
