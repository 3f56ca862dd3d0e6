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
from shoal_api.kinds.device_pool import DeviceCounts, DevicePoolStatus
from shoal_api.kinds.inference_job import FinerCut, InferenceJobStatus
from shoal_api.kinds.partition import OutgrownFragment, PartitionStatus, SeenShape
from shoal_operator.reconcile.decision import SubmitJob
from shoal_operator.reconcile.job_cuts import is_asked
from shoal_operator.reconcile.names import job_id
from shoal_operator.reconcile.partition import recipe_of
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    DeviceState,
    InferenceJobSnapshot,
    RunState,
)
from shoal_protocol.digests import Digest
from shoal_protocol.partition import Outgrown, PartitionDocument
from shoal_protocol.units import Bytes

TOO_LARGE = "fragment 0 of ocr needs 70 MiB; n1 has 64 MiB; cut finer or raise the budget"
NOW_CUT = f"{TOO_LARGE}; now fragment 0 is divided"
MEASURED = (OutgrownFragment(fragment=0, need_bytes=70 * MIB),)


def cut_for(command: tuple[str, ...]) -> PartitionDocument:
    """A model of 60 MiB in as few equal fragments as the limit allows, some of them halved."""
    limit = int(command[command.index("--max-bytes") + 1]) if "--max-bytes" in command else 0
    count = -(-60 * MIB // limit) if limit else int(command[command.index("--fragments") + 1])
    sizes = [60 * MIB // count] * count
    divided = command[command.index("--outgrown") + 1] if "--outgrown" in command else ""
    for each in divided.split(",") if divided else ():
        number = int(each.partition("=")[0])
        sizes[number : number + 1] = [sizes[number] // 2] * 2
    made = document(fragments=len(sizes))
    fragments = zip(made.fragments, sizes, strict=True)
    made = replace(
        made,
        fragments=tuple(
            replace(each, resident_bytes=size, least_bytes=size) for each, size in fragments
        ),
    )
    return renamed(made, f"{len(sizes):02x}")


def renamed(of: PartitionDocument, prefix: str) -> PartitionDocument:
    """The document with other digests."""
    digests = [f"sha256:{prefix}{each.index:062x}" for each in of.fragments]
    fragments = zip(of.fragments, digests, strict=True)
    return replace(
        of, fragments=tuple(replace(each, digest=Digest(digest)) for each, digest in fragments)
    )


def above(mib: int) -> Callable[[PartitionDocument], tuple[Outgrown, ...]]:
    """What no device can run, though its budget is 64 MiB."""
    return lambda of: tuple(
        Outgrown(fragment=each.index, need_bytes=70 * MIB)
        for each in of.fragments
        if each.resident_bytes > mib * MIB
    )


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


def messages(cluster: Cluster) -> set[str]:
    return {message for _, reason, message in cluster.notes if reason == "CutFiner"}


def numbers_of(finer: FinerCut) -> list[int]:
    return [each.fragment for each in finer.outgrown]


def test_a_model_whose_fragment_is_too_large_is_divided_and_its_job_succeeds() -> None:
    cluster = lab(1, most_mib=40)
    settle(cluster)
    check_the_end(cluster)
    status = status_of(cluster)
    assert word(status, "Complete") == "True AllItemsSucceeded"
    assert status.finer_cut is not None
    assert (status.finer_cut.cuts, numbers_of(status.finer_cut)) == (2, [0])
    assert messages(cluster) == {status.finer_cut.message}
    spec = cluster.partitions["job-0"].spec
    assert (spec.max_fragment_size, spec.outgrown) == (64 * MIB, status.finer_cut.outgrown)
    assert set(cluster.partitions) == {"job-0"}
    assert set(cluster.finished.values()) == {1}, "items that had finished ran again"


def test_it_is_divided_until_every_part_fits() -> None:
    cluster = lab(2, most_mib=10)
    settle(cluster)
    status = status_of(cluster)
    assert word(status, "Complete") == "True AllItemsSucceeded"
    assert status.finer_cut is not None
    assert status.finer_cut.cuts == 4
    assert numbers_of(status.finer_cut) == [0, 1, 0, 3, 2, 1, 0], "the last of a run comes first"
    (of,) = cluster.placements.values()
    assert of.status is not None
    assert of.status.epoch == 4


SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.minutes) for seed in range(3, 30))]


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_cut_no_finer_than_it_takes_whatever_dies_meanwhile(seed: int) -> None:
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
    outgrown = (Outgrown(fragment=0, need_bytes=70 * MIB),)
    ended = run(
        RunState.FAILED,
        succeeded=succeeded,
        reason="Budget",
        message=TOO_LARGE,
        outgrown=outgrown,
    )
    return knows(PLANNED, ended)


FINER = FinerCut(cuts=2, max_fragment_size_bytes=64 * MIB, outgrown=MEASURED, message=NOW_CUT)


def cutting(snapshot: InferenceJobSnapshot, *, asked: bool = False) -> InferenceJobSnapshot:
    """The same while the finer cut is in the status; `asked`: in the Partition too."""
    decision = decide(failed())
    assert isinstance(decision.status, InferenceJobStatus)
    status = replace(decision.status, finer_cut=FINER)
    partition = snapshot.partition
    assert partition is not None
    if asked:
        partition = replace(partition, spec=replace(partition.spec, outgrown=MEASURED))
    job = replace(snapshot.job, status=status)
    return replace(snapshot, job=job, partition=partition)


def cut_finer(snapshot: InferenceJobSnapshot) -> InferenceJobSnapshot:
    """The same when the finer cut is made."""
    asked = cutting(snapshot, asked=True)
    assert asked.partition is not None
    assert asked.model is not None
    assert asked.document is not None
    stored = replace(asked.document, recipe=recipe_of(asked.partition, asked.model))
    return replace(asked, document=stored)


def refused(snapshot: InferenceJobSnapshot, reason: str = "Refused") -> InferenceJobSnapshot:
    """The Partition, as it is asked for, cannot be cut."""
    partition = snapshot.partition
    assert partition is not None
    cut = Condition(
        type="Cut",
        status=ConditionStatus.FALSE,
        reason=reason,
        message="fragment 0 took 70 MiB, and it cannot be divided",
        observed_generation=partition.generation,
        last_transition_time=NOW,
    )
    return replace(
        snapshot,
        partition=replace(partition, status=PartitionStatus(conditions=(cut,))),
        document=None,
    )


def test_the_failed_run_is_no_verdict_while_the_model_is_cut_finer() -> None:
    before = failed()
    decision = decide(before)
    assert isinstance(decision.status, InferenceJobStatus)
    assert decision.status.finer_cut == FINER
    assert word(decision.status, "Failed") == "False NotFailed"
    assert word(decision.status, "Complete") == "False CuttingFiner"
    assert condition(decision.status, "Complete").message.startswith(NOW_CUT)
    assert decision.status.items is not None
    assert decision.status.items.succeeded == 3
    (partition, _) = decision.children
    assert partition["spec"] == {
        "modelRef": {"name": "rec"},
        "maxFragmentSize": 64 * MIB,
        "outgrown": [{"fragment": 0, "needBytes": 70 * MIB}],
    }
    assert decision.calls == ()
    assert [note.reason for note in decision.notes] == ["StartedJob", "CutFiner"]
    again = decide(written(before, decision))
    assert (again.status, again.children) == (decision.status, decision.children)


def seeing(snapshot: InferenceJobSnapshot, **sizes: tuple[int, ...]) -> InferenceJobSnapshot:
    """The same, where the failed run has shown sizes."""
    view = snapshot.view
    assert isinstance(view, CoordinatorView)
    runs = {name: replace(each, seen=sizes) for name, each in view.runs.items()}
    return replace(snapshot, view=replace(view, runs=runs))


def test_a_model_is_cut_for_the_sizes_that_items_have_shown_before_anything_is_divided() -> None:
    before = seeing(failed(), frames=(1, 226), texts=(2,))
    decision = decide(before)
    assert isinstance(decision.status, InferenceJobStatus)
    finer = decision.status.finer_cut
    assert finer is not None
    assert (finer.cuts, finer.outgrown) == (2, ())
    assert finer.message.endswith("now it is cut for the sizes that items were seen to have")
    (partition, _) = decision.children
    assert partition["spec"] == {
        "modelRef": {"name": "rec"},
        "maxFragmentSize": 64 * MIB,
        "seen": [
            {"tensor": "frames", "shape": [1, 226]},
            {"tensor": "texts", "shape": [2]},
        ],
    }
    again = decide(written(before, decision))
    assert (again.status, again.children) == (decision.status, decision.children)


def test_the_order_in_which_sizes_are_listed_says_nothing() -> None:
    sizes = [SeenShape(tensor=name, shape=(1, size)) for name, size in (("b", 2), ("a", 3))]
    finer = replace(FINER, seen=tuple(sizes))
    spec = replace(PARTITION.spec, max_fragment_size=Bytes(64 * MIB), outgrown=MEASURED)
    one, other = (
        replace(PARTITION, spec=replace(spec, seen=tuple(each))) for each in (sizes, sizes[::-1])
    )
    assert is_asked(one, finer)
    assert is_asked(other, finer)
    model = failed().model
    assert model is not None
    assert recipe_of(one, model) == recipe_of(other, model)
    assert recipe_of(one, model) != recipe_of(replace(PARTITION, spec=spec), model)


def test_the_next_operator_says_that_the_model_was_cut_finer_if_the_last_one_died_before() -> None:
    before = cut_finer(failed())
    of = before.placement
    assert of is not None
    assert of.status is not None
    planned = replace(before, placement=replace(of, status=replace(of.status, epoch=2)))
    decision = decide(planned)
    assert word(decision.status, "Complete") == "False Submitting"
    assert "CutFiner" in [note.reason for note in decision.notes]


def test_what_a_coordinator_says_at_length_is_cut_to_what_a_status_takes() -> None:
    before = failed()
    assert isinstance(before.view, CoordinatorView)
    (long,) = [replace(each, message="x" * 40_000) for each in before.view.runs.values()]
    status = decide(knows(before, long)).status
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
        decision = decide(refused(cutting(failed(0), asked=True), reason))
        assert word(decision.status, "Failed") == "True Budget"
        text = f"{TOO_LARGE}; it cannot be cut finer: fragment 0 took 70 MiB, and it cannot be"
        assert condition(decision.status, "Failed").message.startswith(text)


def test_a_refusal_of_the_cut_before_is_not_one_of_the_finer_cut() -> None:
    decision = decide(refused(cutting(failed())))
    assert word(decision.status, "Complete") == "False CuttingFiner"


def without_place(snapshot: InferenceJobSnapshot) -> InferenceJobSnapshot:
    """The same where no plan has room for the fragments."""
    of = snapshot.placement
    assert of is not None
    assert of.status is not None
    planned = Condition(
        type="Planned",
        status=ConditionStatus.FALSE,
        reason="Infeasible",
        message="5 fragments, 3 devices",
        observed_generation=of.generation,
        last_transition_time=NOW,
    )
    status = replace(of.status, stages=(), conditions=(planned,))
    return replace(snapshot, placement=replace(of, status=status))


def test_a_finer_cut_that_has_no_place_fails_the_job_once_every_device_is_there() -> None:
    """With `residency: Single` each fragment needs a device of its own."""
    before = cut_finer(failed(0))
    assert isinstance(before.view, CoordinatorView)
    infeasible = without_place(before)
    decision = decide(infeasible)
    assert word(decision.status, "Failed") == "True Budget"
    text = f"{TOO_LARGE}; cut finer, it cannot be placed: 5 fragments, 3 devices"
    assert condition(decision.status, "Failed").message == text
    lost = device("n9", state=DeviceState.LOST)
    view = replace(before.view, devices=(*before.view.devices, lost))
    decision = decide(of_nodes(replace(infeasible, view=view), 4, ready=3))
    assert word(decision.status, "Failed") == "False NotFailed"
    decision = decide(of_nodes(replace(infeasible, view=view), 3, ready=3))
    assert word(decision.status, "Failed") == "True Budget", "its node is not the pool's any more"


def of_nodes(snapshot: InferenceJobSnapshot, total: int, *, ready: int) -> InferenceJobSnapshot:
    """The pool has so many nodes, and devices that are there."""
    assert snapshot.pool is not None
    status = DevicePoolStatus(devices=DeviceCounts(total=total, ready=ready))
    return replace(snapshot, pool=replace(snapshot.pool, status=status))


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


def test_what_no_coordinator_says_how_to_divide_fails_the_job() -> None:
    """One of an earlier version says that a fragment is too large, and not which."""
    decision = decide(knows(PLANNED, run(RunState.FAILED, reason="Budget", message=TOO_LARGE)))
    assert word(decision.status, "Failed") == "True Budget"
    assert condition(decision.status, "Failed").message == TOO_LARGE


def test_a_lost_run_is_made_again_with_the_cut_that_was_found() -> None:
    before = cut_finer(knows(PLANNED))
    decision = decide(before)
    assert isinstance(decision.status, InferenceJobStatus)
    assert decision.status.finer_cut == FINER


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
