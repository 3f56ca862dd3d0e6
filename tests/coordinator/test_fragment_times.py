"""What a coordinator knows of the fragments of a device: their tasks, their loads, and its disk."""

import pytest

from shoal_coordinator.server.fragment_times import FragmentTimes
from shoal_protocol.digests import Digest
from shoal_protocol.speeds import FragmentTime, fragment_times_of
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import session_pb2 as pb


def test_what_tasks_take_on_a_device_is_what_it_said_last() -> None:
    one, other = "sha256:" + "a" * 64, "sha256:" + "b" * 64
    cached = [pb.CachedFragment(digest=one, task_seconds=2.0), pb.CachedFragment(digest=other)]
    times = FragmentTimes(pb.Hello(device="a", cached=cached))
    assert [(each.digest, each.seconds) for each in times.read()] == [(one, 2.0)]
    times.executed(one, pb.Executed(task_seconds=3.0))
    times.executed(other, pb.Executed(task_seconds=1.0))
    times.executed(other, pb.Executed(task_seconds=float("inf")))
    assert [each.seconds for each in times.read()] == [3.0, 1.0]


def test_what_is_on_a_devices_disk_is_known_whether_it_ran_there_or_not() -> None:
    ran, kept, many = ("sha256:" + letter * 64 for letter in "abc")
    times = FragmentTimes(pb.Hello(device="a"))
    times.executed(ran, pb.Executed(task_seconds=3.0))
    last = [f"{many[:-4]}{number:04x}" for number in range(255)]
    read = times.read({many: None, kept: None, **dict.fromkeys(last)})
    assert [(each.digest, each.seconds, each.cached) for each in read] == [
        (ran, 3.0, False),
        (kept, 0.0, True),
        *((each, 0.0, True) for each in last),
    ]
    (known,) = fragment_times_of(api.DeviceStatus(times=read[1:2]))
    assert known == FragmentTime(digest=Digest(kept), cached=True)


def test_what_tasks_took_within_grants_is_told_on_as_the_device_said_it_last() -> None:
    digest, nothing = "sha256:" + "a" * 64, float("nan")

    def said(*grants: tuple[int, float]) -> list[pb.TimeWithin]:
        return [pb.TimeWithin(granted_bytes=size, seconds=took) for size, took in grants]

    cached = [pb.CachedFragment(digest=digest, within=said((7, 2.0)))]
    times = FragmentTimes(pb.Hello(device="a", cached=cached))

    def known() -> tuple[tuple[int, float], ...]:
        (its,) = fragment_times_of(api.DeviceStatus(times=times.read()))
        return its.within

    assert known() == ((7, 2.0),)
    times.executed(digest, pb.Executed(within=said((7, 2.0), (0, 1.0), (3, nothing))))
    assert known() == ((0, 1.0), (7, 2.0))
    many = said(*((size, 1.0) for size in range(1, 100)))
    times.ran(digest, pb.MeasuredTask(digest=digest, within=many))
    assert len(known()) == 4


def test_a_load_takes_the_median_of_the_last_ones_with_what_its_first_task_takes_more() -> None:
    """The first load prepares the fragment, and one that fetches it does not count."""
    digest = "sha256:" + "a" * 64
    times = FragmentTimes(pb.Hello(device="a"))
    usual, seen = pb.Executed(compute_seconds=1.0, task_seconds=1.0), []
    times.loaded(digest, pb.Loaded(seconds=9.0, fetched_bytes=1))
    times.executed(digest, usual)
    assert not times.read()[0].HasField("load_seconds")
    for took, computed in ((5.0, 1.5), (2.0, 1.5), (2.0, 0.5), (2.1, 1.0)):
        times.loaded(digest, pb.Loaded(seconds=took))
        times.executed(digest, pb.Executed(compute_seconds=computed, task_seconds=1.0))
        times.executed(digest, usual)
        seen += [each.load_seconds for each in times.read()]
    assert seen == [5.5, 2.5, 2.5, 2.5], "2.1 is much the same"


@pytest.mark.parametrize("stretched", [1.0, 2.0], ids=["after a rest", "held by its quota"])
def test_a_load_takes_as_long_whether_its_quota_held_it_or_not(stretched: float) -> None:
    """Half a processor: of one second's work the load takes two in the long run, its first task
    half a second more than its usual second."""
    digest = "sha256:" + "a" * 64
    times = FragmentTimes(pb.Hello(device="a", speed=pb.Speed(processors=0.5)))
    times.loaded(digest, pb.Loaded(seconds=stretched, processor_seconds=1.0))
    first = pb.Executed(compute_seconds=0.75 * stretched, processor_seconds=0.75, task_seconds=1.0)
    times.executed(digest, first)
    assert [each.load_seconds for each in times.read()] == [2.5]


def test_a_load_takes_also_what_the_unload_before_it_took() -> None:
    """By processor time and quota as the load does: half a second more on half a processor."""
    digest = "sha256:" + "a" * 64
    times = FragmentTimes(pb.Hello(device="a", speed=pb.Speed(processors=0.5)))
    for _ in range(2):
        times.moved(digest, pb.Reply(loaded=pb.Loaded(seconds=2.0, processor_seconds=1.0)))
        times.executed(digest, pb.Executed(compute_seconds=1.0, task_seconds=1.0))
        seen = [each.load_seconds for each in times.read()]
        gone = pb.Unloaded(freed_bytes=1, seconds=0.6, processor_seconds=0.5)
        times.moved(digest, pb.Reply(unloaded=gone))
        times.moved("sha256:" + "b" * 64, pb.Reply(unloaded=gone))
    assert seen == [2.0], "of two loads the lower one"
    times.moved(digest, pb.Reply(loaded=pb.Loaded(seconds=2.0, processor_seconds=1.0)))
    times.executed(digest, pb.Executed(compute_seconds=1.0, task_seconds=1.0))
    assert times.read()[0].load_seconds == 3.0


def test_a_load_that_waits_for_the_disk_takes_no_less_than_it_took() -> None:
    digest = "sha256:" + "a" * 64
    times = FragmentTimes(pb.Hello(device="a", speed=pb.Speed(processors=0.5)))
    times.loaded(digest, pb.Loaded(seconds=3.0, processor_seconds=0.5))
    times.executed(digest, pb.Executed(compute_seconds=1.0, task_seconds=1.0))
    assert [each.load_seconds for each in times.read()] == [3.0]
