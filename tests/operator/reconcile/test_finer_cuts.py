"""A fragment that fits on no device, as measured, is cut finer, and the job resumes."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from reconcile.rules import decide
from reconcile.simulation import ITEMS, Cluster, started
from reconcile.test_inference_job import PLANNED, knows, run, written
from reconcile.test_placement import KEPT, PARTITION, device, devices, placement, see
from reconcile.test_walks import check_the_end, disturb, heal, reconcile_all, settle
from reconcile.values import MIB, NOW, condition, document, word
from shoal_api.fields import Condition, ConditionStatus
from shoal_api.kinds.inference_job import FinerCut, InferenceJobStatus
from shoal_api.kinds.partition import PartitionStatus
from shoal_operator.reconcile.decision import SubmitJob
from shoal_operator.reconcile.names import job_id
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    DeviceState,
    InferenceJobSnapshot,
    RunState,
)
from shoal_protocol.digests import Digest
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import Bytes

TOO_LARGE = "fragment 0 of ocr needs 70 MiB; n1 has 64 MiB; cut finer or raise the budget"
NOW_CUT = f"{TOO_LARGE}; now it is cut for 48 MiB on each device"


def cut_for(command: tuple[str, ...]) -> PartitionDocument:
    """A model of 60 MiB in as few equal fragments as the limit allows."""
    limit = int(command[command.index("--max-bytes") + 1]) if "--max-bytes" in command else 0
    count = -(-60 * MIB // limit) if limit else int(command[command.index("--fragments") + 1])
    return renamed(document(fragments=count, resident=60 * MIB // count), f"{count:02x}")


def renamed(of: PartitionDocument, prefix: str) -> PartitionDocument:
    """The document with other digests."""
    digests = [f"sha256:{prefix}{each.index:062x}" for each in of.fragments]
    fragments = zip(of.fragments, digests, strict=True)
    return replace(
        of, fragments=tuple(replace(each, digest=Digest(digest)) for each, digest in fragments)
    )


def above(mib: int) -> Callable[[PartitionDocument], bool]:
    """What no device can run, though its budget is 64 MiB."""
    return lambda of: any(each.resident_bytes > mib * MIB for each in of.fragments)


def lab(seed: int, most_mib: int, jobs: int = 1, failures: float = 0.0) -> Cluster:
    """A cluster where only fragments of at most so many MiB run."""
    return started(
        Random(seed),  # noqa: S311
        jobs,
        failures=failures,
        cut=cut_for,
        too_large=above(most_mib),
    )


def status_of(cluster: Cluster) -> InferenceJobStatus:
    """That of the only job."""
    (job,) = cluster.jobs.values()
    assert job.status is not None
    return job.status


def told(cluster: Cluster) -> set[str]:
    return {message for _, reason, message in cluster.notes if reason == "CutFiner"}


def test_a_model_whose_fragment_is_too_large_is_cut_finer_and_its_job_succeeds() -> None:
    cluster = lab(1, most_mib=40)
    settle(cluster)
    check_the_end(cluster)
    status = status_of(cluster)
    assert word(status, "Complete") == "True AllItemsSucceeded"
    assert status.finer_cut is not None
    assert (status.finer_cut.cuts, status.finer_cut.max_fragment_size_bytes) == (2, 48 * MIB)
    assert told(cluster) == {status.finer_cut.message}
    assert cluster.partitions["job-0"].spec.max_fragment_size == 48 * MIB
    assert set(cluster.partitions) == {"job-0"}
    assert set(cluster.finished.values()) == {1}, "items that had finished ran again"


def test_a_finer_limit_that_changes_no_cut_is_not_run() -> None:
    """For 36 MiB the model is cut as for 48 MiB."""
    cluster = lab(2, most_mib=25)
    settle(cluster)
    status = status_of(cluster)
    assert word(status, "Complete") == "True AllItemsSucceeded"
    assert status.finer_cut is not None
    assert (status.finer_cut.cuts, status.finer_cut.max_fragment_size_bytes) == (4, 27 * MIB)
    (of,) = cluster.placements.values()
    assert of.status is not None
    assert of.status.epoch == 3


def test_a_model_that_no_finer_cut_helps_fails_with_need_and_have() -> None:
    cluster = lab(3, most_mib=10)
    settle(cluster)
    check_the_end(cluster)
    status = status_of(cluster)
    assert word(status, "Failed") == "True Budget"
    text = "fragment 0 needs 70 MiB; n1 has 64 MiB; it was cut 4 times, the last for 27 MiB"
    assert condition(status, "Failed").message == text
    assert cluster.transferred, "what had finished is transferred"


SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.minutes) for seed in range(3, 30))]


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_cut_at_most_four_times_whatever_dies_meanwhile(seed: int) -> None:
    cluster = lab(seed, most_mib=(40, 25, 10)[seed % 3], jobs=2, failures=0.05)
    for _ in range(60):
        if cluster.chance.random() < 0.3:
            disturb(cluster)
        reconcile_all(cluster, dies=0.3)
        cluster.pass_time(cluster.chance.choice((1, 5, 20)))
    heal(cluster)
    settle(cluster)
    check_the_end(cluster)
    for job in cluster.jobs.values():
        assert job.status is not None
        finer = job.status.finer_cut
        assert finer is None or 2 <= finer.cuts <= 4
        assert all(cluster.finished.get((job_id(job), item), 0) <= 1 for item in range(ITEMS))


# ---- one decision --------------------------------------------------------------------------------


def failed(succeeded: int = 3) -> InferenceJobSnapshot:
    """A job whose run failed since a fragment is too large."""
    return knows(
        PLANNED, run(RunState.FAILED, succeeded=succeeded, reason="Budget", message=TOO_LARGE)
    )


def finer(mib: int = 48, cuts: int = 2) -> FinerCut:
    return FinerCut(cuts=cuts, max_fragment_size_bytes=mib * MIB, message=NOW_CUT)


def cutting(snapshot: InferenceJobSnapshot, mib: int = 48, cuts: int = 2) -> InferenceJobSnapshot:
    """The same while the finer cut is asked for."""
    decision = decide(failed())
    assert isinstance(decision.status, InferenceJobStatus)
    status = replace(decision.status, finer_cut=finer(mib, cuts))
    return replace(snapshot, job=replace(snapshot.job, status=status))


def refused(
    snapshot: InferenceJobSnapshot, mib: int, reason: str = "Refused"
) -> InferenceJobSnapshot:
    """The Partition cannot be cut for this."""
    partition = snapshot.partition
    assert partition is not None
    cut = Condition(
        type="Cut",
        status=ConditionStatus.FALSE,
        reason=reason,
        message="node conv1 needs 50 MiB, the limit is 48 MiB",
        observed_generation=partition.generation,
        last_transition_time=NOW,
    )
    return replace(
        snapshot,
        partition=replace(
            partition,
            spec=replace(partition.spec, max_fragment_size=Bytes(mib * MIB)),
            status=PartitionStatus(conditions=(cut,)),
        ),
        document=None,
    )


def test_the_failed_run_is_no_verdict_while_the_model_is_cut_finer() -> None:
    before = failed()
    decision = decide(before)
    assert isinstance(decision.status, InferenceJobStatus)
    assert decision.status.finer_cut == finer()
    assert word(decision.status, "Failed") == "False NotFailed"
    assert word(decision.status, "Complete") == "False CuttingFiner"
    assert condition(decision.status, "Complete").message.startswith(NOW_CUT)
    assert decision.status.items is not None
    assert decision.status.items.succeeded == 3
    (partition, _) = decision.children
    assert partition["spec"] == {"modelRef": {"name": "rec"}, "maxFragmentSize": 48 * MIB}
    assert decision.calls == ()
    assert [note.reason for note in decision.notes] == ["StartedJob", "CutFiner"]
    again = decide(written(before, decision))
    assert (again.status, again.children) == (decision.status, decision.children)


def test_the_next_operator_says_that_the_model_was_cut_finer_if_the_last_one_died_before() -> None:
    before = cutting(failed(), mib=64)
    of = before.placement
    assert of is not None
    assert of.status is not None
    planned = replace(before, placement=replace(of, status=replace(of.status, epoch=2)))
    decision = decide(planned)
    assert word(decision.status, "Complete") == "False Submitting"
    assert "CutFiner" in [note.reason for note in decision.notes]


def test_what_a_coordinator_says_at_length_is_cut_to_what_a_status_takes() -> None:
    long = run(RunState.FAILED, message="x" * 40_000, reason="Budget")
    status = decide(knows(failed(), long)).status
    assert isinstance(status, InferenceJobStatus)
    assert status.finer_cut is not None
    assert status.finer_cut.message == "x" * 4093 + "..."


def test_a_newer_plan_runs_before_the_model_is_cut_finer() -> None:
    of = PLANNED.placement
    assert of is not None
    assert of.status is not None
    replanned = replace(of, status=replace(of.status, epoch=2))
    decision = decide(replace(failed(), placement=replanned))
    assert isinstance(decision.status, InferenceJobStatus)
    assert decision.status.finer_cut is None
    (call,) = decision.calls
    assert isinstance(call, SubmitJob)
    assert call.plan == 2


def test_a_finer_cut_that_is_refused_fails_the_job_with_need_have_and_the_refusal() -> None:
    for reason in ("Refused", "TooManyFragments"):
        decision = decide(refused(cutting(failed(0)), 48, reason))
        assert word(decision.status, "Failed") == "True Budget"
        text = f"{TOO_LARGE}; it cannot be cut for 48 MiB: node conv1 needs 50 MiB, the limit is"
        assert condition(decision.status, "Failed").message.startswith(text)


def test_a_refusal_of_the_cut_before_is_not_one_of_the_finer_cut() -> None:
    decision = decide(refused(cutting(failed()), 64))
    assert word(decision.status, "Complete") == "False CuttingFiner"


def test_a_finer_cut_that_has_no_place_fails_the_job_once_every_device_is_there() -> None:
    """With `residency: Single` each fragment needs a device of its own."""
    before = cutting(failed(0), mib=64)
    of = before.placement
    assert of is not None
    assert of.status is not None
    assert isinstance(before.view, CoordinatorView)
    planned = Condition(
        type="Planned",
        status=ConditionStatus.FALSE,
        reason="Infeasible",
        message="5 fragments, 3 devices",
        observed_generation=of.generation,
        last_transition_time=NOW,
    )
    of = replace(of, status=replace(of.status, stages=(), conditions=(planned,)))
    infeasible = replace(before, placement=of)
    decision = decide(infeasible)
    assert word(decision.status, "Failed") == "True Budget"
    text = f"{TOO_LARGE}; cut for 64 MiB, it cannot be placed: 5 fragments, 3 devices"
    assert condition(decision.status, "Failed").message == text
    lost = device("n9", state=DeviceState.LOST)
    view = replace(before.view, devices=(*before.view.devices, lost))
    decision = decide(replace(infeasible, view=view))
    assert word(decision.status, "Failed") == "False NotFailed"


def test_the_users_own_partition_is_never_changed() -> None:
    assert PLANNED.partition is not None
    before = failed(0)
    spec = replace(before.job.spec, model_ref=None, partition_ref=before.job.spec.model_ref)
    decision = decide(replace(before, job=replace(before.job, spec=spec)))
    assert word(decision.status, "Failed") == "True Budget"
    assert condition(decision.status, "Failed").message == TOO_LARGE
    assert decision.children == ()


def test_items_that_failed_by_themselves_cut_nothing() -> None:
    decision = decide(knows(PLANNED, run(RunState.FAILED, failed=3, reason="ItemsFailed")))
    assert isinstance(decision.status, InferenceJobStatus)
    assert decision.status.finer_cut is None


def test_a_limit_below_the_smallest_that_a_partition_may_have_is_not_asked_for() -> None:
    before = failed(0)
    assert before.partition is not None
    tiny = replace(before.partition.spec, max_fragment_size=Bytes(MIB))
    decision = decide(replace(before, partition=replace(before.partition, spec=tiny)))
    assert word(decision.status, "Failed") == "True Budget"


def test_a_lost_run_is_made_again_with_the_cut_that_was_found() -> None:
    before = cutting(knows(PLANNED), mib=64)
    decision = decide(before)
    assert isinstance(decision.status, InferenceJobStatus)
    assert decision.status.finer_cut == finer(64)


def test_other_fragments_are_another_plan_even_if_they_are_as_many() -> None:
    of, _, first = see(placement(), devices("a", "b", "c"))
    other, status = renamed(KEPT.document, "be"), PARTITION.status
    assert status is not None
    pairs = zip(status.fragments, other.fragments, strict=True)
    shown = tuple(replace(each, digest=given.digest) for each, given in pairs)
    partition = replace(PARTITION, status=replace(status, fragments=shown))
    again = (partition, replace(KEPT, document=other))
    _, _, second = see(of, devices("a", "b", "c"), of_what=again)
    assert [stage.fragments for stage in second.stages] == [s.fragments for s in first.stages]
    assert (first.epoch, second.epoch) == (1, 2)
