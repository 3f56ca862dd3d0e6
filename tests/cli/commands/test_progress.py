"""What a run shows while it goes."""

import io
import time

import pytest
from rich.console import Console

from shoal_cli.commands.progress import (
    LiveProgress,
    PlainProgress,
    choose_progress,
    picture,
)
from shoal_cli.commands.tables import Waiting
from shoal_cli.local.observer import Observer, Snapshot
from shoal_protocol.v1 import coordinator_pb2 as pb


@pytest.mark.parametrize(("terminal", "shown"), [("xterm", LiveProgress), ("dumb", PlainProgress)])
def test_a_terminal_that_draws_nothing_anew_gets_lines(
    terminal: str, shown: type[Observer]
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": terminal})
    assert isinstance(choose_progress("auto", console), shown)


def test_a_phase_that_is_over_at_once_leaves_no_line_in_a_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = PlainProgress(lasting_seconds=60)
    for phase in ("cutting", "starting 3 agents", "running", "stopping"):
        progress.phase(phase)
    progress.note("cpus are not enforced")
    progress.ended()
    assert capsys.readouterr().err == "! cpus are not enforced\n"


def test_a_phase_that_lasts_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    progress = PlainProgress(lasting_seconds=0.01)
    progress.phase("verifying")
    printed = ""
    while not printed:
        time.sleep(0.01)
        printed = capsys.readouterr().err
    progress.ended()
    assert printed == "verifying\n"


def test_what_takes_longer_than_a_second_shows_for_how_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("shoal_cli.commands.tables.time.monotonic", lambda: now[0])
    waiting = Waiting("cutting kokoro")

    def shown() -> str:
        file = io.StringIO()
        Console(file=file, width=60).print(waiting)
        return file.getvalue().strip()

    assert shown().endswith("cutting kokoro ...")
    now[0] += 12.3
    assert shown().endswith("cutting kokoro ... 12 s")


@pytest.mark.parametrize("width", [30, 40, 80, 200])
def test_the_picture_of_a_run_loses_nothing_on_a_narrow_terminal(width: int) -> None:
    stage = pb.StageStatus(index=0, ready=1234, running=2, finished=3, compute_seconds=0.25)
    stage.devices.extend(["pi-4", "jetson"])
    job = pb.JobStatus(name="ocr", state=pb.JobStatus.RUNNING, items=9, stages=[stage])
    device = pb.DeviceStatus(name="pi-4", state=pb.DeviceStatus.LOST, queued=17)
    device.fetched_bytes = 11 << 20
    device.used_bytes, device.peak_bytes, device.budget_bytes = 3 << 20, 5 << 20, 7 << 20
    console = Console(file=io.StringIO(), width=width)
    console.print(picture(Snapshot(jobs=(job,), devices=(device,), restarts={"pi-4": 31})))
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    for text in (
        "1234",
        "250 ms",
        "jetson",
        "pi-4",
        "3 MiB",
        "5 MiB",
        "7 MiB",
        "11 MiB",
        "17",
        "31",
        "lost",
    ):
        assert text in drawn
    assert max(map(len, drawn.splitlines())) <= width


def shown(**job: object) -> str:
    status = pb.JobStatus(name="camera", state=pb.JobStatus.RUNNING, items_per_second=2, **job)  # type: ignore[arg-type]
    console = Console(file=io.StringIO(), width=120)
    console.print(picture(Snapshot(jobs=(status,), devices=(), restarts={})))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_job_that_follows_its_inputs_says_what_is_done_and_no_end() -> None:
    assert "1,234 done, 2 items/s, 1 failed" in shown(
        items=1236, succeeded=1233, failed=1, following=True
    )
    assert "1,234 done, waiting for more" in shown(items=1234, succeeded=1234, following=True)
    assert "left" not in shown(items=1236, succeeded=1234, following=True)
    assert "1234/1236 items, 2 items/s, 1 s left" in shown(items=1236, succeeded=1234)


def test_a_job_of_many_stages_shows_that_it_goes_on_before_an_item_is_done() -> None:
    stages = [pb.StageStatus(index=index, finished=3 - index) for index in range(3)]
    assert "0/4 items, 6/12 tasks, 2 items/s" in shown(items=4, stages=stages)
    assert "tasks" not in shown(items=4, succeeded=1, stages=stages)
    assert "tasks" not in shown(items=4, stages=stages[:1]), "its items are its tasks"


def test_a_device_that_loads_a_large_fragment_says_for_how_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = [
        pb.DeviceStatus(name="pi-4", loading_seconds=38.4),
        pb.DeviceStatus(name="jetson", loading_seconds=0.3),
        pb.DeviceStatus(name="gone", loading_seconds=70.0, state=pb.DeviceStatus.LOST),
    ]
    snapshot = Snapshot(jobs=(), devices=tuple(devices), restarts={})
    monkeypatch.setattr("shoal_cli.commands.progress.PLAIN_SECONDS", 0)
    PlainProgress(lasting_seconds=60).running(snapshot)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" fetched")[2] for line in lines] == [
        ", loading for 38 s",
        "",
        ", loading for 70 s",
    ]
    console = Console(file=io.StringIO(), width=120)
    console.print(picture(snapshot))
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert drawn.count("loading") == 1
    assert "loading for 38 s" in drawn
    assert "ready" in drawn
    assert "lost" in drawn


def test_a_log_does_not_grow_while_a_followed_folder_gets_no_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("shoal_cli.commands.progress.time.monotonic", lambda: now[0])
    progress = PlainProgress(lasting_seconds=60)

    def told(*, items: int = 0, failed: int = 0, under_way: int = 0, lost: bool = False) -> int:
        """How many lines come within a minute."""
        job = pb.JobStatus(name="camera", following=True, items=items, failed=failed)
        job.succeeded = items - failed - under_way
        state = pb.DeviceStatus.LOST if lost else pb.DeviceStatus.READY
        there = (pb.DeviceStatus(name="pi-4", state=state),)
        for second in range(60):
            now[0] += 1
            job.items_per_second = 1 / (now[0] + second)  # it becomes less and less
            progress.running(Snapshot(jobs=(job,), devices=there, restarts={}))
        return len(capsys.readouterr().err.splitlines())

    assert told() == 2
    assert told() == 0
    assert told(items=3, under_way=1) == 24
    assert told(items=3) == 2
    assert told(items=3) == 0
    assert told(items=3, lost=True) == 2
    assert told(items=3, failed=1) == 2
