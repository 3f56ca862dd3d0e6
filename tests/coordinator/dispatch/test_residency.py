"""What is loaded where: the model gate, the four tiers, budgets, and changing fragments rarely."""

from collections import Counter

import pytest

from coordinator.dispatch.driving import (
    MIB,
    MILLISECOND,
    Table,
    brief,
    chain,
    digest,
    job,
    only,
    some,
)
from shoal_coordinator.dispatch import services
from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.events import FailureKind, JobCancelled, Telemetry
from shoal_coordinator.dispatch.instructions import (
    Cancel,
    Execute,
    FinishJob,
    Load,
    Prefetch,
    Tier,
    Unload,
)
from shoal_coordinator.dispatch.machine import Limits
from shoal_coordinator.dispatch.state import Service
from shoal_protocol.units import Nanoseconds, nanoseconds


def test_a_task_is_given_only_where_its_fragment_is_resident() -> None:
    table = Table()
    table.join("d1")
    load = only(table.submit(job(chain("a"))), Load)
    assert table.all(Execute) == []
    assert only(table.answer(load), Execute).tier is Tier.IDLE


def test_the_first_fragment_is_loaded_everywhere_and_the_others_just_in_time() -> None:
    table = Table()
    for name in ("d1", "d2", "d3"):
        table.join(name)
    given = table.submit(job(chain("a", "b"), 5))
    assert brief(given) == [f"d{index} loads a (tier 3)" for index in (1, 2, 3)]
    given = table.answer(some(given, Load)[0])
    assert "b" in {load.digest[7] for load in some(given, Load)}


def test_a_plan_puts_each_stage_on_its_homes_and_nowhere_else() -> None:
    table = Table()
    for name in ("d1", "d2", "d3"):
        table.join(name)
    homes = {"a": ("d2",), "b": ("d1", "d3")}
    seen = table.play(table.submit(job(chain("a", "b", homes=homes), 6)))
    assert {(load.device, load.digest[7]) for load in some(seen, Load)} == {
        ("d2", "a"),
        ("d1", "b"),
        ("d3", "b"),
    }


def test_a_fragment_is_loaded_while_the_stage_before_computes() -> None:
    table = Table()
    table.join("d1", resident=("a",))
    table.join("d2")
    homes = {"a": ("d1",), "b": ("d2",)}
    given = table.submit(job(chain("a", "b", homes=homes), 1))
    assert brief(given) == ["d1 runs 0.0", "d2 loads b (tier 3)"]


@pytest.mark.parametrize("order", [("cached", "idle", "busy"), ("busy", "idle", "cached")])
def test_the_tiers_come_in_their_order(order: tuple[str, ...]) -> None:
    table = Table()
    for name in order:
        resident = ("old",) if name == "busy" else ()
        cached = ("a",) if name == "cached" else ()
        table.join(name, 12, resident=resident, cached=cached)
    # A stage that is not a first one is loaded once, where it is cheapest.
    table.join("first", 12, resident=("z",))
    homes = {"z": ("first",)}
    given = table.submit(job(chain("z", "a", homes=homes), 1))
    load = only(given, Load)
    assert (load.device, load.tier) == ("cached", Tier.CACHED)
    given = table.lose("cached")
    load = only(given, Load)
    assert (load.device, load.tier) == ("idle", Tier.IDLE)
    given = table.lose("idle")
    assert brief(given) == ["busy unloads o"]
    load = only(table.answer(only(given, Unload)), Load)
    assert (load.device, load.tier) == ("busy", Tier.EVICT)


def test_only_the_first_task_after_a_load_counts_as_that_tier() -> None:
    table = Table()
    table.join("d1", cached=("a",))
    load = only(table.submit(job(chain("a"), 3)), Load)
    tiers = [execute.tier for execute in some(table.answer(load), Execute)]
    assert tiers == [Tier.CACHED, Tier.RESIDENT]


def test_under_single_one_fragment_goes_before_another_comes() -> None:
    table = Table()
    table.join("d1", 100, single=True)
    seen = brief(table.play(table.submit(job(chain("a", "b"), 2))))
    wanted = ["d1 loads a (tier 3)", "d1 unloads a", "d1 loads b (tier 4)"]
    assert [line for line in seen if "load" in line] == wanted


def test_with_fewer_devices_than_stages_a_batch_runs_before_the_fragment_changes() -> None:
    table = Table()
    table.join("d1", 100, single=True)
    seen = table.play(table.submit(job(chain("a", "b", "c"), 64)))
    assert table.state.ended["job"].succeeded == 64
    assert len(some(seen, Load)) <= 3 * 64 / 16 + 3


def test_two_devices_and_three_stages_neither_stop_nor_thrash() -> None:
    table = Table()
    given = table.join("d1", 12, single=True) + table.join("d2", 12, single=True)
    seen = table.play(given + table.submit(job(chain("a", "b", "c"), 60)))
    for _ in range(40):
        if "job" in table.state.ended:
            break
        seen += table.play(table.wait(250))
    assert table.state.ended["job"].succeeded == 60
    assert len(some(seen, Load)) <= 40


def test_enough_devices_settle_with_a_fragment_each() -> None:
    table = Table()
    for name in ("d1", "d2", "d3"):
        table.join(name, 12, single=True)
    seen = table.play(table.submit(job(chain("a", "b", "c"), 300)))
    assert table.state.ended["job"].succeeded == 300
    assert len(some(seen, Load)) <= 12


def test_a_fragment_with_tasks_is_not_evicted() -> None:
    table = Table()
    table.join("d1", 12, resident=("a",))
    table.submit(job(chain("a"), 10))
    table.submit(job(chain("b"), 10, name="other"))
    table.wait(500)
    assert table.all(Unload) == []


def test_the_turn_of_an_equal_job_comes_on_a_device_that_holds_one_fragment() -> None:
    table = Table()
    table.join("d1", 12, resident=("a",))
    given = table.submit(job(chain("a"), 10_000))
    given += table.submit(job(chain("b"), 4, name="other"))
    for _ in range(60):
        table.now += 100_000_000
        queue, given = given, []
        for one in queue:
            given += table.answer(one) if not isinstance(one, Prefetch | FinishJob) else []
        given += table.wait(1)
        if "other" in table.state.ended:
            break
    assert table.state.ended["other"].succeeded == 4
    assert "job" in table.state.jobs


def test_a_fragment_larger_than_every_budget_is_refused_at_once() -> None:
    table = Table()
    table.join("pi-zero", 24)
    table.join("pi-4", 24)
    table.join("jetson", 32)
    stages = (*chain("a"), *chain("b", mib=41.2), *chain("c"), *chain("d", mib=50))
    failure = only(table.submit(job(stages, name="ppocr-rec-3")), FinishJob).failure
    assert failure is not None
    assert failure.kind is FailureKind.BUDGET
    assert failure.message == (
        "fragment 1 of ppocr-rec-3 needs 41.2 MiB resident; pi-zero has 24 MiB, pi-4 24 MiB, "
        "jetson 32 MiB; cut finer or raise the budget"
    )
    assert [each.fragment for each in failure.outgrown] == [1, 3]
    assert failure.outgrown[1].need_bytes == 50 << 20


def test_without_a_device_a_job_waits() -> None:
    table = Table()
    assert table.submit(job(chain("a"))) == []
    assert brief(table.join("d1")) == ["d1 loads a (tier 3)"]


def test_a_job_waits_for_the_homes_of_its_plan_before_it_is_refused() -> None:
    table = Table()
    table.join("small", 4)
    assert table.submit(job(chain("a", homes={"a": ("large",)}))) == []
    assert brief(table.join("large", 24)) == ["large loads a (tier 3)"]


def test_a_home_that_never_comes_is_not_waited_for_for_ever() -> None:
    table = Table()
    table.join("small", 4)
    table.submit(job(chain("a", homes={"a": ("large",)})))
    while not table.all(FinishJob):
        table.measure("small")
        table.wait(1000)
        assert table.now < 60_000 * MILLISECOND
    (failure,) = [each.failure for each in table.all(FinishJob)]
    assert failure is not None
    assert failure.kind is FailureKind.BUDGET


def test_the_ledger_takes_what_was_measured() -> None:
    table = Table()
    table.join("d1", 24)
    load = only(table.submit(job(chain("a", "b"), 1)), Load)
    given = table.answer(load, resident_mib=16)
    # 16 and 10 MiB are more than 24: the second has to wait until the first may go.
    assert some(given, Load) == []
    given = table.answer(only(given, Execute))
    assert brief(given) == ["d1 unloads a"]


def test_a_fragment_that_turns_out_too_large_is_tried_elsewhere() -> None:
    table = Table()
    table.join("d1", 12)
    table.join("d2", 24)
    homes = {"a": ("d1", "d2")}
    first, second = some(table.submit(job(chain("a", homes=homes))), Load)
    assert table.fail(first, FailureKind.BUDGET, need_mib=18) == []
    assert only(table.answer(second), Execute).device == "d2"
    assert some(table.wait(5000), Load) == []


def test_a_fragment_that_turns_out_too_large_everywhere_ends_the_job() -> None:
    table = Table()
    table.join("d1", 12)
    load = only(table.submit(job(chain("a"))), Load)
    failure = only(table.fail(load, FailureKind.BUDGET, need_mib=18), FinishJob).failure
    assert failure is not None
    assert "needs 18 MiB resident; d1 has 12 MiB" in failure.message


def test_what_a_fragment_was_measured_to_take_is_known_in_the_next_session() -> None:
    table = Table()
    table.join("d1", 12)
    load = only(table.submit(job(chain("a", mib=10, least_mib=4))), Load)
    less = only(table.fail(load, FailureKind.BUDGET, need_mib=14), Load)
    assert (load.granted, less.granted) == (10 * MIB, 8 * MIB)
    table.lose("d1")
    assert only(table.join("d1", 12), Load).granted == 8 * MIB
    # With a larger budget all fits, and nothing is forgotten.
    table.lose("d1")
    assert only(table.join("d1", 24), Load).granted == 10 * MIB
    assert table.state.devices["d1"].memory.excess == {digest("a"): 4 * MIB}


def test_a_device_on_which_nothing_helped_may_try_again_in_its_next_session() -> None:
    table = Table()
    table.join("d1", 12)
    table.join("d2", 24)
    first = only(table.submit(job(chain("a", homes={"a": ("d1",)}))), Load)
    table.fail(first, FailureKind.BUDGET, need_mib=18)
    table.lose("d1")
    table.join("d1", 12)
    assert table.state.devices["d1"].memory.excess == {}


def test_a_refusal_where_there_was_room_says_nothing_about_the_fragment_s_size() -> None:
    table = Table()
    table.join("d1", 12)
    load = only(table.submit(job(chain("a"))), Load)
    assert some(table.fail(load, FailureKind.BUDGET, need_mib=10, have_mib=11), FinishJob) == []
    assert digest("a") not in table.state.devices["d1"].memory.excess
    again = only(table.wait(1000), Load)
    assert again.granted == load.granted
    assert only(table.answer(again), Execute).device == "d1"


def test_a_full_disk_is_avoided_for_a_while() -> None:
    table = Table()
    table.join("d1", 12)
    table.join("d2", 12)
    homes = {"a": ("d1",)}
    load = only(table.submit(job(chain("a", homes=homes))), Load)
    assert brief(table.fail(load, FailureKind.DISK_FULL)) == ["d2 loads a (tier 3)"]


@pytest.mark.parametrize("kind", [FailureKind.CORRUPT, FailureKind.UNAVAILABLE])
def test_a_load_that_fails_is_tried_again_later_and_not_for_ever(kind: FailureKind) -> None:
    table = Table()
    table.join("d1", 12)
    table.submit(job(chain("a")))
    for _ in range(600):
        if "job" in table.state.ended:
            break
        pending = [p for p in table.state.pending if p == table.all(Load)[-1].instruction]
        if pending:
            table.fail(table.all(Load)[-1], kind)
        table.wait(250)
    failure = table.state.ended["job"].failure
    assert failure is not None
    assert failure.kind is kind
    assert len(table.all(Load)) == table.state.limits.load_tries


def test_an_idle_home_brings_its_other_fragment_to_disk() -> None:
    table = Table()
    table.join("d1", 12, resident=("a",))
    table.join("d2", 12, resident=("b",))
    homes = {"a": ("d1",), "b": ("d2",), "c": ("d2",)}
    table.submit(job(chain("a", "b", "c", homes=homes), 1))
    prefetch = only(table.wait(250), Prefetch)
    assert (prefetch.device, prefetch.digest) == ("d2", digest("c"))
    table.answer(prefetch)
    assert digest("c") in table.state.devices["d2"].disk.cached


def test_what_a_device_dropped_for_a_load_is_not_on_its_disk_any_more() -> None:
    table = Table()
    table.join("d1", cached=("x", "y"))
    load = only(table.submit(job(chain("a"), 1)), Load)
    table.answer(load, dropped=("x",))
    assert set(table.state.devices["d1"].disk.cached) == {digest("a"), digest("y")}
    assert digest("x") not in table.state.holders


def test_a_disk_without_room_for_all_fragments_of_its_device_is_not_filled_in_circles() -> None:
    table = Table()
    table.join("d1", 12, resident=("a",))
    table.join("d2", 12, resident=("b",), cached=("c",))
    homes = {"a": ("d1",), "b": ("d2",), "c": ("d2",), "d": ("d2",)}
    table.submit(job(chain("a", "b", "c", "d", homes=homes), 1))
    prefetch = only(table.wait(250), Prefetch)
    assert (prefetch.device, prefetch.digest) == ("d2", digest("d"))
    table.answer(prefetch, dropped=("c",))
    assert some(table.wait(600_000), Prefetch) == []


def test_what_a_tick_looks_at_grows_with_devices_and_fragments_and_not_with_their_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices, fragments = 40, 80
    table = Table(Limits(silence=nanoseconds(60)))
    for number in range(devices):
        table.join(f"d{number}", 12)
    names = [f"{number:02}" for number in range(fragments)]
    homes = {name: (f"d{number % devices}",) for number, name in enumerate(names)}
    for name in names:
        table.submit(job(chain(name, homes=homes), 10, name=name))
    for load in table.all(Load):
        table.answer(load)
    table.wait(10_000)  # every home has joined, or is not waited for any more
    looks: Counter[str] = Counter()
    look = services.size_on

    def counted(device: Device, service: Service, room: int | None = None) -> int:
        looks[device.name] += 1
        return look(device, service, room)

    monkeypatch.setattr(services, "size_on", counted)
    table.wait(250)
    assert looks.total() < 8 * (devices + fragments)


def test_a_second_copy_of_a_fragment_is_kept_on_another_disk() -> None:
    table = Table()
    table.join("d1", 12, resident=("a",))
    table.join("d2", 12, resident=("x",))
    table.submit(job(chain("a", homes={"a": ("d1",)}), 1))
    prefetch = only(table.wait(250), Prefetch)
    assert (prefetch.device, prefetch.digest, prefetch.peers) == ("d2", digest("a"), ("d1",))


def test_what_was_on_its_way_for_a_cancelled_job_makes_way_for_the_next_one() -> None:
    table = Table()
    table.join("d1", 12, cached=("b",))
    load = only(table.submit(job(chain("a"))), Load)
    assert some(table.submit(job(chain("b"), name="other")), Load) == []
    given = table.feed(JobCancelled(at=table.at(), job="job", reason=""))
    assert only(given, Cancel).cancelled == load.instruction
    given = table.fail(load, FailureKind.CANCELLED)
    assert brief(given) == ["d1 loads b (tier 2)"]


def test_what_was_on_its_way_for_two_jobs_goes_on_for_the_one_that_is_left() -> None:
    table = Table()
    table.join("d1")
    table.submit(job(chain("a")))
    table.submit(job(chain("a"), name="other"))
    for name, cancelled in (("job", 0), ("other", 1)):
        given = table.feed(JobCancelled(at=table.at(), job=name, reason=""))
        assert len(some(given, Cancel)) == cancelled


def test_a_cancelled_load_is_no_failure_and_begins_anew_for_a_job_that_came_meanwhile() -> None:
    table = Table()
    table.join("d1")
    load = only(table.submit(job(chain("a"))), Load)
    table.feed(JobCancelled(at=table.at(), job="job", reason=""))
    assert some(table.submit(job(chain("a"), name="again")), Load) == []
    given = table.fail(load, FailureKind.CANCELLED)
    assert brief(given) == ["d1 loads a (tier 3)"]
    assert table.state.devices["d1"].health.backoffs == {}


def test_a_prefetch_that_nobody_needs_any_more_is_cancelled_and_the_next_one_not_delayed() -> None:
    table = Table()
    table.join("d1", 12, resident=("a",))
    table.join("d2", 12, resident=("x",))
    table.submit(job(chain("a", homes={"a": ("d1",)}), 1))
    prefetch = only(table.wait(250), Prefetch)
    given = table.feed(JobCancelled(at=table.at(), job="job", reason=""))
    assert prefetch.instruction in [each.cancelled for each in some(given, Cancel)]
    table.fail(prefetch, FailureKind.CANCELLED)
    table.submit(job(chain("a", homes={"a": ("d1",)}), 1, name="again"))
    assert only(table.wait(250), Prefetch).device == "d2"


def test_jobs_with_the_same_fragments_share_what_is_resident() -> None:
    table = Table()
    table.join("d1")
    table.play(table.submit(job(chain("a"), 3)))
    seen = table.play(table.submit(job(chain("a"), 3, name="again")))
    assert some(seen, Load) == []


def test_a_load_names_peers_that_have_the_fragment() -> None:
    table = Table()
    table.join("d1", cached=("a",))
    given = table.submit(job(chain("a", homes={"a": ("d2",)})))
    assert some(given, Load) == []
    assert only(table.join("d2"), Load).peers == ("d1",)


def test_a_peer_of_unknown_distance_is_neither_the_nearest_nor_the_farthest() -> None:
    table = Table()
    for name, milliseconds in (("far", 9), ("unknown", None), ("near", 1)):
        table.join(name, cached=("a",))
        trip = None if milliseconds is None else Nanoseconds(milliseconds * MILLISECOND)
        table.measure(name, Telemetry(round_trip=trip))
    table.submit(job(chain("a", homes={"a": ("new",)})))
    assert only(table.join("new"), Load).peers == ("near", "unknown", "far")
