"""Text of others is shown on terminals and in logs, and does nothing there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal_protocol.visible import visible, visible_line

NAME = "\x1b]0;mine\x07"


def test_all_that_a_terminal_takes_for_a_command_is_written_out() -> None:
    controls = [chr(code) for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"]
    for each in (*controls, "\u202e", "\u2066", "\u200f", "\u2028", "\udce9"):
        assert visible(f"a{each}b").isascii(), hex(ord(each))
        assert "\\" in visible(f"a{each}b")
    assert visible("a\tb\nänderung 模型 é") == "a\tb\nänderung 模型 é"
    assert visible_line("a\nb\tc") == r"a\nb\tc"


@pytest.mark.parametrize(
    "command",
    [
        ("shoal_cli", "join", f"{NAME}.txt"),
        ("shoal_cli", "agent", f"{NAME}.txt"),
        ("shoal_coordinator", "--listen", NAME, "--store", "store"),
        ("shoal_coordinator", "--listen", "unix:/none/c", "--store", "store", NAME),
    ],
    ids=["join", "agent", "coordinator", "no such option"],
)
def test_a_refused_command_line_does_nothing_to_the_terminal(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    """Names of files come into it by the patterns of a shell."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 2
    assert "mine" in done.stderr
    assert "\x1b" not in done.stderr


def test_a_record_of_a_log_is_one_line_whatever_is_in_it() -> None:
    program = """
import logging
from shoal_protocol.arguments import set_up_logs
set_up_logs("info")
log = logging.getLogger("shoal")
log.info("%s failed: %s", "item 3", "no\\nFRI ERROR shoal: all is lost\\x1b[2J")
try:
    raise ValueError("inside")
except ValueError:
    log.exception("a fault")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    first, second, *traceback = done.stderr.splitlines()
    assert first.endswith(r"INFO shoal: item 3 failed: no\nFRI ERROR shoal: all is lost\x1b[2J")
    assert second.endswith("ERROR shoal: a fault")
    assert traceback[-1] == "ValueError: inside"
