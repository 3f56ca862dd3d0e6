"""A model that does not end is given up, before it has cost other jobs their devices for long."""

from coordinator.dispatch.driving import Table, chain, job, only
from shoal_coordinator.dispatch.events import FailureKind
from shoal_coordinator.dispatch.instructions import Execute, FinishJob


def run_out_of_time(table: Table, name: str) -> int:
    """Stop every task of a job at its deadline, until it ends; how many there were."""
    stopped = 0
    while name in table.state.jobs:
        for one in table.all(Execute):
            if one.instruction in table.state.pending and one.job == name:
                table.fail(one, FailureKind.DEADLINE)
                stopped += 1
        table.wait(250)
    return stopped


def test_a_job_none_of_whose_tasks_ends_in_time_is_given_up() -> None:
    table = Table()
    for name in ("d1", "d2"):
        table.join(name, resident=("a",))
    table.submit(job(chain("a"), 300, backoff_limit=9))
    assert run_out_of_time(table, "job") < 10
    failure = only(table.given, FinishJob).failure
    assert failure is not None
    assert failure.kind is FailureKind.RUNTIME
    assert failure.message.startswith("3 tasks ran out of time, and none finished: ")


def test_a_job_some_of_whose_items_run_out_of_time_goes_on_with_the_others() -> None:
    table = Table()
    table.join("d1", resident=("a",))
    table.submit(job(chain("a"), 30, backoff_limit=0))
    first, *_ = table.all(Execute)
    table.answer(first)
    while table.state.jobs["job"].failed < 5:
        for one in table.all(Execute):
            if one.instruction in table.state.pending:
                table.fail(one, FailureKind.DEADLINE)
        table.wait(250)
    assert not table.all(FinishJob)
