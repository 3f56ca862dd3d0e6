"""The command where its streams are closed or full, or it is interrupted before it has begun."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from shoal_cli import main

SHOAL = f"{sys.executable} -m shoal_cli"


@pytest.fixture(autouse=True)
def _without_threads_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test before has used obstore, the command would end this process at once."""
    monkeypatch.delitem(sys.modules, "obstore", raising=False)


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, check=False)  # noqa: S602 - redirections


def test_an_output_that_is_full_is_said_in_a_line() -> None:
    ran = shell(f"{SHOAL} version >/dev/full")
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == [
        "shoal: nothing more can be written",
        "  No space left on device: where the output goes, or on a disk",
    ]


def test_what_is_printed_goes_nowhere_where_the_output_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "argv", ["shoal", "version"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    with sys.stdout as opened:
        assert opened.writable()


def test_where_standard_input_is_closed_it_has_no_manifest() -> None:
    ran = shell(f"{SHOAL} run - <&-")
    assert ran.returncode == 2
    assert "-: has no object of shoal.dev" in ran.stderr
    assert "Traceback" not in ran.stderr


class Interrupting:
    """Interrupts the import of the command's modules, as Ctrl-C does in its first moment."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "shoal_cli.commands.app":
            raise KeyboardInterrupt
        return None


def test_an_interrupt_while_it_starts_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shoal_cli.commands.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
