"""Budgets of devices that change while there is work."""

from coordinator.dispatch.driving import MIB, Table, brief, chain, digest, job, only, some
from shoal_coordinator.dispatch.events import FailureKind, FragmentEvicted
from shoal_coordinator.dispatch.instructions import (
    Execute,
    FinishItem,
    FinishJob,
    Instruction,
    Load,
)
from shoal_coordinator.dispatch.machine import Limits
from shoal_protocol.units import Nanoseconds

GRACE = Limits(homes_grace=Nanoseconds(10_000_000_000))
STAGES = chain("a", mib=60, least_mib=30)


def working(table: Table) -> list[Execute]:
    """A device of 64 MiB has the fragment, and tasks."""
    table.join("d1", 64)
    return some(table.answer(only(table.submit(job(STAGES, 5)), Load)), Execute)


def lost(table: Table, tasks: list[Execute]) -> list[Instruction]:
    """The device gives the fragment up because of its budget, and with it these tasks."""
    given = table.feed(FragmentEvicted(at=table.at(), device="d1", session=1, digest=digest("a")))
    for each in tasks:
        given += table.fail(each, FailureKind.NOT_RESIDENT)
    return given


def live(table: Table, seconds: int) -> list[Instruction]:
    """Time passes, and the devices say that they are there."""
    given: list[Instruction] = []
    for _ in range(seconds):
        for device in table.state.devices:
            table.measure(device)
        given += table.wait(1000)
    return given


def test_a_fragment_that_runs_in_less_stays_and_others_have_no_more_than_there_is() -> None:
    table = Table()
    tasks = working(table)
    assert table.change_budget("d1", 40, a=40) == []
    memory = table.state.devices["d1"].memory
    assert (memory.budget, memory.room) == (40 * MIB, 0)
    assert some(table.play(tasks), FinishItem)
    assert table.all(Load)[1:] == []


def test_a_fragment_that_was_given_up_is_not_loaded_where_it_does_not_fit_any_more() -> None:
    table = Table()
    tasks = working(table)
    given = table.join("d2", 64) + table.change_budget("d1", 20) + lost(table, tasks)
    finished = some(table.play(given), FinishItem)
    assert {each.item for each in finished} == set(range(5))
    assert [load.device for load in table.all(Load)] == ["d1", "d2"]


def test_a_job_that_fits_nowhere_waits_for_a_while_and_ends_with_what_it_needs_and_there_is() -> (
    None
):
    table = Table(GRACE)
    tasks = working(table)
    live(table, 20)
    table.change_budget("d1", 20)
    lost(table, tasks)
    live(table, 9)
    assert table.all(FinishJob) == []
    live(table, 2)
    failure = table.all(FinishJob)[0].failure
    assert failure is not None
    assert "needs at least 30 MiB" in failure.message
    assert "d1 has 20 MiB" in failure.message
    assert (failure.need, failure.have) == (30 * MIB, 20 * MIB)
    assert table.all(Load)[1:] == [], "there is no use in trying"


def test_a_fragment_comes_back_as_soon_as_the_budget_has_grown_again() -> None:
    table = Table(GRACE)
    tasks = working(table)
    table.change_budget("d1", 20)
    assert brief(lost(table, tasks)) == []
    load = only(table.change_budget("d1", 50), Load)
    assert (load.device, load.granted) == ("d1", 50 * MIB)


def test_a_load_that_a_budget_has_no_room_for_is_given_again_when_the_budget_is_back() -> None:
    table = Table(GRACE)
    table.join("d1", 64)
    load = only(table.submit(job(STAGES)), Load)
    table.change_budget("d1", 20)
    assert table.fail(load, FailureKind.BUDGET, 60, 20) == []
    live(table, 2)
    assert only(table.change_budget("d1", 64), Load).granted == 60 * MIB


def test_a_load_that_a_budget_has_no_room_for_ends_its_job_where_the_budget_stays() -> None:
    table = Table(GRACE)
    table.join("d1", 64)
    load = only(table.submit(job(STAGES)), Load)
    live(table, 20)
    table.change_budget("d1", 20)
    table.fail(load, FailureKind.BUDGET, 60, 20)
    live(table, 9)
    assert table.all(FinishJob) == []
    live(table, 2)
    failure = table.all(FinishJob)[0].failure
    assert failure is not None
    assert (failure.need, failure.have) == (30 * MIB, 20 * MIB)


def test_a_job_does_not_end_by_another_device_while_a_budget_is_small_for_a_moment() -> None:
    table = Table(GRACE)
    tasks = working(table)
    given = table.join("d2", 64)
    for seconds in (1, 1, 2, 4, 8, 16, 29):  # it has failed often, and tries again after a while
        table.fail(only(given, Load), FailureKind.RUNTIME)
        given = live(table, seconds)
    table.change_budget("d1", 20)
    lost(table, tasks)
    assert table.fail(only(live(table, 2), Load), FailureKind.RUNTIME) == []
    assert table.all(FinishJob) == []
    assert only(table.change_budget("d1", 64), Load).device == "d1"


def test_a_job_ends_by_another_device_where_the_budget_of_its_own_stays_small() -> None:
    table = Table(GRACE)
    tasks = working(table)
    given = table.join("d2", 64) + table.change_budget("d1", 20) + lost(table, tasks)
    while not (ended := some(given, FinishJob)):
        given = table.fail(only(given, Load), FailureKind.RUNTIME)
        given += live(table, 0 if some(given, FinishJob) else 30)
    assert ended[0].failure is not None
    assert ended[0].failure.kind is FailureKind.RUNTIME


def test_a_job_that_comes_while_a_budget_is_small_for_a_moment_waits_for_it() -> None:
    table = Table(GRACE)
    table.join("d1", 64)
    live(table, 20)
    table.change_budget("d1", 20)
    assert table.submit(job(STAGES)) == []
    live(table, 2)
    assert only(table.change_budget("d1", 64), Load).granted == 60 * MIB


def test_a_load_that_a_smaller_budget_refuses_is_given_again_at_once_with_less() -> None:
    table = Table()
    table.join("d1", 64)
    load = only(table.submit(job(STAGES)), Load)
    assert table.change_budget("d1", 40) == []
    load = only(table.fail(load, FailureKind.BUDGET, 60, 40), Load)
    assert load.granted == 40 * MIB, "nothing is known of what it takes beyond that"
    assert some(table.play([load]), FinishItem)


def test_what_was_too_large_for_the_budget_is_tried_again_in_a_larger_one() -> None:
    table = Table()
    table.join("d1", 40)
    given = table.submit(job(STAGES))
    while loads := some(given, Load):
        given = table.fail(loads[0], FailureKind.BUDGET, loads[0].granted / MIB + 15, 40)
    assert only(given, FinishJob).failure
    table.change_budget("d1", 64)
    assert only(table.submit(job(STAGES, name="next")), Load).granted == 60 * MIB


def test_a_home_that_is_back_late_after_a_restart_of_the_coordinator_gets_its_fragment() -> None:
    """Agents redial after up to five seconds; the others have no room for it."""
    table = Table()
    table.submit(job(chain("a", mib=60, homes={"a": ("large",)})))
    table.join("d1", 24)
    live(table, 9)
    assert table.all(FinishJob) == []
    assert only(table.join("large", 64), Load).device == "large"
