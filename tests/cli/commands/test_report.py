"""`shoal report`: the page of a run that is over, from its report or its work folder."""

import sys
from pathlib import Path

import pytest

from cli.page.recorded import troubled
from shoal_cli.commands.app import run_app
from shoal_cli.local.report import write_report


def test_the_page_is_written_beside_the_report_or_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(troubled(), tmp_path / "report.json")
    assert run_app(["report", str(tmp_path)]) == 0
    beside = tmp_path / "report.html"
    assert str(beside) in capsys.readouterr().err
    elsewhere = tmp_path / "pages" / "run.html"
    assert run_app(["report", str(tmp_path / "report.json"), "--html", str(elsewhere)]) == 0
    assert elsewhere.read_bytes() == beside.read_bytes()
    assert "device pi-zero killed by SIGKILL" in beside.read_text()


@pytest.mark.parametrize("arguments", [("report", "report.json"), ("run", "model.onnx", "--html")])
def test_without_what_draws_nothing_begins_and_the_extra_is_named(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "vl_convert", None)  # as if it were not installed
    write_report(troubled(), tmp_path / "report.json")
    (tmp_path / "model.onnx").touch()
    page = ["page.html", "--inputs", "in", "--outputs", "out"] if arguments[0] == "run" else []
    assert run_app([*arguments, *page]) == 2
    shown = capsys.readouterr().err
    assert "nothing can be drawn" in shown
    assert "pip install 'shoal[page]'" in shown
