"""`shoal report`: the page of a run that is over, from its report or its work folder."""

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import NoReturn

import pytest

from cli.page.recorded import troubled
from shoal_cli.commands.app import run_app
from shoal_cli.local.report import ReportRefused, RunReport, read_report, write_report
from shoal_cli.page.document import document


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
        (("timelines", 0, "begun_seconds"), float("inf"), "begun_seconds: is no number that a run"),
        (("timelines", 0, "devices", 0, "memory_bytes", 0), 10**400, "memory_bytes.0: is no num"),
        (("seconds",), 1e308, "seconds: is no number that a run has"),
        (("seconds",), float("nan"), "seconds: is no number that a run has"),
        (("jobs", 0, "cut", "edges", 1, "consumer"), 0, "jobs.0.cut.edges.1: it does not lead"),
        (("jobs", 0, "cut", "edges", 0, "bytes_per_item"), -5000, "bytes_per_item: is no size"),
        (("jobs", 0, "cut", "fragments", 0, "index"), 1, "cut.fragments: are not numbered"),
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


def edits(value: object) -> Iterator[object]:
    """Other values of the same kind."""
    match value:
        case bool() | None:
            pass
        case int() | float():
            yield from (0, 1, 77, -5000, 10**18, 10**400, 1e308, math.inf, math.nan)
        case list():
            yield from ([], value[1:], value[::-1])
        case str():
            yield from ("", "\0", "\ud800")


def places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where there is something in JSON; of lists, in the first entries."""
    yield path
    inside: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list):
        inside = enumerate(value[:1])
    for name, each in inside:
        yield from places(each, (*path, name))


def test_of_whatever_report_is_read_there_is_a_page(tmp_path: Path) -> None:
    """So a fault of the page is one, and is told so."""
    path = tmp_path / "report.json"
    write_report(troubled(), path)
    text = path.read_bytes()
    drawn = refused = 0
    for *inside, last in filter(None, places(json.loads(text))):
        for edit in edits(reduce(getitem, (*inside, last), json.loads(text))):
            changed = json.loads(text)
            reduce(getitem, inside, changed)[last] = edit
            path.write_text(json.dumps(changed))
            try:
                report = read_report(path)
            except ReportRefused:
                refused += 1
            else:
                assert document(report, "").startswith("<!doctype html>")
                drawn += 1
    assert drawn > 200
    assert refused > 200


def test_a_fault_of_the_page_is_not_blamed_on_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(troubled(), tmp_path / "report.json")

    def faulty(report: RunReport) -> NoReturn:
        raise KeyError("a device")

    monkeypatch.setattr("shoal_cli.page.document.charts", faulty)
    with pytest.raises(KeyError, match="a device"):
        run_app(["report", str(tmp_path)])


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
    assert f"{sys.executable} -m pip install 'shoal[page]'" in shown.replace("\n  ", " ")
