"""The summary at narrow widths and outside of terminals: no number loses its end."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cli.local.test_report import DEVICE, FAILED, JOB, REPORT, VERIFICATION
from shoal_cli.commands.tables import (
    LOG_COLUMNS,
    errors,
    explained_table,
    interrupted_line,
    output,
    over_budget_line,
    print_kept,
    print_summary,
    trouble_lines,
)
from shoal_cli.local.report import (
    Enforcement,
    FailedItem,
    FragmentHeld,
    Latency,
    RunReport,
    to_json,
)
from shoal_planner.explanation import Table as Explained

LOGS = f"{REPORT.work}/logs"
NAMES = ("pi-4", "pi-zero", "a-device-with-quite-a-long-name")
MANY = replace(
    REPORT,
    jobs=(FAILED,),
    devices=tuple(replace(DEVICE, name=name, evictions=12, restarts=3) for name in NAMES),
)


def shown(report: RunReport, width: int) -> str:
    file = io.StringIO()
    print_summary(Console(file=file, width=width, color_system=None), report)
    return file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_nothing_is_cut_short_at_any_width(width: int) -> None:
    text = shown(MANY, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert "ocr" in text
    for name in NAMES:
        assert name in text
    assert text.count("20 of 24 MiB 83%") == len(NAMES)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_column_is_lost_at_any_width(width: int) -> None:
    whole, narrow = shown(MANY, 1000), shown(MANY, width)
    (wide,) = [line for line in whole.splitlines() if line.startswith("device ")]
    for heading in filter(None, map(str.strip, wide.split("  "))):
        assert heading in narrow
    figures = {
        word for line in whole.splitlines() if line.startswith("pi-4") for word in line.split()
    }
    assert figures <= set(narrow.split())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_plan_loses_no_column_and_no_word_at_any_width(width: int) -> None:
    devices = ", ".join(NAMES)
    explained = Explained(
        title="1 stage",
        headings=("stage", "devices", "memory", "compute", "transfer", "an item every"),
        rows=(("0", devices, "7.1 MiB (in blocks)", "12 ms", "3 ms", "15 ms"),),
        numbers=frozenset(("stage", "memory", "compute", "transfer", "an item every")),
    )
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(explained_table(explained))
    text = file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for words in (*explained.headings, *NAMES, *explained.rows[0][2:]):
        assert words in text


def test_nor_on_a_dumb_terminal(tmp_path: Path) -> None:
    """Other processes decide what kind of terminal they have when they begin."""
    program = (
        "from dataclasses import replace; from rich.console import Console;"
        "from cli.commands.test_summary import DEVICE, MANY;"
        "from shoal_cli.commands.tables import print_summary;"
        "busy = replace(DEVICE, loads=10**9, evictions=10**9, restarts=10**9);"
        "print_summary(Console(), replace(MANY, devices=(busy,)))"
    )
    ours, its = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=its, cwd=tmp_path, env=environment
    )
    os.close(its)
    drawn = b""
    with contextlib.suppress(OSError):  # nobody has the other end any more
        while piece := os.read(ours, 65536):
            drawn += piece
    os.close(ours)
    assert process.wait(timeout=30) == 0
    assert drawn.decode().count("1000000000") == 3
    assert "…" not in drawn.decode()


def test_80_columns_hold_a_device_on_a_line() -> None:
    (line,) = [line for line in shown(REPORT, 80).splitlines() if line.startswith("pi-4")]
    assert "20 of 24 MiB 83%" in line


def test_budgets_are_called_enforced_only_where_none_could_be_exceeded() -> None:
    assert "budgets: enforced by cgroup v1, limit = charged to the idle agent" in shown(REPORT, 200)
    unlimited = replace(REPORT, devices=(DEVICE, replace(DEVICE, name="pi", limit_bytes=None)))
    text = shown(unlimited, 200)
    assert "budgets: measured only (cgroup v1 set no limit for pi)" in text
    assert "enforced" not in text
    reason = Enforcement(mode="none", reason="asked for with --enforce none")
    free = replace(DEVICE, limit_bytes=None)
    text = shown(replace(REPORT, enforcement=reason, devices=(free,)), 200)
    assert "budgets: measured only (asked for with --enforce none); every device inside" in text


def test_a_device_over_its_budget_is_named_with_budget_peak_and_share() -> None:
    over = replace(DEVICE, name="pi-zero", peak_bytes_above_floor=(24 << 20) + 1000)
    text = shown(replace(REPORT, devices=(DEVICE, over)), 200)
    assert "device pi-zero used 24 MiB of its 24 MiB, 101%: OVER BUDGET; give it more" in text
    assert "budgets: measured only (cgroup v1 limits what is charged to a device" in text
    assert "enforced" not in text
    assert "inside its budget" not in text


def test_a_quiet_run_still_says_what_went_wrong() -> None:
    assert list(trouble_lines(REPORT)) == []
    over = replace(
        REPORT, jobs=(FAILED,), devices=(replace(DEVICE, peak_bytes_above_floor=1 << 30),)
    )
    assert list(trouble_lines(over)) == [
        f"ocr: 1 of 8 items failed; the results of the other 7 are in {FAILED.outputs}",
        "ocr: a.npz: wrong shape",
        over_budget_line(over.devices[0]),
    ]
    reason = "outputs out: hold results of another job"
    refused = replace(FAILED, items=0, failures=(), reason="OutputsRefused", message=reason)
    assert list(trouble_lines(replace(REPORT, jobs=(refused,)))) == [f"ocr: {reason}"]
    different = replace(VERIFICATION, max_rel_diff=0.3, different_items=1, reference_rel_diff=0.0)
    (line,) = trouble_lines(replace(REPORT, jobs=(replace(JOB, verification=different),)))
    assert line.startswith("ocr: verified 8 of 10 items")
    assert "DIFFERENT" in line
    unread = replace(JOB, verification=None, verification_error="no memory")
    assert list(trouble_lines(replace(REPORT, jobs=(unread,)))) == ["ocr: not verified: no memory"]
    assert list(trouble_lines(replace(REPORT, jobs=(refused,), interrupted=True))) == []


def test_a_run_whose_results_all_existed_says_that_nothing_was_left() -> None:
    done = replace(JOB, resumed=JOB.items)
    text = "ocr: nothing was left to compute: all 8 items had their results before"
    assert text in shown(replace(REPORT, jobs=(done,)), 200)
    assert "nothing was left" not in shown(REPORT, 200)


def test_what_did_not_go_as_planned_is_said_again_at_the_end() -> None:
    notes = ("ocr: a.npz is larger than the plan covers", "ocr: now it is cut for 18 MiB")
    lines = shown(replace(REPORT, notes=notes), 200).splitlines()
    assert [line for line in lines if line.startswith("! ")] == [f"! {each}" for each in notes]
    assert "! " not in shown(REPORT, 200)


def test_a_device_says_which_fragments_ran_there_in_blocks() -> None:
    held = [FragmentHeld(partition="rec", index=n, digest="sha256:" + "1" * 64) for n in range(4)]
    held[1:3] = [replace(each, granted_bytes=8 << 20) for each in held[1:3]]
    for fragments, words in ((held, "0 3, 1-2 in blocks"), (held[1:2], "1 in blocks")):
        device = replace(DEVICE, fragments=tuple(fragments))
        (line,) = [
            line
            for line in shown(replace(REPORT, devices=(device,)), 100).splitlines()
            if line.startswith("pi-4")
        ]
        assert line.removeprefix("pi-4").strip().startswith(words)


def test_failures_stand_between_the_tables_with_room_around() -> None:
    lines = shown(MANY, 100).splitlines()
    at = next(index for index, line in enumerate(lines) if "a.npz: wrong shape" in line)
    assert lines[at - 1].startswith("ocr: 1 of 8 items failed; the results of the other 7 are in")
    assert lines[at - 2] == ""
    assert lines[at + 1 : at + 3] == ["", "Devices"]


def test_a_run_that_began_nothing_shows_its_reason_alone() -> None:
    job = replace(FAILED, items=0, succeeded=0, failed=0, failures=(), reason="FolderRefused")
    text = shown(replace(REPORT, jobs=(replace(job, message="out: cannot be written"),)), 80)
    assert text.strip() == "ocr: out: cannot be written"


def test_a_run_to_which_nothing_came_says_so() -> None:
    ended = replace(JOB, state="Complete", items=0, succeeded=0, failed=0, resumed=0)
    text = shown(replace(REPORT, jobs=(ended,)), 100)
    (row,) = (line.split() for line in text.splitlines() if line.startswith(f"{JOB.name} "))
    assert row[:3] == [JOB.name, "Complete", "0/0"]
    assert "nothing to do" not in text


def test_a_run_in_which_something_failed_names_its_logs_if_they_stay() -> None:
    assert LOGS not in shown(REPORT, 100)
    assert LOGS in shown(MANY, 100)
    assert LOGS not in shown(replace(MANY, interrupted=True), 100)
    file = io.StringIO()
    print_summary(Console(file=file), MANY, logs_stay=False)
    assert LOGS not in file.getvalue()


def test_a_run_that_leaves_much_on_the_disk_says_where() -> None:
    said = {}
    for kept in (900 << 20, 5 << 30):
        print_kept(Console(file=(file := io.StringIO()), width=200), "/runs/ocr", kept)
        said[kept] = file.getvalue()
    assert "5 GiB of fragments stay in /runs/ocr" in said[5 << 30]
    assert said[900 << 20] == ""


def test_an_interrupted_run_says_how_far_it_came() -> None:
    assert interrupted_line(MANY).startswith("interrupted with 7 of 8 items done; ")
    not_begun = replace(MANY, jobs=(replace(FAILED, items=0, succeeded=0, failed=0),))
    assert interrupted_line(not_begun).startswith("interrupted before the first item; ")


def test_a_pipe_is_wide_and_has_no_colours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert output().width == LOG_COLUMNS
    print_summary(output(), MANY)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert all(line == line.rstrip() or "  " in line for line in text.splitlines())
    monkeypatch.setenv("COLUMNS", "90")
    assert output().width == 90


@pytest.mark.parametrize("columns", ["0", "", "wide"])
def test_a_width_that_nobody_knows_is_none(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing at all was printed in 0 columns."""
    monkeypatch.setenv("COLUMNS", columns)
    print_summary(output(), MANY)
    assert "20 of 24 MiB 83%" in capsys.readouterr().out
    errors().print("stopping")
    assert capsys.readouterr().err == "stopping\n"


def test_no_line_is_broken_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever looks for a line there finds all of it."""
    monkeypatch.delenv("COLUMNS", raising=False)
    long = FailedItem(item=3, input=f"{'n' * 250}.npz", reason="wrong shape " * 20 + "at last")
    verified = replace(JOB, verification=VERIFICATION)
    failed = replace(FAILED, failures=(long,))
    print_summary(output(), replace(REPORT, jobs=(verified, failed)))
    lines = capsys.readouterr().out.splitlines()
    assert f"ocr: {long.input}: {long.reason}" in lines
    (said,) = [line for line in lines if line.startswith("ocr: verified 8 of 10")]
    assert "; ONNX Runtime's own rounding" in said
    assert said.endswith("absolute")


def test_a_run_that_had_nothing_to_do_shows_no_rate_of_an_earlier_one() -> None:
    """A coordinator knows that of the job, which is the same one."""
    none = Latency(p50_seconds=0, p90_seconds=0, p99_seconds=0, maximum_seconds=0)
    again = replace(
        JOB, resumed=JOB.items, succeeded=JOB.items, items_per_second=67.8, latency=none
    )
    assert again.ran_nothing
    (line,) = [
        line
        for line in shown(replace(REPORT, jobs=(again,)), 120).splitlines()
        if "/" in line and line.startswith("ocr  ")
    ]
    assert "67.8" not in line
    assert line.split()[-4:] == ["-"] * 4


def test_of_several_jobs_it_is_said_whose_results_differ() -> None:
    right = replace(JOB, name="right", verification=VERIFICATION)
    wrong = replace(JOB, name="wrong", verification=replace(VERIFICATION, max_rel_diff=0.5))
    alone = shown(replace(REPORT, jobs=(wrong,)), 1000)
    both = shown(replace(REPORT, jobs=(right, wrong)), 1000)
    assert "\nverified 8 of 10 items" in alone
    before, different, _ = both.partition("DIFFERENT")
    assert different
    assert re.findall(r"\n(\w+): verified 8 of 10 items", before) == ["right", "wrong"]


def test_columns_go_below_before_one_is_broken_on_a_phone() -> None:
    camera = replace(FAILED, name="camera", latency=replace(FAILED.latency, p50_seconds=0.0935))
    text = shown(replace(MANY, jobs=(camera,)), 40)
    assert ["camera", "Failed", "7/8", "1"] in [line.split()[:4] for line in text.splitlines()]
    for heading in ("failed", "items/s", "p50", "p90", "p99", "died"):
        assert heading in text.split()


def test_a_whole_model_that_has_run_no_item_is_in_no_budget() -> None:
    """All items have failed: nothing was compared."""
    verified = replace(REPORT, jobs=(replace(JOB, verification=VERIFICATION),))
    nothing = replace(VERIFICATION, items=0, of_items=0, skipped=10, peak_bytes=0)
    failed = replace(REPORT, jobs=(replace(JOB, verification=nothing),))
    assert "whole model in one process: 44 MiB" in shown(verified, 120)
    assert "whole model in one process" not in shown(failed, 120)
    assert to_json(failed)["jobs"][0]["whole_model_peak_bytes"] is None  # type: ignore[index]


@pytest.mark.parametrize(
    ("matched", "own", "words"),
    [
        (2, 0.2, "the model's own: each item that differs (2) equals the whole model under other"),
        (1, 0.2, "no larger than the model's own: the whole model differs from itself by 0.2"),
        (1, 0.0, "DIFFERENT: more than the tolerance of 0.0001"),
    ],
)
def test_a_difference_is_called_what_it_is(matched: int, own: float, words: str) -> None:
    found = replace(
        VERIFICATION,
        max_rel_diff=0.3,
        different_items=2,
        matched_items=matched,
        reference_rel_diff=own,
    )
    text = shown(replace(REPORT, jobs=(replace(JOB, verification=found),)), 400)
    assert words in text
    assert text.count("model's own") + text.count("DIFFERENT") == 1
