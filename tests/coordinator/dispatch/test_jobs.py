"""Jobs side by side, their ends, their newer plans, and what the server may read of them."""

from dataclasses import replace

import pytest

from coordinator.dispatch.driving import Table, brief, chain, digest, job, only, some
from shoal_coordinator.dispatch import views
from shoal_coordinator.dispatch.events import (
    Failure,
    FailureKind,
    ItemsArrived,
    ItemsStored,
    JobCancelled,
    JobSpec,
    JobSubmitted,
)
from shoal_coordinator.dispatch.instructions import (
    Cancel,
    Execute,
    FailItem,
    FinishItem,
    FinishJob,
    Forward,
    Load,
    Release,
    Tier,
)
from shoal_coordinator.dispatch.machine import Limits
from shoal_protocol.units import nanoseconds


def one_device(*resident: str) -> Table:
    table = Table()
    table.join("d1", 100, resident=resident)
    return table


def test_a_higher_priority_takes_every_free_slot() -> None:
    table = one_device("a")
    first = some(table.submit(job(chain("a"), 20, name="low")), Execute)
    table.submit(job(chain("a"), 20, name="high", priority=1))
    given = table.answer(first[0])
    assert only(given, Execute).job == "high"


def test_equal_priorities_share() -> None:
    table = one_device("a", "b")
    given = table.submit(job(chain("a"), 200, name="one"))
    given += table.submit(job(chain("b"), 200, name="two"))
    tasks = [one.job for one in some(table.play(given), Execute)]
    assert abs(tasks[:200].count("one") - tasks[:200].count("two")) <= 4


def test_a_job_that_comes_later_does_not_make_up_for_what_it_missed() -> None:
    table = one_device("a", "b")
    queue = table.submit(job(chain("a"), 400, name="one"))
    for _ in range(200):
        queue += table.answer(queue.pop(0))
    queue += table.submit(job(chain("b"), 100, name="two"))
    tasks = [one.job for one in some(table.play(queue), Execute)][10:110]
    assert 40 <= tasks.count("one") <= 60


def test_a_job_that_was_idle_does_not_make_up_for_what_it_missed() -> None:
    table = one_device("a", "b")
    queue = table.submit(job(chain("b"), 0, name="idle", open_ended=True))
    queue += table.submit(job(chain("a"), 400, name="busy"))
    for _ in range(400):
        queue += table.answer(queue.pop(0))
    queue += table.feed(ItemsArrived(at=table.at(), job="idle", items=100))
    tasks = [one.job for one in some(table.play(queue), Execute)][10:110]
    assert 40 <= tasks.count("busy") <= 60


def test_an_idle_job_is_no_measure_for_one_that_comes_later() -> None:
    table = one_device("a", "b", "c")
    queue = table.submit(job(chain("b"), 0, name="idle", open_ended=True))
    queue += table.submit(job(chain("a"), 400, name="busy"))
    for _ in range(400):
        queue += table.answer(queue.pop(0))
    queue += table.submit(job(chain("c"), 100, name="new"))
    tasks = [one.job for one in some(table.play(queue), Execute)][10:110]
    assert 40 <= tasks.count("busy") <= 60


def test_a_job_that_has_worked_alone_is_not_starved_by_one_that_came_while_it_was_idle() -> None:
    table = one_device("a", "b")
    table.submit(job(chain("a"), 0, name="one", open_ended=True))
    table.play(table.feed(ItemsArrived(at=table.at(), job="one", items=200)))
    queue = table.submit(job(chain("b"), 200, name="two"))
    queue += table.feed(ItemsArrived(at=table.at(), job="one", items=400))
    tasks = [one.job for one in some(table.play(queue), Execute)][10:110]
    assert 40 <= tasks.count("one") <= 60


def test_jobs_share_a_device_whatever_they_are_served_on_others() -> None:
    table = Table()
    table.join("d1", 100, resident=("a",))
    table.join("d2", 100, resident=("b", "c"))
    alone = table.submit(job(chain("a", homes={"a": ("d1",)}), 400, name="elsewhere"))
    table.submit(job(chain("b", homes={"b": ("d2",)}), 400, name="here"))
    for _ in range(400):
        alone += table.answer(alone.pop(0))
    both = {"a": ("d1",), "c": ("d2",)}
    queue = alone + [one for one in table.all(Execute) if one.job == "here"]
    queue += table.submit(job(chain("a", "c", homes=both), 400, name="both"))
    tasks = [one for one in some(table.play(queue), Execute) if one.device == "d2"]
    jobs = [one.job for one in tasks if one.device == "d2"][10:110]
    assert 40 <= jobs.count("here") <= 60


def test_a_higher_priority_gets_the_fragment_loaded_too() -> None:
    table = Table()
    table.join("d1", 12)
    given = table.submit(job(chain("a"), 1000, name="low"))
    given = table.answer(only(given, Load))
    given += table.submit(job(chain("b"), 5, name="high", priority=1))
    seen = table.play(given)
    ends = [one.job for one in some(seen, FinishJob)]
    assert ends == ["high", "low"]


def test_a_load_has_the_highest_priority_of_the_jobs_that_it_serves() -> None:
    table = Table()
    table.submit(job(chain("a"), 10, name="low", priority=-5))
    table.submit(job(chain("a"), 10, name="high", priority=7))
    assert only(table.join("d1", 12), Load).priority == 7


def test_a_job_without_items_ends_at_once() -> None:
    table = Table()
    assert only(table.submit(job(chain("a"), 0)), FinishJob).failure is None


def test_items_whose_results_exist_are_not_made_again() -> None:
    table = one_device("a")
    seen = table.play(table.submit(job(chain("a"), 5), frozenset({0, 3})))
    assert {one.item for one in some(seen, Execute)} == {1, 2, 4}
    ended = table.state.ended["job"]
    assert ended.succeeded == 3
    assert ended.completed == {0, 3}


def test_a_result_that_cannot_be_written_fails_its_item_and_not_the_job() -> None:
    table = one_device("a")
    table.submit(job(chain("a"), 2))
    first, second = table.all(Execute)
    finish = only(table.answer(first), FinishItem)
    failure = Failure(kind=FailureKind.OUTPUT, message="no space left")
    given = table.feed(ItemsStored(at=table.at(), job="job", items=(finish.item,), failure=failure))
    assert only(given, FailItem).failure == failure
    table.play([second])
    ended = table.state.ended["job"]
    assert (ended.succeeded, ended.failed, ended.failure) == (1, 1, None)


def test_a_cancelled_job_leaves_nothing_behind() -> None:
    table = Table()
    table.join("d1", resident=("a",))
    table.join("d2", resident=("b",))
    table.submit(job(chain("a", "b"), 5))
    table.answer(table.all(Execute)[0])
    given = table.feed(JobCancelled(at=table.at(), job="job", reason="not needed"))
    failure = only(given, FinishJob).failure
    assert failure is not None
    assert (failure.kind, failure.message) == (FailureKind.CANCELLED, "not needed")
    running = set(table.state.pending)
    assert {one.cancelled for one in some(given, Cancel)} == running
    assert some(given, Release)
    given_before: list[Load | Execute] = [*table.all(Load), *table.all(Execute)]
    for one in given_before:
        if one.instruction in running:
            table.fail(one, FailureKind.CANCELLED)
    assert not any(
        device.work.load or device.work.outputs for device in table.state.devices.values()
    )
    assert table.wait(1000) == [] or not table.all(Execute)[-1].instruction > max(running)


def test_a_deadline_ends_a_job_that_waits_for_devices() -> None:
    table = Table()
    table.submit(job(chain("a"), 3, deadline=nanoseconds(10)))
    assert table.wait(9_900) == []
    failure = only(table.wait(250), FinishJob).failure
    assert failure is not None
    assert failure.kind is FailureKind.DEADLINE
    assert failure.message == "the deadline passed with 3 of 3 items not ended"


def test_a_newer_plan_moves_the_items_under_way_and_keeps_the_results() -> None:
    table = Table()
    table.join("d1", resident=("a",))
    table.join("d2", resident=("a",))
    queue = table.submit(job(chain("a", homes={"a": ("d1",)}), 20))
    for _ in range(12):
        queue += table.answer(queue.pop(0))
    before = table.state.jobs["job"].succeeded
    given = table.submit(job(chain("a", homes={"a": ("d2",)}), 20, epoch=2))
    assert {(one.device, one.epoch) for one in some(given, Execute)} == {("d2", 2)}
    for one in queue:
        if isinstance(one, Execute):
            table.fail(one, FailureKind.CANCELLED)
        elif isinstance(one, FinishItem):
            table.answer(one)
    table.play(given)
    assert before > 0
    assert table.state.ended["job"].succeeded == 20
    assert len({one.item for one in table.all(FinishItem)}) == len(table.all(FinishItem)) == 20


def test_other_terms_are_taken_over_and_nothing_starts_over() -> None:
    table = one_device("a")
    spec = replace(job(chain("a"), 20), parallelism=1)
    first = some(table.submit(spec), Execute)
    assert [one.item for one in first] == [0]
    given = table.submit(replace(spec, parallelism=2, priority=4))
    assert [one.item for one in some(given, Execute)] == [1]
    assert some(given, Cancel) == []
    assert table.state.jobs["job"].spec.priority == 4
    table.play([*first, *given])
    assert sorted(one.item for one in table.all(FinishItem)) == list(range(20))


def test_a_deadline_that_was_raised_in_time_is_the_one_that_counts() -> None:
    table = Table()
    spec = job(chain("a"), 3, deadline=nanoseconds(10))
    table.submit(spec)
    table.submit(replace(spec, deadline=nanoseconds(20)))
    assert table.wait(19_900) == []
    assert only(table.wait(250), FinishJob).failure is not None


def test_a_job_of_higher_priority_goes_first_from_when_it_has_it() -> None:
    table = one_device("a")
    first = some(table.submit(job(chain("a"), 20, name="one")), Execute)
    other = job(chain("a"), 20, name="other")
    table.submit(other)
    table.submit(replace(other, priority=1))
    assert only(table.answer(first[0]), Execute).job == "other"


def test_an_older_plan_is_ignored() -> None:
    table = one_device("a")
    table.submit(job(chain("a"), 5, epoch=3))
    assert table.submit(job(chain("a"), 5, epoch=2)) == []
    assert table.submit(job(chain("a"), 5, epoch=3)) == []


def test_a_name_can_be_used_again_once_its_job_has_ended() -> None:
    table = one_device("a")
    for _ in range(2):
        table.play(table.submit(job(chain("a"), 2)))
    assert len(table.all(FinishJob)) == 2


def test_a_job_counts_what_it_did() -> None:
    table = Table()
    table.join("d1", cached=("a",))
    seen = table.submit(job(chain("a"), 3))
    table.now += 5_000_000
    table.play(seen)
    ended = views.job(table.state, "job")
    assert ended is not None
    assert (ended.phase, ended.items, ended.succeeded, ended.failed) == ("Complete", 3, 3, 0)
    assert dict(zip(Tier, ended.tiers, strict=True)) == {1: 2, 2: 1, 3: 0, 4: 0}
    (queue,) = ended.queues
    assert (queue.finished, queue.waiting, queue.running) == (3, 0, 0)
    assert abs(queue.times.quantile(0.5) - 10_000_000) < 700_000
    assert ended.latency.total == 3


def test_an_ended_job_says_who_served_each_stage() -> None:
    table = Table()
    for name in ("d1", "d2", "d3"):
        table.join(name)
    homes = {"a": ("d1",), "b": ("d2", "d3")}
    table.play(table.submit(job(chain("a", "b", homes=homes), 6)))
    ended = table.state.ended["job"]
    assert ended.phase == "Complete"
    assert [set(queue.devices) for queue in ended.queues] == [{"d1"}, {"d2", "d3"}]


def test_a_view_shows_a_device_s_ledger_and_outlives_it() -> None:
    table = Table()
    table.join("d1", 24)
    table.play(table.submit(job(chain("a"), 3)))
    (view,) = views.devices(table.state)
    assert view.device is not None
    assert (view.phase, view.device.memory.resident_bytes) == ("Ready", 10 << 20)
    assert (view.tally.tasks, view.tally.loads) == (3, 1)
    table.lose("d1")
    (view,) = views.devices(table.state)
    assert (view.name, view.phase, view.device) == ("d1", "Lost", None)
    assert (view.tally.tasks, view.tally.loads) == (3, 1)


def test_the_memory_of_ended_jobs_is_bounded() -> None:
    table = Table(Limits(ended_jobs=3))
    table.join("d1", resident=("a",))
    for index in range(10):
        table.play(table.submit(job(chain("a"), 20, name=f"job-{index}")))
    assert list(table.state.ended) == ["job-7", "job-8", "job-9"]
    assert table.state.services == {}
    assert table.state.by_digest == {}


def test_the_choice_is_one_tuple() -> None:
    table = one_device("a")
    execute = some(table.submit(job(chain("a"))), Execute)[0]
    assert execute.why == (1, 0, 0, 0, 1, "d1")
    assert execute.digest == digest("a")


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_a_transcript_of_a_loss(lost: int) -> None:
    table = Table()
    homes = {"a": ("d1",), "b": ("d2",)}
    table.join("d1", resident=("a",))
    table.join("d2", resident=("b",))
    queue = table.submit(job(chain("a", "b", homes=homes), 3))
    for _ in range(lost):
        queue += table.answer(queue.pop(0))
    table.lose("d2")
    queue = [one for one in queue if getattr(one, "device", "") != "d2"]
    queue += table.join("d2", resident=("b",))
    lines = brief(table.play(queue))
    assert lines[-1] == "FinishJob"
    assert table.state.ended["job"].succeeded == 3


def items_on_their_way(spec: JobSpec) -> int:
    """How many items are given to a device that answers, while nothing is stored."""
    table = one_device("a")
    queue = table.submit(spec)
    stored: list[FinishItem] = []
    while queue:
        one = queue.pop(0)
        if isinstance(one, FinishItem):
            stored.append(one)
        else:
            queue += table.answer(one)
    begun = len(table.all(Execute))
    assert len(stored) == begun
    # Each that is stored makes way for one more, and in the end all of them are done.
    given = table.answer(stored[0])
    assert len(some(given, Execute)) == 1
    table.play([*stored[1:], *given])
    assert table.state.ended["job"].succeeded == spec.items
    return begun


def test_items_that_are_being_stored_take_no_place_up_to_a_bound() -> None:
    spec = job(chain("a"), 500)
    window = 4
    assert items_on_their_way(spec) == 64 + window


def test_a_users_own_bound_counts_items_that_are_being_stored() -> None:
    assert items_on_their_way(replace(job(chain("a"), 50), parallelism=3)) == 3


def test_short_tasks_are_sent_ahead_to_the_only_device_that_serves_the_next_stage() -> None:
    homes = {"a": ("d1",), "b": ("d2",)}
    table = Table()
    table.join("d1", resident=("a",))
    table.join("d2", resident=("b",))
    queue = table.submit(job(chain("a", "b", homes=homes), 200))
    late: list[Execute] = []
    # Once it is known how short its tasks are, the second device answers only when the first has
    # nothing left to do. How deep the queues may be is looked at with the clock's ticks.
    while queue or late:
        queue += table.wait(10)
        one = queue.pop(0) if queue else late.pop(0)
        known = len(table.all(Execute)) > 20
        if isinstance(one, Execute) and one.device == "d2" and queue and known:
            late.append(one)
        elif isinstance(one, Execute | FinishItem | Forward):
            queue += table.answer(one, milliseconds=0.05)
    assert table.state.ended["job"].succeeded == 200
    # Until it is known how short they are, some go without a route.
    assert [one.item for one in table.all(Forward) if one.item >= 50] == []


def test_an_open_ended_job_runs_items_as_they_arrive_and_ends_when_cancelled() -> None:
    table = one_device("a")
    assert not some(table.submit(job(chain("a"), 0, open_ended=True)), FinishJob)
    for items in (2, 3):
        given = table.feed(ItemsArrived(at=table.at(), job="job", items=items))
        seen = table.play(given)
        assert not some(seen, FinishJob)
    assert [one.item for one in some(table.given, FinishItem)] == [0, 1, 2]
    ended = table.feed(JobCancelled(at=table.at(), job="job", reason="the client has gone"))
    assert only(ended, FinishJob).failure is not None


def test_an_open_ended_job_completes_when_its_last_items_have_ended() -> None:
    table = one_device("a")
    table.submit(job(chain("a"), 0, open_ended=True))
    arrived = table.feed(ItemsArrived(at=table.at(), job="job", items=2, last=True))
    assert not some(arrived, FinishJob)
    assert only(table.play(arrived), FinishJob).failure is None
    assert table.state.ended["job"].succeeded == 2
    # What comes after the last is not taken.
    assert table.feed(ItemsArrived(at=table.at(), job="job", items=3)) == []


def test_an_open_ended_job_that_is_done_completes_when_no_more_arrive() -> None:
    table = one_device("a")
    table.play(table.submit(job(chain("a"), 1, open_ended=True)))
    ended = table.feed(ItemsArrived(at=table.at(), job="job", items=1, last=True))
    assert only(ended, FinishJob).failure is None


def test_a_job_begins_behind_the_items_that_ended_in_earlier_runs() -> None:
    table = one_device("a")
    spec = replace(job(chain("a"), 6), first=3)
    event = JobSubmitted(at=table.at(), job=spec, completed=frozenset({4}))
    table.play(table.feed(event))
    assert [one.item for one in some(table.given, FinishItem)] == [3, 5]
    assert table.state.ended["job"].succeeded == 2


def test_items_that_arrive_for_a_job_that_has_ended_are_ignored() -> None:
    table = one_device("a")
    table.submit(job(chain("a"), 0, open_ended=True))
    table.feed(JobCancelled(at=table.at(), job="job", reason=""))
    assert table.feed(ItemsArrived(at=table.at(), job="job", items=1)) == []


def test_a_device_that_is_lost_costs_an_open_ended_job_no_item() -> None:
    table = one_device("a")
    table.submit(job(chain("a"), 0, open_ended=True))
    table.feed(ItemsArrived(at=table.at(), job="job", items=2))
    table.lose("d1")
    seen = table.play(table.join("d1", 100, resident=("a",)))
    assert sorted(one.item for one in some(seen, FinishItem)) == [0, 1]
