"""Budgets are lowered for a job whose Partition is its user's, and is cut for what devices have."""

from dataclasses import replace
from random import Random

import pytest

from fragment_pools import cut_table
from reconcile.simulation import Cluster, started
from reconcile.test_smaller_budgets import (
    SEEDS,
    check_that_nothing_ran_twice,
    lab,
    lower,
    status_of,
    until_some_have_finished,
)
from reconcile.test_walks import check_the_end, disturb, heal, reconcile_all, settle
from reconcile.values import MIB, condition, cut_at, cuts_in, word
from shoal_api.kinds import InferenceJob, Partition, Placement
from shoal_operator.reconcile.job_status import has_ended
from shoal_protocol.units import Bytes


def lower_pool(cluster: Cluster, mib: int) -> None:
    """As its user does; the devices follow."""
    there = cluster.pools["shelf"]
    budget = replace(there.spec.budget, memory=Bytes(mib * MIB))
    cluster.pools["shelf"] = replace(there, spec=replace(there.spec, budget=budget))
    lower(cluster, mib)


def choosing(seed: int) -> Cluster:
    """A Partition of the user whose cuts a Placement chooses, and a job that runs by it."""
    table = cut_table([10**9] * 20, [4 * MIB] * 20)
    cluster = started(
        Random(seed),  # noqa: S311
        jobs=1,
        failures=0.0,
        table=table,
        cut=lambda command: cut_at(table, cuts_in(command)),
    )
    run_by_a_partition_of_the_user(cluster, cutting="Planned")
    return cluster


def run_by_a_partition_of_the_user(cluster: Cluster, **how: str) -> None:
    spec = {"modelRef": {"name": "rec"}, **how}
    cluster.partitions["rec"] = cluster.new(Partition, "rec", spec, {})
    refers = {"partitionRef": {"name": "rec"}, "poolRef": {"name": "shelf"}}
    cluster.placements["rec"] = cluster.new(Placement, "rec", refers, {})
    wanted = {
        "placementRef": {"name": "rec"},
        "inputs": {"uri": "pvc://lines/in"},
        "outputs": {"uri": "pvc://lines/out"},
    }
    cluster.jobs["job-0"] = cluster.new(InferenceJob, "job-0", wanted, {})


def test_a_job_whose_cuts_are_planned_takes_those_for_smaller_budgets() -> None:
    """Its run fails, most often, before these are made."""
    cluster = choosing(7)
    until_some_have_finished(cluster)
    (before,) = [each.cut for each in cluster.runs.values()]
    assert before is not None
    lower(cluster, max(each.least_bytes for each in before.fragments) // MIB - 2)
    for _ in range(3):
        cluster.pass_time(1)
        reconcile_all(cluster)
    settle(cluster)
    check_the_end(cluster)
    assert word(status_of(cluster), "Complete") == "True AllItemsSucceeded"
    check_that_nothing_ran_twice(cluster)


def test_where_no_planned_cut_fits_the_job_fails_with_what_its_run_said() -> None:
    cluster = choosing(8)
    until_some_have_finished(cluster)
    lower(cluster, 3)
    settle(cluster)
    check_the_end(cluster)
    assert word(status_of(cluster), "Failed") == "True Budget"


def following(seed: int, failures: float = 0.0, refused_below_mib: int = 0) -> Cluster:
    """A Partition of the user that says nothing of its cut, and a job that runs by it."""
    cluster = lab(seed, failures=failures, refused_below_mib=refused_below_mib)
    run_by_a_partition_of_the_user(cluster)
    return cluster


def test_a_job_whose_partition_follows_its_pools_waits_for_the_cut_for_smaller_budgets() -> None:
    cluster = following(9)
    done = until_some_have_finished(cluster)
    lower_pool(cluster, 32)
    seen = ""
    while not has_ended(status_of(cluster)):
        cluster.pass_time(1)
        reconcile_all(cluster)
        seen += condition(status_of(cluster), "Complete").message + "\n"
    check_the_end(cluster)
    status = status_of(cluster)
    assert word(status, "Complete") == "True AllItemsSucceeded"
    assert "fits on no device; fragment 0 of rec needs" in seen
    assert done < {item for _, item in cluster.finished}
    check_that_nothing_ran_twice(cluster)


def test_where_the_cut_that_follows_is_refused_the_job_fails_with_what_its_run_said() -> None:
    cluster = following(10, refused_below_mib=40)
    until_some_have_finished(cluster)
    lower_pool(cluster, 32)
    settle(cluster)
    check_the_end(cluster)
    assert word(status_of(cluster), "Failed") == "True Budget"


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_becomes_of_a_pool_jobs_end_by_the_cut_that_follows_it(seed: int) -> None:
    cluster = following(seed, failures=0.05)
    for _ in range(80):
        if cluster.chance.random() < 0.3:
            disturb(cluster)
        if cluster.chance.random() < 0.1:
            lower_pool(cluster, cluster.chance.choice((16, 24, 40, 64)))
        reconcile_all(cluster, dies=0.2)
        cluster.pass_time(cluster.chance.choice((1, 5, 20)))
    heal(cluster)
    lower_pool(cluster, 24)
    settle(cluster)
    check_the_end(cluster)
    assert all(count == 1 for count in cluster.finished.values())
    assert word(status_of(cluster), "Failed") != "True Budget", "there was a cut for each"
