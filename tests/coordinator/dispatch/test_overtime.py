"""A model that does not end is given up, before it has cost other jobs their devices for long."""

from collections.abc import Set

import pytest

from coordinator.dispatch.driving import Table, chain, job, only
from shoal_coordinator.dispatch.events import FailureKind
from shoal_coordinator.dispatch.instructions import Execute, FinishItem, FinishJob


def finish(table: Table, task: Execute) -> None:
    """A task ends in time, and its result is stored."""
    table.answer(only(table.answer(task), FinishItem))


def run_out_of_time(table: Table, in_time: Set[int] = frozenset()) -> int:
    """Stop every task of the job at its deadline, but for those of items that end `in_time`, until
    the job ends; how many were stopped."""
    stopped = 0
    while "job" in table.state.jobs:
        assert stopped < 200
        for one in table.all(Execute):
            if one.instruction in table.state.pending:
                if one.item in in_time:
                    finish(table, one)
                else:
                    table.fail(one, FailureKind.DEADLINE)
                    stopped += 1
        table.wait(250)
        for name in table.state.devices:
            table.measure(name)
    return stopped


def test_a_job_none_of_whose_tasks_ends_in_time_is_given_up() -> None:
    table = Table()
    for name in ("d1", "d2"):
        table.join(name, resident=("a",))
    table.submit(job(chain("a"), 300, backoff_limit=9))
    assert run_out_of_time(table) < 10
    failure = only(table.given, FinishJob).failure
    assert failure is not None
    assert failure.kind is FailureKind.RUNTIME
    assert failure.message.startswith("3 tasks ran out of time, and none finished: ")


@pytest.mark.parametrize("backoff_limit", [0, 3])
def test_a_job_is_given_up_where_no_more_tasks_end_in_time_though_a_few_have(
    backoff_limit: int,
) -> None:
    table = Table()
    table.join("d1", resident=("a",))
    table.submit(job(chain("a"), 300, backoff_limit=backoff_limit))
    assert run_out_of_time(table, in_time={0}) < 30
    failure = only(table.given, FinishJob).failure
    assert failure is not None
    assert failure.kind is FailureKind.RUNTIME
    assert failure.message.startswith("6 tasks ran out of time, and none but 1 finished: ")


def test_a_job_some_of_whose_items_run_out_of_time_goes_on_with_the_others() -> None:
    table = Table()
    table.join("d1", resident=("a",))
    table.submit(job(chain("a"), 40, backoff_limit=1))
    run_out_of_time(table, in_time=set(range(0, 40, 4)))
    assert only(table.given, FinishJob).failure is None
    ended = table.state.ended["job"]
    assert (ended.succeeded, ended.failed) == (10, 30)


def test_a_job_whose_task_ran_out_of_time_has_its_next_turn_when_an_equal_one_had_as_much() -> None:
    table = Table()
    table.join("d1", resident=("a", "b"))
    table.submit(job(chain("a"), 300, "long", backoff_limit=0))
    table.submit(job(chain("b"), 300, "short"))
    turns: list[str] = []
    failed_at = 0
    while len(turns) < 150:
        pending = [one for one in table.all(Execute) if one.instruction in table.state.pending]
        first, *_ = pending
        if first.job == "long" and len(turns) > 10 and not failed_at:
            failed_at = len(turns)
            table.wait(1000)
            table.measure("d1")
            table.fail(first, FailureKind.DEADLINE)
        else:
            table.answer(only(table.answer(first, milliseconds=10), FinishItem))
        turns.append(first.job)
    after = turns[failed_at + 3 :]  # what the device had already been given comes before
    assert after[:90] == ["short"] * 90
    assert "long" in after[90:]
