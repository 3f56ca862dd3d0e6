"""An overview as values: rates, names of fragments, the stage that limits, where time went."""

import json
from dataclasses import asdict

import pytest

from cli.live.overviews import MIB, device, digest, job, overview, stage, task
from shoal_cli.live.view import view_of
from shoal_protocol.v1 import coordinator_pb2 as pb


def test_rates_are_the_growth_of_counters_between_two_overviews() -> None:
    before = overview(
        device("pi-4", tasks=10, sent_bytes=1000), job(succeeded=5), seconds=100, relayed_bytes=50
    )
    now = overview(
        device("pi-4", tasks=30, sent_bytes=1000), job(succeeded=9), seconds=102, relayed_bytes=250
    )
    view = view_of(now, before)
    assert (view.devices[0].tasks_per_second, view.devices[0].sent_bytes_per_second) == (10, 0)
    assert (view.jobs[0].items_per_second, view.relayed_bytes_per_second) == (2, 100)


@pytest.mark.parametrize(
    "before",
    [
        None,
        overview(device("jetson", tasks=1), seconds=100),
        overview(device("pi-4", tasks=99), seconds=100),
        overview(device("pi-4", tasks=1), seconds=102),
    ],
    ids=["the first overview", "a new device", "a counter begun anew", "no time between"],
)
def test_a_rate_that_is_not_known_is_none(before: pb.Overview | None) -> None:
    view = view_of(overview(device("pi-4", tasks=30), seconds=102), before)
    assert view.devices[0].tasks_per_second is None


def test_without_an_earlier_overview_a_jobs_rate_is_that_since_its_start() -> None:
    view = view_of(overview(job(succeeded=40, items_per_second=20.0)))
    assert (view.jobs[0].items_per_second, view.jobs[0].seconds_left) == (20, 3)


def test_readings_that_a_device_does_not_have_are_none() -> None:
    pi = device("pi-4")
    pi.temperature_celsius = 0.0
    (shown,) = view_of(overview(pi)).devices
    assert (shown.temperature_celsius, shown.battery_fraction) == (0.0, None)


def test_fragments_are_called_by_the_job_and_stage_that_use_them() -> None:
    pi = device("pi-4")
    for number, granted in ((0, 40 * MIB), (1, 12 * MIB), (7, MIB)):
        held = pb.HeldFragment(digest=digest(number), state=pb.HeldFragment.RESIDENT)
        held.granted_bytes = granted
        pi.fragments.append(held)
    (shown,) = view_of(overview(pi, job(stage(0), stage(1)))).devices
    assert [(each.name, each.in_blocks) for each in shown.fragments] == [
        ("ocr/0", False),
        ("ocr/1", True),
        (digest(7)[:19], False),
    ]


def test_the_stage_that_limits_takes_longest_for_its_number_of_devices() -> None:
    stages = [stage(0, "a", compute=0.3), stage(1, "b", "c", "d", compute=0.6), stage(2, "e")]
    first, second, third = view_of(overview(job(*stages))).jobs[0].stages
    assert first.period_seconds == 0.3
    assert second.period_seconds == pytest.approx(0.2)
    assert [each.limits for each in (first, second, third)] == [True, False, False]


def test_while_a_stage_has_no_device_none_is_said_to_limit() -> None:
    stages = view_of(overview(job(stage(0, "a", compute=0.3), stage(1)))).jobs[0].stages
    assert not any(each.limits for each in stages)


def test_the_time_of_an_item_is_followed_back_from_its_last_task() -> None:
    shown = job(stage(0), stage(1), stage(2), stage(3))
    timing = pb.ItemTiming(item=3, input="3.npz", seconds=10.0, retries=1)
    timing.tasks.extend(
        [
            task(0, "a", 0.0, 0.0, 2.0, 1.5),
            task(1, "b", 2.0, 2.5, 4.0, 1.0),  # nobody waited for it at the end
            task(2, "c", 2.0, 5.0, 7.0, 2.0),
            task(3, "a", 7.0, 7.0, 9.0, 1.0),
        ]
    )
    shown.slowest.append(timing)
    (item,) = view_of(overview(shown)).jobs[0].slowest
    assert (item.waited_seconds, item.computed_seconds, item.stored_seconds) == (3.0, 4.5, 1.0)
    assert item.moved_seconds == pytest.approx(1.5)
    assert (item.stage, item.device, item.running, item.retries) == (2, "c", (), 1)


def test_an_item_in_progress_is_where_its_tasks_run() -> None:
    shown = job(stage(0), stage(1))
    timing = pb.ItemTiming(item=3, seconds=10.0)
    timing.tasks.extend([task(0, "a", 0.0, 0.0, 2.0, 1.5), task(1, "b", 2.0, 2.0, 0.0, 0.0)])
    shown.oldest.append(timing)
    (item,) = view_of(overview(shown)).jobs[0].oldest
    assert (item.running, item.stage, item.stored_seconds) == (("b",), 1, 0.0)


def test_the_parts_of_an_item_in_progress_are_no_more_than_it_took() -> None:
    """Its later tasks are given before their inputs are there."""
    shown = job(stage(0), stage(1), stage(2))
    timing = pb.ItemTiming(item=3, seconds=0.667)
    timing.tasks.extend(
        [
            task(0, "a", 0.0, 0.0, 0.2, 0.1),
            task(1, "b", 0.2, 0.1, 0.0, 0.0),
            task(2, "c", 0.0, 0.1, 0.0, 0.0),
        ]
    )
    shown.oldest.append(timing)
    (item,) = view_of(overview(shown)).jobs[0].oldest
    assert (item.running, item.stage, item.device) == (("b",), 1, "b")
    assert (item.waited_seconds, item.computed_seconds) == (0.0, 0.1)
    assert item.moved_seconds == pytest.approx(0.567)


def test_a_job_is_found_by_its_name_or_by_what_it_was_named_after() -> None:
    view = view_of(overview(*(job(name=name) for name in ("ocr", "read-0123abcd", "ocr-0123abcd"))))
    assert [each.name for each in view.jobs_called("ocr")] == ["ocr"]
    assert [each.name for each in view.jobs_called("read")] == ["read-0123abcd"]
    assert view.jobs_called("rea") == ()


def test_a_view_is_json_with_numbers() -> None:
    shown = json.loads(json.dumps(asdict(view_of(overview(device("pi-4"), job(stage(0)))))))
    assert shown["devices"][0]["budget_bytes"] == 64 * MIB
    assert shown["jobs"][0]["stages"][0]["digest"] == digest(0)
