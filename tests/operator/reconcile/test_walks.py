"""The real reconcilers in a little cluster where everything may fail, vanish and return."""

from dataclasses import replace
from random import Random

import pytest

from reconcile.simulation import ITEMS, Cluster, all_over, started
from reconcile.values import word
from shoal_api.conditions import holds
from shoal_api.kinds import InferenceJob
from shoal_operator.reconcile.names import job_id
from shoal_operator.reconcile.snapshot import DeviceState, RunState

NODES = ("n1", "n2", "n3")


def reconcile_all(cluster: Cluster, *, dies: float = 0.0) -> None:
    """Everything is reconciled, in any order; the operator may die in between."""
    snapshots = cluster.snapshots()
    cluster.chance.shuffle(snapshots)
    for snapshot in snapshots:
        cluster.reconcile(snapshot, dies=cluster.chance.random() < dies)


def disturb(cluster: Cluster) -> None:
    """Something goes away, or returns."""
    chance = cluster.chance
    match chance.randrange(6):
        case 0:
            cluster.reachable = not cluster.reachable
        case 1:
            cluster.connected.pop(chance.choice(NODES), None)
        case 2 | 3:
            cluster.connected[chance.choice(NODES)] = chance.choice(list(DeviceState))
        case 4:
            name = chance.choice(list(cluster.jobs))
            job = cluster.jobs[name]
            generation = (job.metadata.generation or 0) + 1
            cluster.jobs[name] = replace(
                job,
                metadata=replace(job.metadata, generation=generation),
                spec=replace(job.spec, suspend=not job.spec.suspend),
            )
        case _:
            if cluster.workers:
                gone = chance.choice(sorted(cluster.workers))
                del cluster.workers[gone]


def heal(cluster: Cluster) -> None:
    """Whatever is broken is mended, and nothing is suspended."""
    cluster.reachable = True
    cluster.connected = dict.fromkeys(NODES, DeviceState.READY)
    for name, job in cluster.jobs.items():
        generation = (job.metadata.generation or 0) + 1
        cluster.jobs[name] = replace(
            job,
            metadata=replace(job.metadata, generation=generation),
            spec=replace(job.spec, suspend=False),
        )


def settle(cluster: Cluster, steps: int = 400) -> None:
    """Time passes until all jobs are over."""
    for _ in range(steps):
        reconcile_all(cluster)
        if all_over(cluster):
            break
        cluster.pass_time(10)
    reconcile_all(cluster)
    reconcile_all(cluster)


def check_the_end(cluster: Cluster) -> None:
    for job in cluster.jobs.values():
        assert job.status is not None
        status, name = job.status, job_id(job)
        if holds(status.conditions, "Complete"):
            assert status.items is not None
            assert (status.items.succeeded, status.items.failed) == (ITEMS, 0)
            assert cluster.transferred[name] == set(range(ITEMS)), "results that nobody has"
        else:
            assert holds(status.conditions, "Failed"), word(status, "Complete")
        assert word(status, "Failed") != "True NotFailed"
        assert all(cluster.finished.get((name, item), 0) <= 1 for item in range(ITEMS))
        kept = holds(status.conditions, "Failed")
        assert kept or name not in cluster.runs, "a run is left"


SEEDS = [
    *range(5),
    *(pytest.param(seed, marks=pytest.mark.minutes) for seed in range(5, 80)),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_job_ends_with_a_reason_and_none_runs_twice(seed: int) -> None:
    cluster = started(Random(seed), jobs=3, failures=0.05)  # noqa: S311
    for _ in range(60):
        if cluster.chance.random() < 0.3:
            disturb(cluster)
        reconcile_all(cluster, dies=0.2)
        cluster.pass_time(cluster.chance.choice((1, 5, 20)))
    heal(cluster)
    settle(cluster)
    check_the_end(cluster)


def test_an_undisturbed_job_ends_complete_and_tells_its_story() -> None:
    cluster = started(Random(1), jobs=2, failures=0.0)  # noqa: S311
    settle(cluster)
    check_the_end(cluster)
    for job in cluster.jobs.values():
        assert job.status is not None
        assert word(job.status, "Complete") == "True AllItemsSucceeded"
    reasons = [reason for _, reason, _ in cluster.notes]
    for reason in ("FetchedModel", "CutModel", "PlannedPlacement", "StartedJob", "FinishedJob"):
        assert reason in reasons, reason
    delivered = [name for name in cluster.workers if "-deliver-" in name]
    assert len(delivered) == 2, "one for each job's own Partition"


def test_items_that_fail_fail_the_job_and_the_other_results_are_carried_out() -> None:
    cluster = started(Random(2), jobs=1, failures=0.0, bad_items=frozenset({4}))  # noqa: S311
    settle(cluster)
    (job,) = cluster.jobs.values()
    assert job.status is not None
    assert word(job.status, "Failed") == "True ItemsFailed"
    failed = next(each for each in job.status.conditions if each.type == "Failed")
    assert failed.message == "1 of 6 items failed; first: 4.npz: no such shape"
    assert cluster.transferred[job_id(job)] == set(range(ITEMS)) - {4}


def test_a_coordinator_whose_volume_was_replaced_begins_again() -> None:
    cluster = started(Random(3), jobs=1, failures=0.0)  # noqa: S311
    while not any(run.finished for run in cluster.runs.values()):
        reconcile_all(cluster)
        cluster.pass_time(10)
    reconcile_all(cluster)
    cluster.runs.clear()
    cluster.inputs.clear()
    cluster.fragments.clear()
    cluster.workers = {
        name: worker for name, worker in cluster.workers.items() if "-deliver-" not in name
    }
    cluster.finished.clear()
    settle(cluster)
    check_the_end(cluster)
    (job,) = cluster.jobs.values()
    assert job.status is not None
    assert word(job.status, "Complete") == "True AllItemsSucceeded"


def test_a_job_that_is_deleted_leaves_nothing_at_the_coordinator() -> None:
    cluster = started(Random(4), jobs=2, failures=0.0)  # noqa: S311
    while len(cluster.runs) < 2:
        reconcile_all(cluster)
        cluster.pass_time(1)
    deleted = cluster.jobs.pop("job-0")
    for _ in range(3):
        reconcile_all(cluster)
        cluster.pass_time(1)
    assert job_id(deleted) not in cluster.runs
    assert job_id(cluster.jobs["job-1"]) in cluster.runs


def in_phase(cluster: Cluster, state: RunState) -> InferenceJob:
    """The only job, as soon as its run is so."""
    while not any(run.state is state for run in cluster.runs.values()):
        reconcile_all(cluster)
        cluster.pass_time(1)
    reconcile_all(cluster)
    (job,) = cluster.jobs.values()
    return job


def edit(cluster: Cluster, job: InferenceJob, *, suspend: bool) -> None:
    generation = (job.metadata.generation or 0) + 1
    cluster.jobs[job.metadata.name] = replace(
        job,
        metadata=replace(job.metadata, generation=generation),
        spec=replace(job.spec, suspend=suspend),
    )


def test_a_suspended_run_stops_and_goes_on_from_its_journal() -> None:
    cluster = started(Random(5), jobs=1, failures=0.0)  # noqa: S311
    job = in_phase(cluster, RunState.RUNNING)
    edit(cluster, job, suspend=True)
    for _ in range(3):
        reconcile_all(cluster)
    (job,) = cluster.jobs.values()
    assert job.status is not None
    assert word(job.status, "Suspended") == "True Suspended"
    assert [run.state for run in cluster.runs.values()] == [RunState.CANCELLED]
    edit(cluster, job, suspend=False)
    settle(cluster)
    check_the_end(cluster)
    (job,) = cluster.jobs.values()
    assert job.status is not None
    assert word(job.status, "Complete") == "True AllItemsSucceeded"
    assert word(job.status, "Suspended") == "False Resumed"
