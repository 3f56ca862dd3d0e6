"""What `top`, `describe` and `why` draw: nothing is lost on a narrow terminal."""

import pytest
from rich.console import Console, RenderableType

from cli.live.overviews import MIB, device, digest, job, overview, stage, task
from shoal_cli.commands.live_tables import (
    device_description,
    explanation,
    job_description,
    job_line,
    picture,
)
from shoal_cli.live.reasons import why
from shoal_cli.live.view import View, view_of
from shoal_protocol.v1 import coordinator_pb2 as pb


def drawn(what: RenderableType, width: int = 120) -> str:
    console = Console(width=width, markup=False, color_system=None)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


@pytest.fixture
def view() -> View:
    pi = device("pi-4", used_bytes=32 * MIB, peak_bytes=48 * MIB, queued=3, tasks=20)
    pi.fragments.append(pb.HeldFragment(digest=digest(0), state=pb.HeldFragment.RESIDENT))
    pi.fragments.append(pb.HeldFragment(digest=digest(1), state=pb.HeldFragment.LOADING))
    pi.temperature_celsius = 61.5
    gone = device("[/pi]", state=pb.DeviceStatus.LOST, silent_seconds=70.0)
    lacking = pb.Candidate(
        device="pi-4", need_bytes=80 * MIB, have_bytes=64 * MIB, reason="no room"
    )
    stages = [stage(0, "pi-4", compute=0.25, planned=["pi-4"], granted_bytes=[12 * MIB])]
    stages.append(stage(1, ready=4, candidates=[lacking]))
    shown = job(*stages, succeeded=10, items_per_second=4.0, retries=2)
    timing = pb.ItemTiming(item=3, input="3.npz", seconds=4.0)
    timing.tasks.append(task(0, "pi-4", 0.0, 1.0, 3.0, 1.5))
    shown.slowest.append(timing)
    ended = job(name="old", state=pb.JobStatus.COMPLETE, succeeded=100)
    before = overview(device("pi-4", tasks=10), seconds=998)
    return view_of(overview(pi, gone, shown, ended, omitted_devices=4), before)


@pytest.mark.parametrize("width", [50, 80, 200])
def test_a_picture_shows_jobs_stages_and_devices_at_every_width(view: View, width: int) -> None:
    shown = drawn(picture("pool shelf", view), width)
    for text in (
        "1 of 6 devices ready",
        "jobs: 1 in progress, 1 ended",
        "10/100 items",
        "4 items/s",
    ):
        assert text in " ".join(shown.split())
    for text in ("pi-4", "[/pi]", "Lost", "ocr/0", "61.5", "tasks/s", "250 ms"):
        assert text in shown
    for text in ("█████░░░░░", "32 MiB", "48 MiB", "64 MiB"):
        assert text in shown
    assert "and 4 more devices" in shown
    assert max(map(len, shown.splitlines())) <= width


def test_a_description_of_a_device_has_its_memory_links_and_fragments(view: View) -> None:
    shown = " ".join(drawn(device_description(view.devices[0])).split())
    for text in (
        "32 MiB now, 48 MiB at most",
        "ocr/1 Loading",
        "other devices reach it directly",
        "celsius 61.5",
        "20 done, 5 a second",
    ):
        assert text in shown
    assert "last heard of 70 s ago" in drawn(device_description(view.devices[1]))


def test_a_description_of_a_job_has_its_plan(view: View) -> None:
    shown = " ".join(drawn(job_description(view.jobs[0])).split())
    assert "pi-4 (12 MiB)" in shown
    assert "any device" in shown
    assert "2 retries" in shown


def test_of_a_job_that_has_ended_no_stages_are_awaited() -> None:
    ended = job(name="old", state=pb.JobStatus.COMPLETE, succeeded=100)
    view = view_of(overview(device("pi-4"), ended))
    shown = drawn(picture("pool shelf", view)) + drawn(job_description(view.jobs[0]))
    assert "Complete, 100/100 items" in shown
    assert "no stages yet" not in shown
    assert "serve it" not in shown


def test_an_explanation_has_need_and_have_and_where_the_time_went(view: View) -> None:
    shown = drawn(explanation(why(view.jobs[0], view)))
    assert shown.startswith("ocr waits, 10 of 100 items: stage 1 of 2")
    assert ["pi-4", "no", "room", "80", "MiB", "64", "MiB", "0", "B"] in map(
        str.split, shown.splitlines()
    )
    words = next(line.split() for line in shown.splitlines() if line.startswith("3.npz"))
    assert words == [
        *[
            "3.npz",
            "stage",
            "0",
            "on",
            "pi-4",
            "4",
            "s",
            "1",
            "s",
            "500",
            "ms",
            "1.5",
            "s",
            "1",
            "s",
            "0",
        ]
    ]


def test_the_stage_that_limits_the_others_is_marked() -> None:
    shown = job(stage(0, "pi-4", compute=0.1), stage(1, "jetson", compute=0.3))
    lines = drawn(picture("pool shelf", view_of(overview(device("pi-4"), shown)))).splitlines()
    marks = [line.split()[1] == "*" for line in lines if line.strip()[:2] in {"0 ", "1 "}]
    assert marks == [False, True]


def test_of_a_job_that_has_ended_the_items_that_succeeded_are_counted() -> None:
    (running,) = view_of(overview(job(items=4, succeeded=3, failed=1))).jobs
    assert "4/4 items" in job_line(running)
    ended = overview(job(items=4, succeeded=3, failed=1, state=pb.JobStatus.FAILED))
    assert "3/4 items" in job_line(view_of(ended).jobs[0])
