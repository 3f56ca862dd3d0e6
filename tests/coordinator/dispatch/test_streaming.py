"""Items on their way: what a task waits for, where activations go, and when they may be dropped."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.dispatch.driving import MIB, Table, brief, chain, digest, job, only, some
from shoal_coordinator.dispatch.events import FailureKind, Mode, Stage
from shoal_coordinator.dispatch.instructions import (
    Execute,
    FinishItem,
    FinishJob,
    ForgetJob,
    Forward,
    Load,
    Release,
)
from shoal_protocol.units import Bytes

HOMES = {"a": ("d1",), "b": ("d2",)}


def two_stages_running(items: int = 3, mode: Mode = Mode.STREAMING) -> Table:
    table = Table()
    table.join("d1", resident=("a",))
    table.join("d2", resident=("b",))
    table.submit(job(chain("a", "b", homes=HOMES), items, mode=mode))
    return table


def test_a_streaming_task_waits_for_its_own_predecessor_only() -> None:
    table = two_stages_running()
    first, second = table.all(Execute)
    assert (first.item, second.item) == (0, 1)
    assert brief(table.answer(first)) == ["d2 runs 0.1", "d1 runs 2.0, to d2"]


def test_a_barrier_task_waits_for_every_item_at_every_stage_before() -> None:
    table = two_stages_running(mode=Mode.BARRIER)
    first, second = table.all(Execute)
    assert brief(table.answer(first)) == ["d1 runs 2.0, to d2"]
    assert brief(table.answer(second)) == []
    third = table.all(Execute)[-1]
    assert brief(table.answer(third)) == ["d2 runs 0.1", "d2 runs 1.1"]


def test_an_item_that_fails_does_not_hold_the_barrier_up() -> None:
    table = two_stages_running(items=2, mode=Mode.BARRIER)
    first, second = table.all(Execute)
    table.answer(first)
    given = table.fail(second, FailureKind.INVALID_INPUT)
    assert "d2 runs 0.1" in brief(given)


def test_a_join_waits_for_all_its_branches() -> None:
    table = Table()
    table.join("d1", 100, resident=("a", "b", "c", "d"))
    names, before = "abcd", [(), (0,), (0,), (1, 2)]
    stages = tuple(
        Stage(
            digest=digest(name),
            resident_bytes=Bytes(10 * MIB),
            least_bytes=Bytes(10 * MIB),
            predecessors=predecessors,
            takes_model_inputs=not predecessors,
            gives_results=name == "d",
        )
        for name, predecessors in zip(names, before, strict=True)
    )
    table.submit(job(stages))
    given = table.answer(table.all(Execute)[-1])
    left, right = some(given, Execute)
    assert {left.stage, right.stage} == {1, 2}
    assert some(table.answer(left), Execute) == []
    assert only(table.answer(right), Execute).stage == 3


def test_a_task_that_is_given_ahead_of_its_inputs_has_not_waited_for_a_device() -> None:
    table = Table()
    table.wait(100_000)  # the machine has been on for a while
    table.join("d1", resident=("a",))
    table.join("d2", resident=("b",))
    queue = table.submit(job(chain("a", "b", homes=HOMES), 40))
    while queue:
        if isinstance(one := queue.pop(0), Execute | FinishItem | Forward):
            queue += table.answer(one, milliseconds=0.05)
    given = table.all(Execute)
    assert any(one.ahead for one in given)
    assert max(one.waited for one in given) < 1_000_000_000


def test_the_activation_leaves_ahead_to_the_next_device() -> None:
    table = two_stages_running()
    first = table.all(Execute)[0]
    assert first.routes == ((1, "d2"),)
    given = table.answer(first)
    assert some(given, Forward) == []
    assert some(given, Execute)[0].stage == 1


def test_an_activation_that_was_not_delivered_is_forwarded() -> None:
    table = two_stages_running()
    given = table.answer(table.all(Execute)[0], delivered=False)
    execute, forward = some(given, Execute)[0], only(given, Forward)
    assert (execute.stage, execute.device) == (1, "d2")
    assert (forward.device, forward.target, forward.producer, forward.consumer) == (
        "d1",
        "d2",
        0,
        1,
    )


def test_a_device_that_serves_both_stages_keeps_the_item() -> None:
    table = Table()
    table.join("d1", resident=("a", "b"))
    table.join("d2", resident=("a", "b"))
    given = table.submit(job(chain("a", "b"), 6))
    seen = table.play(given)
    places: dict[int, str] = {}
    for execute in some(seen, Execute):
        assert execute.routes == ()
        assert places.setdefault(execute.item, execute.device) == execute.device
    assert set(places.values()) == {"d1", "d2"}


def test_an_activation_is_kept_until_all_its_consumers_have_finished() -> None:
    table = two_stages_running(items=1)
    producer = table.all(Execute)[0]
    consumer = only(table.answer(producer), Execute)
    assert table.all(Release) == []
    release = only(table.answer(consumer), Release)
    assert (release.device, release.item, release.stage) == ("d1", 0, 0)


def test_a_device_is_never_given_more_than_its_queue() -> None:
    table = Table()
    table.join("d1", resident=("a",))
    given = table.submit(job(chain("a"), 50))
    assert len(some(given, Execute)) == table.state.limits.queue_depth


def test_tasks_shorter_than_a_message_s_way_are_given_in_larger_numbers() -> None:
    table = Table()
    table.join("d1", resident=("a",))
    table.submit(job(chain("a"), 50))
    for number in range(4):
        table.answer(table.all(Execute)[number], milliseconds=1)
        table.wait(250)
    # Eight more fit into the time that it takes to ask for the next.
    assert table.state.devices["d1"].work.queued == 10
    given = table.answer(table.all(Execute)[4], milliseconds=30)
    assert some(given, Execute) == []


def test_a_device_that_runs_several_tasks_at_once_is_given_the_next_batch_as_well() -> None:
    for budget_mib, queued in ((500, 18), (60, 10), (19, 2)):
        table = Table()
        table.join("d1", budget_mib, resident=("a",))
        (stage,) = chain("a")
        stage = replace(stage, batch=8, batch_item_bytes=Bytes(10 * MIB))
        table.submit(job((stage,), 200))
        for number in range(20):
            table.answer(table.all(Execute)[number], milliseconds=50)
            table.wait(250)
        assert table.state.devices["d1"].work.queued == queued


def test_items_are_admitted_up_to_a_window_that_follows_the_devices() -> None:
    table = Table()
    table.join("d1", resident=("a",))
    table.submit(job(chain("a"), 1000))
    assert len(table.state.jobs["job"].active) == 4
    for name in ("d2", "d3", "d4"):
        table.join(name, resident=("a",))
    assert len(table.state.jobs["job"].active) == 10


def test_the_state_does_not_grow_with_the_job() -> None:
    table = two_stages_running(items=3000)
    largest = 0
    queue = list(table.given)
    while queue:
        one = queue.pop(0)
        if isinstance(one, Load | Execute | Forward | FinishItem):
            queue += table.answer(one)
        found = table.state.jobs.get("job")
        if found is not None:
            tasks = sum(len(queue.ready) + len(queue.reserved) for queue in found.queues)
            largest = max(largest, len(found.active) + tasks + len(table.state.pending))
    assert table.state.ended["job"].succeeded == 3000
    assert largest < 60


def test_stages_that_wait_are_finished_before_new_items_are_begun() -> None:
    table = Table()
    table.join("d1", resident=("a", "b"))
    given = table.submit(job(chain("a", "b"), 3))
    first, _ = some(given, Execute)
    assert brief(table.answer(first)) == ["d1 runs 0.1"]


def test_a_job_ends_when_its_last_item_is_stored() -> None:
    table = two_stages_running(items=1)
    consumer = only(table.answer(table.all(Execute)[0]), Execute)
    finish = only(table.answer(consumer), FinishItem)
    assert table.all(FinishJob) == []
    assert only(table.answer(finish), FinishJob).failure is None


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_over_any_graph_every_task_runs_once_after_its_predecessors(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    stages = tuple(
        Stage(
            digest=digest(f"s{index}"),
            resident_bytes=Bytes(10 * MIB),
            least_bytes=Bytes(10 * MIB),
            predecessors=tuple(
                sorted(data.draw(st.sets(st.integers(0, index - 1)))) if index else ()
            ),
        )
        for index in range(count)
    )
    items = data.draw(st.integers(1, 7))
    mode = data.draw(st.sampled_from(list(Mode)))
    table = Table()
    joined = []
    for index in range(data.draw(st.integers(1, 4))):
        mib = data.draw(st.sampled_from((10, 20, 30)))
        joined += table.join(f"d{index}", mib, single=data.draw(st.booleans()))
    waiting = [*joined, *table.submit(job(stages, items, mode=mode))]
    done: set[tuple[int, int]] = set()
    for _ in range(2000):
        answerable = [
            one for one in waiting if not isinstance(one, Release | ForgetJob | FinishJob)
        ]
        if not answerable:
            if "job" in table.state.ended:
                break
            waiting = table.wait(250)
            continue
        one = data.draw(st.sampled_from(answerable)) if len(answerable) < 4 else answerable[0]
        waiting.remove(one)
        if isinstance(one, Execute):
            assert (one.item, one.stage) not in done
            for before in stages[one.stage].predecessors:
                assert (one.item, before) in done
            if mode is Mode.BARRIER:
                assert all((i, s) in done for i in range(items) for s in range(one.stage))
            done.add((one.item, one.stage))
        waiting += table.answer(one)
    assert len(done) == items * count
    assert table.state.ended["job"].succeeded == items


def test_large_activations_of_short_tasks_do_not_pile_up() -> None:
    table = Table()
    table.join("d1", resident=("a",))
    stages = tuple(replace(stage, output_bytes=Bytes(MIB)) for stage in chain("a"))
    table.submit(job(stages, 50))
    for number in range(4):
        table.answer(table.all(Execute)[number], milliseconds=1)
        table.wait(250)
    # Of a budget of 24 MiB, a sixteenth may wait beyond the two that every device gets.
    assert table.state.devices["d1"].work.queued == 3
