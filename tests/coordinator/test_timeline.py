"""What devices did over time: nothing is lost, nothing grows without bound."""

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.scripted import connected
from coordinator.world import World
from shoal_coordinator.server.timeline import COLUMNS, MOST_CHANGES, MOST_DEVICES, Timeline
from shoal_protocol.units import Nanoseconds, nanoseconds
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import session_pb2 as pb

NONE_YET = Nanoseconds(7_000_000_000)
"""When the first job is submitted: the clock's zero means nothing."""


def at(seconds: float) -> Nanoseconds:
    return Nanoseconds(NONE_YET + nanoseconds(seconds))


def executed(**fields: float) -> pb.Reply:
    return pb.Reply(executed=pb.Executed(**fields))  # type: ignore[arg-type]


def recorded(timeline: Timeline, seconds: float) -> api.Timeline:
    return timeline.read(at(seconds))


spans = st.lists(
    st.tuples(st.floats(0, 3000), st.floats(0, 30), st.floats(0, 3), st.integers(0, 1 << 40)),
    min_size=1,
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(tasks=spans)
def test_columns_add_up_to_all_that_was_answered(
    tasks: list[tuple[float, float, float, int]],
) -> None:
    timeline, now = Timeline(), 0.0
    timeline.begin(at(0), 1e9)
    busy = computing = sending = 0.0
    for pause, compute, send, peak in tasks:
        begun = now + pause
        now = begun + compute + send
        timeline.instructed("a", at(begun))
        reply = executed(compute_seconds=compute, sending_seconds=send, peak_bytes=peak)
        timeline.answered("a", reply, at(now), idle=True)
        busy, computing, sending = busy + compute + send, computing + compute, sending + send
    (device,) = recorded(timeline, now).devices
    assert len(device.busy_seconds) <= COLUMNS
    assert math.isclose(sum(device.busy_seconds), busy, rel_tol=1e-3, abs_tol=1e-3)
    assert math.isclose(sum(device.computing_seconds), computing, rel_tol=1e-3, abs_tol=1e-3)
    assert math.isclose(sum(device.sending_seconds), sending, rel_tol=1e-3, abs_tol=1e-3)
    assert max(device.memory_bytes) == max(peak for *_, peak in tasks)


@settings(max_examples=100, deadline=None)
@given(tasks=spans)
def test_no_column_holds_more_than_its_time(tasks: list[tuple[float, float, float, int]]) -> None:
    timeline, now = Timeline(), 0.0
    timeline.begin(at(0), 1e9)
    for pause, compute, send, _ in tasks:
        timeline.instructed("a", at(now + pause))
        now += pause + compute + send
        reply = executed(compute_seconds=compute, sending_seconds=send)
        timeline.answered("a", reply, at(now), idle=True)
    whole = recorded(timeline, now)
    (device,) = whole.devices
    for values in (device.busy_seconds, device.computing_seconds, device.sending_seconds):
        assert len(values) * whole.column_seconds <= now + 2 * whole.column_seconds
        assert max(values) <= whole.column_seconds * 1.001
        assert min(values) >= 0


def test_spans_lie_where_they_happened() -> None:
    timeline = Timeline()
    timeline.begin(at(0), 1e9)
    timeline.instructed("a", at(0.5))
    loaded = pb.Reply(loaded=pb.Loaded(seconds=0.25))
    timeline.answered("a", loaded, at(1.0), idle=False)
    timeline.answered("a", executed(compute_seconds=0.25, sending_seconds=0.5), at(2.0), idle=True)
    whole = recorded(timeline, 2.0)
    (device,) = whole.devices

    def during(values: object) -> tuple[float, float]:
        columns = [number for number, value in enumerate(values) if value > 1e-6]  # type: ignore[arg-type, var-annotated]
        return columns[0] * whole.column_seconds, (columns[-1] + 1) * whole.column_seconds

    assert during(device.busy_seconds) == pytest.approx((0.5, 2.0))
    assert during(device.loading_seconds) == pytest.approx((0.75, 1.0))
    assert during(device.computing_seconds) == pytest.approx((1.25, 1.5))
    assert during(device.sending_seconds) == pytest.approx((1.5, 2.0))


def test_counters_of_telemetry_are_spread_over_the_time_between() -> None:
    timeline = Timeline()
    timeline.begin(at(0), 1e9)
    timeline.reported("a", pb.Telemetry(used_bytes=5, sent_bytes=1000), at(1.0))
    timeline.reported("a", pb.Telemetry(used_bytes=9, sent_bytes=3000), at(2.0))
    timeline.joined("a", at(3.0))  # its agent has started again: the counters begin anew
    timeline.reported("a", pb.Telemetry(used_bytes=2, sent_bytes=50), at(4.0))
    timeline.reported("a", pb.Telemetry(used_bytes=2, sent_bytes=60), at(5.0))
    (device,) = recorded(timeline, 5.0).devices
    assert sum(device.sent_bytes) == pytest.approx(2010)
    assert max(device.memory_bytes) == 9


def test_what_is_no_measurement_is_not_recorded() -> None:
    timeline = Timeline()
    timeline.begin(at(0), 1e9)
    timeline.instructed("a", at(0))
    for strange in (math.nan, math.inf, -1.0, 1e300):
        reply = executed(compute_seconds=strange, sending_seconds=strange, peak_bytes=2**64 - 1)
        timeline.answered("a", reply, at(1), idle=False)
    (device,) = recorded(timeline, 1).devices
    assert sum(device.computing_seconds) == sum(device.sending_seconds) == 0
    assert max(device.memory_bytes) == 1 << 50


def test_what_happens_without_jobs_is_not_recorded() -> None:
    timeline = Timeline()
    timeline.joined("a", at(0))
    assert recorded(timeline, 1) == api.Timeline()
    timeline.begin(at(1), 1e9 + 1)
    timeline.instructed("a", at(1))
    timeline.end(at(2))
    timeline.reported("a", pb.Telemetry(used_bytes=5), at(50))
    whole = recorded(timeline, 100)
    (device,) = whole.devices
    assert whole.began_seconds == pytest.approx(1e9 + 1)
    assert sum(device.busy_seconds) == pytest.approx(1)
    assert not any(device.memory_bytes)


def test_devices_and_changes_are_bounded() -> None:
    timeline = Timeline()
    timeline.begin(at(0), 1e9)
    for number in range(2 * MOST_DEVICES):
        timeline.joined(f"pi-{number:03}", at(number))
    for number in range(2 * MOST_CHANGES):
        timeline.lost("pi-000", at(number), f"reason {number}")
    whole = recorded(timeline, 2 * MOST_CHANGES)
    assert [each.name for each in whole.devices] == [f"pi-{n:03}" for n in range(MOST_DEVICES)]
    changes = whole.devices[0].changes
    assert len(changes) == MOST_CHANGES
    assert changes[-1].reason == f"reason {2 * MOST_CHANGES - 1}"


async def test_a_client_receives_what_devices_did_and_that_one_was_lost(world: World) -> None:
    world.inputs(6)
    async with connected(world.device("b")):
        async with connected(world.device("a", gate=asyncio.Semaphore(2))):
            await world.submit()
            await world.until(lambda status: any(stage.finished for stage in status.stages))
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE
    whole = await world.stub.GetTimeline(api.GetTimelineRequest(), timeout=60)
    assert whole.began_seconds == pytest.approx(last.started_seconds, abs=30)
    a, b = whole.devices
    assert (a.name, b.name) == ("a", "b")
    assert [change.joined for change in a.changes] == [False]
    assert sum(b.busy_seconds) > 0
    assert sum(b.computing_seconds) > 0
