"""What devices took beyond their budgets, by their own measurements."""

from shoal_coordinator.server.excesses import Excesses
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import session_pb2 as pb


def report(incarnation: int) -> pb.Hello:
    return pb.Hello(device="a", incarnation=incarnation, budget_bytes=100)


def test_a_mark_above_the_budget_counts_when_it_grows_and_a_task_each_time() -> None:
    time_now, first = [0.0], report(1)
    excesses = Excesses(lambda: time_now[0])

    def last() -> api.BudgetExcess | None:
        return excesses.of("a")

    excesses.reported(first, pb.Telemetry(used_bytes=90, peak_bytes=100))
    assert last() is None
    excesses.reported(first, pb.Telemetry(used_bytes=90, peak_bytes=126))
    time_now[0] = 5.0
    excesses.reported(first, pb.Telemetry(used_bytes=90, peak_bytes=126))
    assert last() == api.BudgetExcess(peak_bytes=126, budget_bytes=100, seconds=5.0)
    excesses.executed(first, pb.Executed(peak_bytes=110))
    assert last() == api.BudgetExcess(peak_bytes=126, budget_bytes=100, seconds=0.0)
    excesses.reported(report(2), pb.Telemetry(used_bytes=1, peak_bytes=2))
    assert last() is None, "the agent was started again"
    excesses.executed(report(2), pb.Executed(peak_bytes=70))
    assert excesses.highest("a") == 70, "a task took more than telemetry has said"


def test_an_excess_is_of_the_budget_that_was_exceeded() -> None:
    """An agent whose budget became smaller took more before, which was no excess then."""
    excesses, smaller = Excesses(lambda: 0.0), report(1)
    larger = pb.Hello(device="a", incarnation=1, budget_bytes=200)
    excesses.executed(larger, pb.Executed(peak_bytes=150))
    assert excesses.of("a") is None
    excesses.executed(smaller, pb.Executed(peak_bytes=110))
    excesses.executed(smaller, pb.Executed(peak_bytes=105))
    assert excesses.of("a") == api.BudgetExcess(peak_bytes=110, budget_bytes=100, seconds=0.0)
    assert excesses.highest("a") == 150


def test_what_was_measured_before_a_budget_became_smaller_is_no_excess_of_that() -> None:
    time_now, hello = [0.0], report(1)
    excesses = Excesses(lambda: time_now[0])
    for budget in (60, 40):
        excesses.changed(hello, hello.budget_bytes)
        hello.budget_bytes = budget
    excesses.executed(hello, pb.Executed(peak_bytes=95))
    excesses.reported(hello, pb.Telemetry(used_bytes=30, peak_bytes=99))
    assert excesses.of("a") is None, "there were 100 until now"
    time_now[0] = 61.0
    excesses.reported(hello, pb.Telemetry(used_bytes=30, peak_bytes=99))
    assert excesses.of("a") is None
    excesses.executed(hello, pb.Executed(peak_bytes=41))
    assert excesses.of("a") == api.BudgetExcess(peak_bytes=41, budget_bytes=40, seconds=0.0)


def test_what_an_agent_took_of_a_larger_budget_is_no_excess_for_a_coordinator_that_is_new() -> None:
    time_now, hello = [0.0], report(1)
    hello.largest_budget_bytes = 200
    excesses = Excesses(lambda: time_now[0])
    excesses.reported(hello, pb.Telemetry(used_bytes=90, peak_bytes=150))
    assert excesses.of("a") is None
    time_now[0] = 61.0
    excesses.reported(hello, pb.Telemetry(used_bytes=90, peak_bytes=150))
    assert excesses.of("a") is None, "it has not grown"
    excesses.executed(hello, pb.Executed(peak_bytes=110))
    assert excesses.of("a") == api.BudgetExcess(peak_bytes=110, budget_bytes=100, seconds=0.0)
    again = Excesses(lambda: 0.0)
    again.reported(hello, pb.Telemetry(used_bytes=90, peak_bytes=210))
    assert again.of("a") == api.BudgetExcess(peak_bytes=210, budget_bytes=200, seconds=0.0)
