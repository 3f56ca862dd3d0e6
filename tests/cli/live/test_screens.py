"""What `shoal top` draws fits its screen, and the devices stay on it."""

import io

import pytest
from rich.console import Console

from cli.live.overviews import device, job, overview, stage
from shoal_cli.commands.screens import filled
from shoal_cli.live.view import View, view_of


def view(*, jobs: int, stages: int = 2, devices: int = 2) -> View:
    there = [device(f"pi-{number}") for number in range(devices)]
    several = [stage(index, "pi-0", compute=0.1) for index in range(stages)]
    return view_of(overview(*there, *(job(*several, name=f"job-{each}") for each in range(jobs))))


def on_screen(shown: View, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=100, height=height, color_system=None)
    with console.capture() as captured:
        console.print(filled(console, "pool shelf", shown))
    return captured.get().rstrip("\n").splitlines()


@pytest.mark.parametrize("jobs", [1, 2, 5, 40, 1000])
@pytest.mark.parametrize("height", [24, 50])
def test_devices_are_on_the_screen_however_many_jobs_there_are(jobs: int, height: int) -> None:
    lines = on_screen(view(jobs=jobs), height)
    assert len(lines) <= height
    assert {"pi-0", "pi-1"} <= {line.split()[0] for line in lines if line.split()}
    named = [line for line in lines if line.startswith("job-")]
    assert named
    if len(named) < jobs:
        assert f"{jobs - len(named)} more active jobs" in lines


def test_a_job_with_more_stages_than_lines_leaves_room_for_the_devices() -> None:
    lines = on_screen(view(jobs=2, stages=200), 24)
    assert len(lines) <= 24
    assert any(line.startswith("job-0") for line in lines)
    assert any(line.startswith("pi-1") for line in lines)


def test_what_is_higher_than_the_screen_is_cut_and_that_is_said() -> None:
    lines = on_screen(view(jobs=1, devices=100), 24)
    assert len(lines) == 24
    assert lines[-1].endswith(" more lines: shoal top | less")


def test_all_is_shown_where_there_is_room() -> None:
    lines = on_screen(view(jobs=3), 100)
    assert not any("more" in line for line in lines)
    assert sum(line.startswith("job-") for line in lines) == 3
