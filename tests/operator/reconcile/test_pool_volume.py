"""Results on a coordinator's volume outlive the pool, for as long as their jobs exist."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from reconcile.rules import decide
from reconcile.test_device_pool import children, see, snapshot
from reconcile.test_inference_job import PLANNED, job, knows, run, status_of, works, written
from reconcile.values import NOW, UID, condition, pool
from shoal_api.kinds import InferenceJob
from shoal_operator.reconcile.snapshot import (
    InferenceJobSnapshot,
    RunState,
    WorkerPhase,
    Workload,
)
from shoal_operator.reconcile.volumes import Claim
from shoal_protocol.units import Bytes

RUNNING = knows(PLANNED, run(RunState.RUNNING, succeeded=8))
ENDED = knows(PLANNED, run(RunState.COMPLETE, succeeded=24))


def with_conditions(of: InferenceJobSnapshot) -> InferenceJob:
    """The job with what is decided about it in its status."""
    return replace(of.job, status=status_of(decide(of)))


def transferred(phase: WorkerPhase) -> InferenceJob:
    """A job that ended after its results were transferred, or could not be."""
    return with_conditions(works(written(ENDED, decide(ENDED)), "out", phase))


def owners(*jobs: InferenceJob) -> list[tuple[str, str, bool]]:
    """Kind, uid, and whether it is the controller, of the owners of the coordinator's claim."""
    claim = children(decide(snapshot(own_jobs=jobs)), "PersistentVolumeClaim")["shelf-coordinator"]
    metadata = claim["metadata"]
    assert isinstance(metadata, Mapping)
    references = metadata.get("ownerReferences", [])
    return [(each["kind"], each["uid"], each["controller"]) for each in references]


@pytest.mark.parametrize("of", [with_conditions(RUNNING), with_conditions(ENDED)])
def test_the_volume_belongs_also_to_jobs_with_results_on_it(of: InferenceJob) -> None:
    uid = of.metadata.uid or ""
    assert owners(of) == [("DevicePool", UID, True), ("InferenceJob", uid, False)]


def test_results_that_could_not_be_transferred_keep_the_volume_until_the_job_is_deleted() -> None:
    assert len(owners(transferred(WorkerPhase.FAILED))) == 2


@pytest.mark.parametrize(
    "of",
    [
        job(),
        with_conditions(knows(PLANNED, run(RunState.RUNNING))),
        transferred(WorkerPhase.SUCCEEDED),
        replace(job(), metadata=replace(with_conditions(RUNNING).metadata, deletion_timestamp=NOW)),
    ],
)
def test_a_job_without_results_there_does_not_hold_the_volume(of: InferenceJob) -> None:
    assert owners(of) == [], "the operator makes the pool its owner, as of everything"


@pytest.mark.parametrize(
    ("size", "claimed"), [("5Gi", "5Gi"), ("1536Mi", "1536Mi"), ("1G", "1000000000")]
)
def test_a_claim_says_its_size_as_people_do_where_that_is_exact(size: str, claimed: str) -> None:
    of = pool(coordinator={"storage": {"size": size}})
    made = children(decide(snapshot(of, claim=None)), "PersistentVolumeClaim")["shelf-coordinator"]
    spec = made["spec"]
    assert isinstance(spec, Mapping)
    assert spec["resources"] == {"requests": {"storage": claimed}}


@pytest.mark.parametrize("waits", ["WaitForFirstConsumer", "WaitForPodScheduled"])
def test_where_the_volume_waits_for_a_pod_what_keeps_the_pod_away_is_said(waits: str) -> None:
    refused = "is forbidden: exceeded quota: memory"
    claim = Claim(
        name="shelf-coordinator", bound=False, size=Bytes(5 << 30), message=f"{waits}: waiting"
    )
    workload = Workload(name="shelf-coordinator", wanted=1, ready=0, current=False)
    failing = replace(workload, message=refused)
    told = see(claim=claim, coordinator=failing).status
    for kind in ("CoordinatorReady", "Ready"):
        known = condition(told, kind)
        assert (known.reason, known.message) == ("CoordinatorFailing", refused)
    unprovisioned = replace(claim, message="ProvisioningFailed: no space left")
    for pending, pod in ((unprovisioned, failing), (claim, workload)):
        known = condition(see(claim=pending, coordinator=pod).status, "CoordinatorReady")
        assert known.reason == "VolumePending"
        assert pending.message in known.message
