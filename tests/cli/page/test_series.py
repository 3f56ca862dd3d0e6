"""What is drawn of a recorded run: bounded, and true to what was recorded."""

import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from cli.page.recorded import device_timelines, long_timeline, timelines
from shoal_cli.local.run_record import DeviceTimeline, SessionChange, Timeline
from shoal_cli.page.series import (
    ACTIVITIES,
    MOST_ABSENCES,
    MOST_CELLS,
    MOST_COLUMNS,
    MOST_DEVICES,
    MOVEMENTS,
    device_series,
    movements,
)


def recorded(found: Sequence[Timeline], name: str) -> list[DeviceTimeline]:
    return [device for timeline in found for device in timeline.devices if device.name == name]


@settings(max_examples=60, deadline=None)
@given(found=timelines())
def test_each_device_has_its_highest_memory_and_all_of_its_computing(
    found: tuple[Timeline, ...],
) -> None:
    series = device_series(found)
    assert [each.name for each in series] == sorted({d.name for t in found for d in t.devices})
    for each in series:
        parts = recorded(found, each.name)
        highest = max(size for part in parts for size in part.memory_bytes)
        assert max((cell.memory_bytes for cell in each.cells), default=0) == highest
        widths = {id(d): t.column_seconds for t in found for d in t.devices}
        computing = sum(
            min(widths[id(part)], time) for part in parts for time in part.computing_seconds
        )
        columns = sum(widths[id(part)] * len(part.busy_seconds) for part in parts)
        assert math.isclose(each.seconds("compute"), computing, abs_tol=1e-3 * columns)


@settings(max_examples=60, deadline=None)
@given(found=timelines())
def test_cells_follow_one_another_and_give_their_time_away_once(
    found: tuple[Timeline, ...],
) -> None:
    for each in device_series(found):
        end = 0.0
        for cell in each.cells:
            assert cell.begin >= end - 1e-6
            assert cell.end > cell.begin
            end = cell.end
            shares = [cell.shares[kind] for kind in ACTIVITIES]
            assert min(shares) >= 0
            assert sum(shares) <= 1 + 1e-9


@settings(max_examples=60, deadline=None)
@given(found=timelines())
def test_every_loss_is_an_absence_that_ends_with_the_return_or_the_timeline(
    found: tuple[Timeline, ...],
) -> None:
    for each in device_series(found):
        parts = recorded(found, each.name)
        losses = [change for part in parts for change in part.changes if not change.joined]
        assert len(each.absences) == min(len(losses), MOST_ABSENCES)
        assert all(absence.end >= absence.begin for absence in each.absences)


def test_a_device_that_is_lost_has_no_memory_until_it_is_back() -> None:
    nothing = (0.0,) * 6
    lost = DeviceTimeline(
        name="pi-4",
        busy_seconds=nothing,
        computing_seconds=nothing,
        loading_seconds=nothing,
        sending_seconds=nothing,
        memory_bytes=(5, 0, 0, 0, 0, 7),
        sent_bytes=nothing,
        received_bytes=nothing,
        fetched_bytes=nothing,
        changes=(
            SessionChange(seconds=2.0, joined=False, reason="the stream ended"),
            SessionChange(seconds=4.0, joined=True),
        ),
    )
    (each,) = device_series((Timeline(begun_seconds=1.0, column_seconds=1.0, devices=(lost,)),))
    shown = [(cell.begin, cell.end, cell.memory_bytes) for cell in each.cells]
    assert shown == [(1.0, 3.0, 5), (3.0, 6.0, 0), (6.0, 7.0, 7)]


@settings(max_examples=40, deadline=None)
@given(found=timelines())
def test_no_byte_that_was_moved_is_lost(found: tuple[Timeline, ...]) -> None:
    moved = movements(found)
    for kind in MOVEMENTS:
        whole = sum(
            sum(getattr(device, f"{kind}_bytes"))
            for timeline in found
            for device in timeline.devices
        )
        counted = sum(each.rates[kind] * (each.end - each.begin) for each in moved)
        assert math.isclose(counted, whole, abs_tol=1e-3)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_devices_come_in_the_order_of_the_report_then_by_name(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from("abcdef"), unique=True, min_size=1))
    order = data.draw(st.lists(st.sampled_from("abcdefgh"), unique=True))
    devices = tuple(data.draw(device_timelines(name, 1, 1.0)) for name in names)
    found = (Timeline(begun_seconds=0.0, column_seconds=1.0, devices=devices),)
    shown = [each.name for each in device_series(found, order)]
    rest = sorted(set(names) - set(order))
    assert shown == [name for name in order if name in names] + rest


def test_however_much_was_recorded_the_cells_are_bounded() -> None:
    found = tuple(long_timeline(devices=100) for _ in range(5))
    series = device_series(found)
    assert len(series) == MOST_DEVICES
    assert sum(len(each.cells) for each in series) <= MOST_CELLS
    assert len(movements(found)) <= MOST_COLUMNS + len(found)
