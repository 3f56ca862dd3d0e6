"""Budgets are lowered, or devices leave, while a job runs: it is cut anew, and goes on."""

from dataclasses import replace
from random import Random

import pytest

from reconcile.rules import decide, name_of
from reconcile.simulation import ITEMS, Cluster, started
from reconcile.test_finer_cuts import FINER, cut_finer, cut_for, failed, of_nodes
from reconcile.test_inference_job import PLANNED, kinds, knows, run, silent
from reconcile.test_job_cuts import NO_PLACE, refused, sizes, without_a_place
from reconcile.test_placement import device
from reconcile.test_walks import NODES, check_the_end, disturb, heal, reconcile_all, settle
from reconcile.values import MIB, NOW, condition, word
from shoal_api.fields import Condition, ConditionStatus
from shoal_api.kinds.inference_job import InferenceJobStatus
from shoal_operator.reconcile.decision import CancelJob, SubmitJob, Terms
from shoal_operator.reconcile.names import job_id
from shoal_operator.reconcile.partition import recipe_of
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    DeviceState,
    InferenceJobSnapshot,
    Refusal,
    RunState,
)

# ---- a cluster -----------------------------------------------------------------------------------


def lab(seed: int, jobs: int = 1, failures: float = 0.0, refused_below_mib: int = 0) -> Cluster:
    """A model of 60 MiB on three devices of 64; it cannot be cut for less than some."""

    def refusal(command: tuple[str, ...]) -> str:
        if "--max-bytes" not in command:
            return ""
        size = int(command[command.index("--max-bytes") + 1])
        return (
            "" if size >= refused_below_mib * MIB else f"node conv1 needs {refused_below_mib} MiB"
        )

    return started(Random(seed), jobs, failures=failures, cut=cut_for, refusal=refusal)  # noqa: S311


def until_some_have_finished(cluster: Cluster) -> set[int]:
    """The items of the only job that have finished when it is half way."""
    while not any(each.finished for each in cluster.runs.values()):
        reconcile_all(cluster)
        cluster.pass_time(1)
    reconcile_all(cluster)
    (going,) = cluster.runs.values()
    assert len(going.finished) < ITEMS
    return set(going.finished)


def lower(cluster: Cluster, mib: int, *names: str) -> None:
    cluster.budgets |= dict.fromkeys(names or NODES, mib * MIB)


def status_of(cluster: Cluster) -> InferenceJobStatus:
    (job,) = cluster.jobs.values()
    assert job.status is not None
    return job.status


def reasons(cluster: Cluster) -> list[str]:
    return [reason for kind, reason, _ in cluster.notes if kind == "InferenceJobSnapshot"]


def check_that_nothing_ran_twice(cluster: Cluster) -> None:
    assert set(cluster.finished.values()) == {1}


def test_a_job_whose_budgets_are_lowered_is_cut_for_them_and_keeps_what_it_has() -> None:
    cluster = lab(1)
    until_some_have_finished(cluster)
    lower(cluster, 32)
    settle(cluster)
    check_the_end(cluster)
    status = status_of(cluster)
    assert word(status, "Complete") == "True AllItemsSucceeded"
    assert status.finer_cut is not None
    assert (status.finer_cut.cuts, status.finer_cut.max_fragment_size_bytes) == (2, 32 * MIB)
    assert status.finer_cut.message.endswith("; now it is cut for 32 MiB")
    assert "CutFiner" in reasons(cluster)
    check_that_nothing_ran_twice(cluster)


def test_a_run_that_waits_for_a_device_that_is_lost_goes_on_with_those_that_are_there() -> None:
    """Its coordinator waits, since that device had room."""
    cluster = lab(2)
    until_some_have_finished(cluster)
    lower(cluster, 32, "n1", "n2")
    cluster.connected["n3"] = DeviceState.LOST
    for _ in range(5):
        reconcile_all(cluster)
        cluster.pass_time(5)
    assert status_of(cluster).finer_cut is None, "it may be back"
    settle(cluster)
    check_the_end(cluster)
    assert word(status_of(cluster), "Complete") == "True AllItemsSucceeded"
    assert "CutAnew" in reasons(cluster), "its run was stopped for the new fragments"
    check_that_nothing_ran_twice(cluster)


def test_a_limit_that_is_lowered_for_a_moment_has_nothing_cut() -> None:
    cluster = lab(3)
    until_some_have_finished(cluster)
    cluster.connected["n3"] = DeviceState.LOST  # so that the run waits
    lower(cluster, 32, "n1", "n2")
    for _ in range(2):
        reconcile_all(cluster)
        cluster.pass_time(2)
    cluster.budgets.clear()
    cluster.connected["n3"] = DeviceState.READY
    settle(cluster)
    check_the_end(cluster)
    assert status_of(cluster).finer_cut is None


def test_a_job_that_was_cut_finer_before_is_cut_for_smaller_budgets_too() -> None:
    cluster = lab(4)
    until_some_have_finished(cluster)
    for budget in (32, 16):
        lower(cluster, budget)
        for _ in range(4):
            reconcile_all(cluster)
            cluster.pass_time(1)
    settle(cluster)
    check_the_end(cluster)
    status = status_of(cluster)
    assert word(status, "Complete") == "True AllItemsSucceeded"
    assert status.finer_cut is not None
    assert status.finer_cut.max_fragment_size_bytes == 16 * MIB
    check_that_nothing_ran_twice(cluster)


def test_where_it_cannot_be_cut_for_the_least_device_it_is_cut_for_the_largest() -> None:
    cluster = lab(5, refused_below_mib=30)
    until_some_have_finished(cluster)
    lower(cluster, 20, "n1", "n2")
    lower(cluster, 32, "n3")
    settle(cluster)
    check_the_end(cluster)
    status = status_of(cluster)
    assert word(status, "Complete") == "True AllItemsSucceeded"
    assert status.finer_cut is not None
    assert status.finer_cut.max_fragment_size_bytes == 32 * MIB


def test_where_nothing_helps_the_job_fails_with_need_and_have() -> None:
    cluster = lab(6, refused_below_mib=30)
    done = until_some_have_finished(cluster)
    lower(cluster, 16)
    settle(cluster)
    check_the_end(cluster)
    status = status_of(cluster)
    assert word(status, "Failed") == "True Budget"
    message = condition(status, "Failed").message
    assert "it cannot be cut finer" in message
    assert "node conv1 needs 30 MiB" in message
    assert status.items is not None
    assert status.items.succeeded == len(done), "and what has finished is transferred"


SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.minutes) for seed in range(4, 40))]


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_becomes_of_budgets_and_devices_jobs_end_and_nothing_runs_twice(
    seed: int,
) -> None:
    cluster = lab(seed, jobs=2, failures=0.05)
    for _ in range(80):
        if cluster.chance.random() < 0.3:
            disturb(cluster)
        if cluster.chance.random() < 0.1:
            lower(cluster, cluster.chance.choice((16, 24, 40, 64)), cluster.chance.choice(NODES))
        reconcile_all(cluster, dies=0.2)
        cluster.pass_time(cluster.chance.choice((1, 5, 20)))
    heal(cluster)
    lower(cluster, 24)
    settle(cluster)
    check_the_end(cluster)
    for job in cluster.jobs.values():
        assert job.status is not None
        assert all(cluster.finished.get((job_id(job), item), 0) <= 1 for item in range(ITEMS))
        assert job.status.finer_cut is None or job.status.finer_cut.cuts <= 12


# ---- one decision --------------------------------------------------------------------------------


def going(snapshot: InferenceJobSnapshot) -> InferenceJobSnapshot:
    return knows(snapshot, run(RunState.RUNNING, succeeded=8))


def test_a_job_that_runs_is_cut_anew_where_its_fragments_have_no_place_for_a_while() -> None:
    decision = decide(going(without_a_place(17, cut_for=24)))
    assert sizes(decision) == [17 * MIB]
    assert decision.calls == (), "the run goes on meanwhile"
    assert word(decision.status, "Complete") == "False Running"
    assert NO_PLACE in condition(decision.status, "Complete").message
    assert "now it is cut for 17 MiB" in condition(decision.status, "Complete").message
    at_once = decide(going(without_a_place(17, cut_for=24, before=NOW)))
    assert sizes(at_once) == []
    assert NO_PLACE in condition(at_once.status, "Complete").message
    assert at_once.requeue_seconds is not None
    assert at_once.requeue_seconds <= 15


def test_each_further_cut_waits_twice_as_long() -> None:
    snapshot = without_a_place(17, cut_for=24, before="2026-03-01T11:59:00Z")
    for cuts, waits in ((2, False), (3, False), (4, True)):
        finer = replace(FINER, cuts=cuts, max_fragment_size_bytes=24 * MIB, outgrown=())
        partition, model, document = snapshot.partition, snapshot.model, snapshot.document
        assert partition is not None
        assert model is not None
        assert document is not None
        status = replace(snapshot.before, finer_cut=finer)
        known = cut_as_asked(replace(snapshot, job=replace(snapshot.job, status=status)))
        assert (sizes(decide(known)) == [24 * MIB]) is waits


def cut_as_asked(snapshot: InferenceJobSnapshot) -> InferenceJobSnapshot:
    assert snapshot.partition is not None
    assert snapshot.model is not None
    assert snapshot.document is not None
    recipe = recipe_of(snapshot.partition, snapshot.model)
    return replace(snapshot, document=replace(snapshot.document, recipe=recipe))


def refusing(snapshot: InferenceJobSnapshot, *, other_way: bool = True) -> InferenceJobSnapshot:
    """A run by an older plan, whose coordinator was given the newest one."""
    refusal = Refusal(plan=1, terms=Terms(), message="another content", other_way=other_way)
    older = knows(snapshot, run(RunState.RUNNING, succeeded=8, plan=0))
    return replace(older, refusal=refusal)


def test_a_run_that_keeps_other_fragments_is_stopped_and_submitted_again() -> None:
    decision = decide(refusing(PLANNED))
    (call,) = decision.calls
    assert isinstance(call, CancelJob)
    assert word(decision.status, "Complete") == "False CutAnew"
    assert word(decision.status, "Suspended") == "False NotSuspended"
    assert [(each.reason, each.since) for each in decision.notes[-1:]] == [("CutAnew", "epoch 1")]
    stopped = knows(refusing(PLANNED), run(RunState.CANCELLED, succeeded=8, plan=0))
    decision = decide(stopped)
    assert [type(each) for each in decision.calls] == [SubmitJob]
    assert "Job" not in kinds(decision), "its inputs are there"


def test_a_run_that_completes_its_results_is_not_stopped_for_other_fragments() -> None:
    over = run(RunState.RUNNING, succeeded=24, plan=0, completing=True)
    decision = decide(knows(refusing(PLANNED), over))
    assert (decision.calls, [each.reason for each in decision.notes]) == ((), ["StartedJob"])
    assert word(decision.status, "Complete") == "False Completing"


def test_it_is_not_stopped_before_the_new_fragments_are_delivered() -> None:
    snapshot = refusing(PLANNED)
    assert isinstance(snapshot.view, CoordinatorView)
    decision = decide(replace(snapshot, view=replace(snapshot.view, fragments=frozenset())))
    assert decision.calls == ()
    (child,) = decision.children
    assert "-deliver-" in name_of(child)


def test_a_run_is_not_stopped_for_what_would_be_refused_again() -> None:
    decision = decide(refusing(PLANNED, other_way=False))
    assert decision.calls == ()
    assert "another content" in condition(decision.status, "Complete").message


def test_a_plan_that_budgets_have_left_behind_is_not_taken_for_the_newest() -> None:
    """So nothing is divided that the next plan, or another cut, has a place for."""
    before = failed()
    assert isinstance(before.view, CoordinatorView)
    small = tuple(device(each.name, budget=4 * MIB) for each in before.view.devices)
    decision = decide(replace(before, view=replace(before.view, devices=small)))
    assert isinstance(decision.status, InferenceJobStatus)
    assert decision.status.finer_cut is None
    assert word(decision.status, "Failed") == "False NotFailed"
    assert decision.calls == ()


def refused_for_less() -> InferenceJobSnapshot:
    """A job whose Partition cannot be cut for what devices have now."""
    snapshot = refused(17, cut_for=17)
    finer = replace(FINER, max_fragment_size_bytes=17 * MIB, outgrown=())
    status = replace(snapshot.before, finer_cut=finer)
    return of_nodes(replace(snapshot, job=replace(snapshot.job, status=status)), 1, ready=1)


def test_a_refused_cut_for_less_is_no_verdict_while_a_device_is_away_that_has_more() -> None:
    snapshot = refused_for_less()
    assert word(decide(snapshot).status, "Failed") == "True PartitionRefused"
    assert isinstance(snapshot.view, CoordinatorView)
    lost = device("large", DeviceState.LOST, budget=64 * MIB)
    away = replace(snapshot.view, devices=(*snapshot.view.devices, lost))
    waiting = decide(of_nodes(replace(snapshot, view=away), 2, ready=1))
    assert word(waiting.status, "Failed") == "False NotFailed"
    assert sizes(waiting) == [17 * MIB]
    back = replace(away, devices=(*snapshot.view.devices, replace(lost, state=DeviceState.READY)))
    assert sizes(decide(replace(snapshot, view=back))) == [64 * MIB]


def test_nothing_is_divided_while_a_device_of_the_plan_is_missing() -> None:
    """A coordinator that began again does not know it yet, nor what it has."""
    of = failed()
    assert of.placement is not None
    assert of.placement.status is not None
    ready = Condition(
        type="Ready",
        status=ConditionStatus.FALSE,
        reason="DevicesMissing",
        message="n3 not connected",
        last_transition_time=NOW,
    )
    planned = of.placement.condition("Planned")
    assert planned is not None
    status = replace(of.placement.status, conditions=(planned, ready))
    decision = decide(replace(of, placement=replace(of.placement, status=status)))
    assert isinstance(decision.status, InferenceJobStatus)
    assert decision.status.finer_cut is None
    assert word(decision.status, "Failed") == "False NotFailed"
    assert decision.calls == ()
    assert condition(decision.status, "Complete").message.endswith("; n3 not connected")


def lacking_one(snapshot: InferenceJobSnapshot) -> InferenceJobSnapshot:
    """The pool has a node more, whose device its coordinator does not know."""
    assert isinstance(snapshot.view, CoordinatorView)
    ready = len(snapshot.view.devices)
    return of_nodes(snapshot, ready + 1, ready=ready)


def test_a_device_that_a_coordinator_that_began_again_does_not_know_is_waited_for_too() -> None:
    soon = going(without_a_place(17, cut_for=24, before="2026-03-01T11:59:30Z"))
    assert sizes(decide(of_nodes(soon, 1, ready=1))) == [17 * MIB]
    assert sizes(decide(lacking_one(soon))) == []
    refusal = refused_for_less()
    assert word(decide(refusal).status, "Failed") == "True PartitionRefused"
    waiting = decide(lacking_one(refusal))
    assert word(waiting.status, "Failed") == "False NotFailed"


def test_a_lost_device_whose_node_is_not_the_pools_any_more_is_not_waited_for() -> None:
    """Its coordinator remembers it."""
    lost = device("large", DeviceState.LOST, budget=64 * MIB)

    def without_it(snapshot: InferenceJobSnapshot, nodes: int) -> InferenceJobSnapshot:
        assert isinstance(snapshot.view, CoordinatorView)
        view = replace(snapshot.view, devices=(*snapshot.view.devices, lost))
        return of_nodes(replace(snapshot, view=view), nodes, ready=1)

    refusal = refused_for_less()
    assert word(decide(without_it(refusal, 2)).status, "Failed") == "False NotFailed"
    assert word(decide(without_it(refusal, 1)).status, "Failed") == "True PartitionRefused"
    soon = going(without_a_place(17, cut_for=24, before="2026-03-01T11:59:30Z"))
    assert sizes(decide(without_it(soon, 2))) == []
    assert sizes(decide(without_it(soon, 1))) == [17 * MIB]


def test_nothing_is_cut_while_nobody_says_which_devices_there_are() -> None:
    assert sizes(decide(silent(going(without_a_place(17, cut_for=24))))) == [24 * MIB]
    assert decide(cut_finer(failed())).status is not None
