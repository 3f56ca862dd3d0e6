"""`shoal report`: the page of a run that is over, from its report or its work folder."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
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


def test_the_page_goes_into_a_pipe_and_through_a_link(tmp_path: Path) -> None:
    write_report(troubled(), tmp_path / "report.json")
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    assert run_app(["report", str(tmp_path), "--html", str(tmp_path / "link.html")]) == 0
    assert (tmp_path / "link.html").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as beside:
        read = beside.submit((tmp_path / "pipe").read_bytes)
        try:
            assert run_app(["report", str(tmp_path), "--html", str(tmp_path / "pipe")]) == 0
        finally:  # else a reader would wait for ever
            os.close(os.open(tmp_path / "pipe", os.O_RDWR))
    assert read.result() == (tmp_path / "page.html").read_bytes()


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("jobs", 0, "cut", "edges", 0, "consumer"), 77, "jobs.0.cut.edges.0: one of its ends is"),
        (("timelines", 0, "column_seconds"), 0, "timelines.0.column_seconds: is no length of time"),
        (("timelines", 0, "begun_seconds"), float("inf"), "has values that no run has (cannot"),
        (("seconds",), 1e308, "has values that no run has (cannot convert float infinity"),
        (("seconds",), "long", "is no report: seconds: Input should be a valid number"),
        (("jobs", 0, "cut", "fragments"), [], "jobs.0.cut.edges.0: one of its ends is no fragment"),
    ],
)
def test_a_report_that_was_edited_is_refused_in_a_line(
    where: tuple[str | int, ...],
    value: object,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "report.json"
    write_report(troubled(), path)
    document = json.loads(path.read_bytes())
    inside = document
    for step in where[:-1]:
        inside = inside[step]
    inside[where[-1]] = value
    path.write_text(json.dumps(document))
    assert run_app(["report", str(path)]) == 2
    title, *lines = capsys.readouterr().err.splitlines()
    assert title == "shoal: report refused"
    assert len(lines) == 1
    assert said in lines[0]


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
