"""Items of light jobs: when they travel, and what becomes of them when something goes wrong."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from coordinator.dispatch.driving import MILLISECOND, Table, brief, chain, digest, job, only, some
from shoal_coordinator.dispatch.events import (
    Failure,
    FailureKind,
    InstructionFailed,
    ItemsArrived,
    ItemsTravelled,
    JobCancelled,
    JobSpec,
    LegPlanned,
)
from shoal_coordinator.dispatch.instructions import (
    Cancel,
    Execute,
    FailItem,
    FinishItem,
    Instruction,
    Load,
    PeerLost,
    Plan,
    Travel,
)
from shoal_protocol.units import Nanoseconds


def light(items: int, a: str = "x", b: str = "y", **more: object) -> JobSpec:
    stages = chain("a", "b", "c", homes={"a": tuple(a), "b": tuple(b), "c": ("z",)})
    return replace(job(stages, items), light=True, **more)  # type: ignore[arg-type]


def joined(*more: str) -> Table:
    """Three devices with a fragment each, and others with all of them."""
    table = Table()
    for device, fragment in (("x", "a"), ("y", "b"), ("z", "c")):
        table.join(device, resident=(fragment,))
    for name in more:
        table.join(name, 100, resident=("a", "b", "c"))
    return table


def planned(table: Table, plans: list[Instruction]) -> list[Instruction]:
    given = []
    for plan in some(plans, Plan):
        given += table.feed(LegPlanned(at=table.at(), instruction=plan.instruction))
    return given


def opened(table: Table, spec: JobSpec) -> list[Instruction]:
    """A job some of whose items ran task by task, and whose route is open; what it gave then."""
    given, more = table.submit(spec), list[Instruction]()
    while not some(given, Plan):
        more = [order for each in given if isinstance(each, Execute | FinishItem)
                for order in table.answer(each, milliseconds=1)]  # fmt: skip
        assert more, "no route is planned"
        given = more
    finish = [each for each in given if isinstance(each, Execute | FinishItem)]
    travels = planned(table, given)
    return travels + table.play(finish)


def come(table: Table, travel: Travel) -> list[Instruction]:
    return come_together(table, [travel])


def come_together(table: Table, travels: Sequence[Travel]) -> list[Instruction]:
    compute = tuple(Nanoseconds(MILLISECOND) for _ in travels[0].devices)
    numbers = tuple(each.instruction for each in travels)
    return table.feed(ItemsTravelled(at=table.at(), instructions=numbers, compute=compute))


def failed(table: Table, travel: Travel, kind: FailureKind) -> list[Instruction]:
    failure = Failure(kind=kind, message="it went wrong")
    number = travel.instruction
    return table.feed(InstructionFailed(at=table.at(), instruction=number, failure=failure))


def test_items_that_come_through_together_are_finished_and_followed_together() -> None:
    table = joined()
    travels = some(opened(table, light(80)), Travel)
    void = replace(travels[0], instruction=1 << 40)
    given = come_together(table, [*travels, void, travels[0]])
    assert {each.item for each in some(given, FinishItem)} == {each.item for each in travels}
    assert len(some(given, FinishItem)) == len(travels)
    assert some(given, Travel), "the next take their place"
    (only_job,) = table.state.jobs.values()
    for queue in only_job.queues:
        assert queue.times.total == queue.finished
        assert (queue.passed, queue.running) == (len(travels), len(some(given, Travel)))


def test_items_travel_once_every_stage_has_run_and_every_leg_is_planned() -> None:
    table = joined()
    given = opened(table, light(50))
    assert {each.stage for each in table.all(Execute)} == {0, 1, 2}
    assert some(given, Travel)
    assert [(each.device, each.stages) for each in table.all(Plan)] == [
        ("x", (0, 1)),
        ("y", (1, 2)),
        ("z", (2, 3)),
    ]


def test_nothing_is_admitted_while_a_route_is_planned() -> None:
    table = joined()
    opened(table, light(50))
    table.feed(JobCancelled(at=table.at(), job="job", reason="enough"))
    given = table.submit(replace(light(50), name="next"))
    assert some(given, Plan), "every stage has run for the job before"
    assert not some(given, Execute)
    assert len(some(planned(table, given), Travel)) == table.state.jobs["next"].window


def test_every_device_of_a_wide_pool_has_work_where_items_carry_little() -> None:
    """There are too many for routes, and an item may take any time."""
    table, names = Table(), [f"d{number}" for number in range(300)]
    for name in names:
        table.join(name, resident=("a",))
    stages = chain("a", homes={"a": tuple(names)})
    given = table.submit(replace(job(stages, 5000), light=True))
    assert {each.device for each in some(given, Execute)} == {*names}


def test_items_run_task_by_task_when_a_leg_cannot_be_planned() -> None:
    table = joined()
    opened(table, light(50))
    table.feed(JobCancelled(at=table.at(), job="job", reason="enough"))
    plan = some(table.submit(replace(light(50), name="next")), Plan)[0]
    failure = Failure(kind=FailureKind.UNREACHABLE, message="it is relayed")
    number = plan.instruction
    given = table.feed(InstructionFailed(at=table.at(), instruction=number, failure=failure))
    assert some(given, Execute)


def test_a_device_that_does_not_answer_a_plan_does_not_hold_up_a_job() -> None:
    table = joined()
    opened(table, light(50))
    table.feed(JobCancelled(at=table.at(), job="job", reason="enough"))
    assert some(table.submit(replace(light(50), name="next")), Plan)
    assert not some(table.wait(400), Execute)
    assert some(table.wait(2000), Execute)


def test_an_item_that_has_travelled_is_finished_once() -> None:
    table = joined()
    travel = some(opened(table, light(80)), Travel)[0]
    assert (travel.device, travel.devices) == ("x", ("x", "y", "z"))
    assert only(come(table, travel), FinishItem).item == travel.item
    assert come(table, travel) == [], "its number is void"


def test_stages_that_follow_one_another_on_a_device_are_one_leg() -> None:
    table = Table()
    table.join("x", 100, resident=("a", "b"))
    table.join("z", resident=("c",))
    opened(table, light(50, b="x"))
    legs = [(each.device, each.stages) for each in table.all(Plan)]
    assert legs == [("x", (0, 2)), ("z", (2, 3))]


def test_items_of_a_job_that_is_not_light_do_not_travel() -> None:
    table = joined()
    table.play(table.submit(replace(light(50), light=False)))
    assert not table.all(Plan)


# ---- replicas ------------------------------------------------------------------------------------


def replicated(items: int, **more: object) -> JobSpec:
    """One stage on two devices."""
    stages = chain("a", homes={"a": ("x", "w")})
    return replace(job(stages, items), light=True, **more)  # type: ignore[arg-type]


def with_known_times(x_microseconds: int, w_microseconds: int) -> Table:
    """Two devices that have run a stage before."""
    table = joined("w")
    opened(table, replicated(80))
    table.feed(JobCancelled(at=table.at(), job="job", reason="enough"))
    for name, took in (("x", x_microseconds), ("w", w_microseconds)):
        table.state.devices[name].work.times[digest("a")] = Nanoseconds(1000 * took)
    return table


def test_every_replica_is_on_a_route_and_an_item_stays_where_it_can() -> None:
    table = joined("v", "w")
    opened(table, light(50, a="xvw", b="vwy"))
    routes = {each.route: each.devices for each in table.all(Plan)}
    assert list(routes.values()) == [("v", "v", "z"), ("w", "w", "z"), ("x", "y", "z")]


def test_calls_that_follow_one_another_travel_to_the_fastest_replica() -> None:
    table = with_known_times(1200, 900)
    planned(table, table.submit(replicated(0, name="calls", open_ended=True)))
    for items in range(1, 9):
        given = table.feed(ItemsArrived(at=table.at(), job="calls", items=items))
        travel = only(given, Travel)
        assert travel.device == "w"
        table.play(come(table, travel))


def test_replicas_share_the_items_that_wait_by_what_each_takes() -> None:
    table = with_known_times(1200, 300)
    given = planned(table, table.submit(replicated(80, name="next")))
    shares = Counter(each.device for each in some(given, Travel))
    assert 3 * shares["x"] < shares["w"] < 5 * shares["x"]


def test_a_replica_that_is_said_to_be_slow_runs_an_item_when_others_have_one() -> None:
    table = with_known_times(1_000_000, 300)
    given = planned(table, table.submit(replicated(80, name="next")))
    assert Counter(each.device for each in some(given, Travel))["x"] == 1


def test_a_replica_that_joins_gets_items_soon() -> None:
    table = joined()
    first, *_ = some(opened(table, replicated(80)), Travel)
    given = table.join("w", resident=("a",))
    assert {each.devices for each in some(given, Plan)} == {("x",), ("w",)}
    assert only(come(table, first), FinishItem), "what is under way arrives"
    assert some(planned(table, given), Travel)[0].device == "w", "where nothing waits"


def test_a_replica_that_lacks_its_fragment_loads_it_while_items_travel() -> None:
    """No task of the stage before is given, which would say that the fragment is needed."""
    table = joined()
    opened(table, light(80))
    table.feed(JobCancelled(at=table.at(), job="job", reason="enough"))
    table.join("w", 100, resident=())
    given = table.submit(light(80, b="yw", name="next"))
    load = only(given, Load)
    assert (load.device, load.digest) == ("w", digest("b"))
    travel, *_ = some(planned(table, given), Travel)  # nothing waits for it
    table.answer(load)
    plans = some(come(table, travel), Plan)
    assert {device for each in plans for device in each.devices} == {"x", "y", "w", "z"}


# ---- what goes wrong -----------------------------------------------------------------------------


def test_an_item_that_failed_runs_task_by_task_and_the_route_is_closed_for_a_while() -> None:
    table = joined()
    first, second, *_ = some(opened(table, light(80)), Travel)
    given = failed(table, first, FailureKind.RUNTIME)
    assert f"x runs {first.item}.0, to y" in brief(given)
    assert not some(come(table, second), Travel)
    table.wait(250)
    plans = len(table.all(Plan))
    table.wait(500)
    assert len(table.all(Plan)) == plans + 3


def test_an_item_whose_input_does_not_suit_fails_at_once() -> None:
    table = joined()
    travel = some(opened(table, light(80)), Travel)[0]
    given = failed(table, travel, FailureKind.INVALID_INPUT)
    assert only(given, FailItem).item == travel.item
    assert some(given, Travel), "the others travel on"


def test_items_over_a_lost_device_are_void_and_run_again() -> None:
    table = joined()
    travels = some(opened(table, light(80)), Travel)
    given = table.lose("y")
    assert {each.cancelled for each in some(given, Cancel)} == {
        each.instruction for each in travels
    }
    assert {(each.device, each.peer) for each in some(given, PeerLost)} == {("x", "y")}
    assert come(table, travels[0]) == []
    table.play(given)
    table.play(table.join("y", resident=("b",)))
    items = {each.item for each in table.all(FinishItem)}
    assert {each.item for each in travels} <= items


def test_an_item_that_nobody_answers_runs_again() -> None:
    table = joined()
    travel = some(opened(table, light(80)), Travel)[0]
    for _ in range(61):
        for name in "xyz":
            table.measure(name)
        given = table.wait(1000)
        if some(given, Execute):
            break
    assert f"x runs {travel.item}.0, to y" in brief(given)
    assert travel.instruction in {each.cancelled for each in some(given, Cancel)}


def test_while_another_job_has_tasks_items_run_task_by_task() -> None:
    table = joined()
    first, second, *_ = some(opened(table, light(80)), Travel)
    other = some(table.submit(job(chain("b"), 1, name="other")), Execute)
    assert not some(come(table, first), Travel)
    table.answer(only(list(other), Execute))
    assert some(come(table, second), Travel)


def beside(table: Table, priority: int = 0) -> tuple[list[Instruction], list[Instruction]]:
    """Another light job beside one whose items travel: all that was given until its routes are
    planned, and from then on."""
    opened(table, light(400))
    spec = replace(light(400), name="other", priority=priority)
    given, before = table.submit(spec), list[Instruction]()
    assert some(given, Plan), "every stage has run for the job before"
    return before + given, planned(table, given)


def begun_together() -> tuple[Table, list[Instruction]]:
    """Two light jobs whose fragments have not run before, and what is unanswered once both have
    routes: some tasks, and nothing is given any more."""
    table = joined()
    given = table.submit(light(400)) + table.submit(replace(light(400), name="other"))
    while not all(job.routes for job in table.state.jobs.values()):
        first, *given = given
        if isinstance(first, Plan):
            given += planned(table, [first])
        elif isinstance(first, Execute | FinishItem):
            given += table.answer(first, milliseconds=1)
    return table, given + planned(table, given)


def test_light_jobs_of_one_priority_travel_side_by_side() -> None:
    table = joined()
    _, given = beside(table)
    assert {each.job for each in some(given, Travel)} == {"other"}
    assert not some(given, Execute)
    first = next(each for each in table.all(Travel) if each.job == "job")
    assert {each.job for each in some(come(table, first), Travel)} == {"job"}


def test_light_jobs_of_unlike_priorities_run_task_by_task() -> None:
    table = joined()
    _, given = beside(table, priority=7)
    assert {each.job for each in some(given, Execute)} == {"other"}
    assert not some(given, Travel)


def test_light_jobs_that_begin_together_travel_once_the_tasks_of_both_have_ended() -> None:
    table, given = begun_together()
    assert some(given, Execute)
    travels: list[Travel] = []
    while given:
        first, *given = given
        travels += [first] if isinstance(first, Travel) else []
        if isinstance(first, Execute | FinishItem):
            given += table.answer(first, milliseconds=1)
    assert {each.job for each in travels} == {"job", "other"}
    assert not table.state.obstructed


def test_tasks_that_do_not_end_hold_up_other_light_items_for_a_second_at_most() -> None:
    table, given = begun_together()
    stuck = some(given, Execute)[0]
    for each in given:
        if isinstance(each, Execute) and each is not stuck:
            given += table.answer(each, milliseconds=1)
    (held,) = table.state.obstructed
    assert held.spec.name != stuck.job
    after: list[Instruction] = []
    for _ in range(3):
        for name in "xyz":
            table.measure(name)
        after += table.wait(500)
    assert held.spec.name in {each.job for each in some(after, Execute)}


def test_a_job_that_is_cancelled_leaves_nothing_behind() -> None:
    table = joined()
    travels = some(opened(table, light(80)), Travel)
    given = table.feed(JobCancelled(at=table.at(), job="job", reason="no"))
    assert len(some(given, Cancel)) >= len(travels)
    for travel in travels:
        assert come(table, travel) == []
    assert all(device.work.idle or device.work.queued for device in table.state.devices.values())
