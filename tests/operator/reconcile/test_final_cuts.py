"""Where no finer cut is possible and sizes are unknown, the cut before runs once more: each item
that is too large fails by itself, and the others run."""

from dataclasses import replace
from random import Random

import pytest

from reconcile.rules import decide
from reconcile.simulation import ITEMS, Cluster, started
from reconcile.test_finer_cuts import (
    FINER,
    MEASURED,
    TOO_LARGE,
    above,
    cut_for,
    cutting,
    failed,
    numbers_of,
    refused,
    seeing,
    status_of,
    without_place,
)
from reconcile.test_inference_job import knows, run, works, written
from reconcile.test_walks import disturb, heal, reconcile_all, settle
from reconcile.values import MIB, condition, word
from shoal_api.kinds.inference_job import Fallback, FinerCut, InferenceJobStatus, Retry
from shoal_api.kinds.partition import SeenShape
from shoal_operator.reconcile.decision import SubmitJob
from shoal_operator.reconcile.names import job_id
from shoal_operator.reconcile.partition import recipe_of
from shoal_operator.reconcile.snapshot import (
    InferenceJobSnapshot,
    Run,
    RunState,
    WorkerPhase,
)
from shoal_protocol.partition import Outgrown, PartitionDocument

REFUSAL = "it cannot be cut finer: fragment 0 took 70 MiB, and it cannot be divided"
LARGE = frozenset({1, 4})
"""Items for which no fragment fits."""


def with_unknown_sizes(of: PartitionDocument) -> PartitionDocument:
    """The same, where nobody knows what an item takes before it has come that far."""
    fragments = tuple(replace(each, activation_bytes=None) for each in of.fragments)
    return replace(of, fragments=fragments)


def spoken(snapshot: InferenceJobSnapshot) -> InferenceJobSnapshot:
    """The same with a model of unknown sizes."""
    stored = snapshot.document
    assert stored is not None
    document = with_unknown_sizes(stored.document)
    return replace(snapshot, document=replace(stored, document=document))


def finer_of(snapshot: InferenceJobSnapshot) -> FinerCut:
    """The next cut, as decided."""
    status = decide(snapshot).status
    assert isinstance(status, InferenceJobStatus)
    assert status.finer_cut is not None
    return status.finer_cut


def asked(finer: FinerCut, *, succeeded: int = 1) -> InferenceJobSnapshot:
    """A job that has asked for such a cut, whose Partition says so, too."""
    snapshot = cutting(failed(succeeded), asked=True)
    assert snapshot.partition is not None
    assert snapshot.job.status is not None
    spec = replace(snapshot.partition.spec, seen=finer.seen, outgrown=finer.outgrown)
    job = replace(snapshot.job, status=replace(snapshot.job.status, finer_cut=finer))
    return replace(snapshot, job=job, partition=replace(snapshot.partition, spec=spec))


def made(snapshot: InferenceJobSnapshot) -> InferenceJobSnapshot:
    """The same where the stored document is of the cut that the Partition asks for."""
    assert snapshot.partition is not None
    assert snapshot.model is not None
    assert snapshot.document is not None
    recipe = recipe_of(snapshot.partition, snapshot.model)
    return replace(snapshot, document=replace(snapshot.document, recipe=recipe))


WITH_FALLBACK = replace(FINER, fallback=Fallback())
LAST = FinerCut(
    cuts=1,
    max_fragment_size_bytes=64 * MIB,
    final=True,
    message=f"{TOO_LARGE}; {REFUSAL}; now each item that is too large fails by itself",
)


def last(ended: Run) -> InferenceJobSnapshot:
    """The last cut is in force, and this is its run."""
    return knows(made(asked(LAST)), replace(ended, final_cut=True))


def test_a_finer_cut_says_what_runs_where_it_is_not_possible_if_sizes_are_unknown() -> None:
    assert finer_of(failed()).fallback is None
    assert finer_of(spoken(failed())).fallback == Fallback()


def test_that_is_the_cut_that_ran_with_all_that_it_was_made_for() -> None:
    shapes = (SeenShape(tensor="frames", shape=(1, 226)),)
    before = spoken(made(asked(replace(FINER, seen=shapes))))
    finer = finer_of(seeing(before, frames=(1, 300)))
    assert (finer.seen[0].shape, finer.outgrown) == ((1, 300), ())
    assert finer.fallback == Fallback(seen=shapes, outgrown=MEASURED)


def test_where_every_item_has_its_verdict_nothing_runs_once_more() -> None:
    before = spoken(failed())
    assert before.run is not None
    ended = replace(before.run, failed=before.run.items - before.run.succeeded)
    assert finer_of(knows(before, ended)).fallback is None


def test_a_cut_that_is_refused_is_followed_by_the_one_before_for_the_last_time() -> None:
    before = refused(asked(WITH_FALLBACK))
    decision = decide(before)
    assert isinstance(decision.status, InferenceJobStatus)
    assert decision.status.finer_cut == LAST
    assert word(decision.status, "Failed") == "False NotFailed"
    (partition, _) = decision.children
    assert partition["spec"] == {"modelRef": {"name": "rec"}, "maxFragmentSize": 64 * MIB}
    assert [note.reason for note in decision.notes if note.warning] == ["CannotCutFiner"]
    again = decide(written(before, decision))
    assert (again.status, again.children) == (decision.status, decision.children)


def test_divisions_of_the_cut_before_stay() -> None:
    first = replace(FINER, fallback=Fallback())
    second = replace(first, cuts=3, outgrown=MEASURED * 2, fallback=Fallback(outgrown=MEASURED))
    finer = finer_of(refused(asked(second)))
    assert (finer.cuts, finer.outgrown, finer.final) == (2, MEASURED, True)


def test_a_cut_that_has_no_place_is_followed_by_the_one_before_too() -> None:
    before = without_place(made(asked(WITH_FALLBACK)))
    decision = decide(before)
    assert isinstance(decision.status, InferenceJobStatus)
    why = "cut finer, it cannot be placed: 5 fragments, 3 devices"
    assert decision.status.finer_cut is not None
    assert decision.status.finer_cut.final
    assert why in decision.status.finer_cut.message
    # Until the Placement has seen that cut, it still says so of the one before.
    stale = replace(made(asked(LAST)), placement=before.placement)
    assert word(decide(stale).status, "Failed") == "False NotFailed"


def test_where_sizes_are_known_a_refused_cut_is_the_verdict() -> None:
    decision = decide(refused(asked(FINER, succeeded=0)))
    assert word(decision.status, "Failed") == "True Budget"


def test_the_last_run_is_submitted_though_its_plan_is_that_of_the_run_before() -> None:
    before = made(asked(LAST))
    decision = decide(before)
    assert word(decision.status, "Complete") == "False Submitting"
    (call,) = decision.calls
    assert isinstance(call, SubmitJob)
    assert before.run is not None
    assert (call.plan, call.final_cut) == (before.run.plan, True)
    assert "CannotCutFiner" in [note.reason for note in decision.notes]


def test_a_run_of_a_finer_cut_is_not_the_last() -> None:
    of = made(asked(WITH_FALLBACK))
    assert of.placement is not None
    assert of.placement.status is not None
    status = replace(of.placement.status, epoch=2)
    (call,) = decide(replace(of, placement=replace(of.placement, status=status))).calls
    assert isinstance(call, SubmitJob)
    assert not call.final_cut


def test_a_last_run_that_is_lost_is_a_last_one_again() -> None:
    lost = works(knows(made(asked(LAST))), "in", WorkerPhase.SUCCEEDED)
    assert [each.kind for each in decide(lost).removals] == ["Job"], "its inputs are gone, too"
    again = replace(lost, job=replace(lost.job, status=replace(lost.before, items=None)))
    (call,) = decide(again).calls
    assert isinstance(call, SubmitJob)
    assert call.final_cut


def test_a_last_run_goes_on_as_any_other() -> None:
    decision = decide(last(run(RunState.RUNNING, succeeded=1)))
    assert word(decision.status, "Complete") == "False Running"
    assert decision.calls == ()


def too_large_for_all() -> InferenceJobSnapshot:
    """The last run has failed, and shows what another cut could be made for."""
    outgrown = (Outgrown(fragment=0, need_bytes=70 * MIB),)
    seen = {"frames": (1, 300)}
    ended = run(RunState.FAILED, reason="Budget", message=TOO_LARGE, outgrown=outgrown, seen=seen)
    return last(ended)


def test_how_the_last_run_ends_is_the_verdict_and_nothing_is_cut_again() -> None:
    decision = decide(too_large_for_all())
    assert isinstance(decision.status, InferenceJobStatus)
    assert decision.status.finer_cut == LAST
    assert word(decision.status, "Failed") == "True Budget"
    text = f"{TOO_LARGE}; it cannot be cut finer"
    assert condition(decision.status, "Failed").message == text


def test_a_retry_of_a_last_run_is_a_last_one() -> None:
    before = too_large_for_all()
    ended = written(before, decide(before))
    spec = replace(ended.job.spec, retry=Retry(number=1))
    (call,) = decide(replace(ended, job=replace(ended.job, spec=spec))).calls
    assert isinstance(call, SubmitJob)
    assert (call.retry, call.final_cut) == (1, True)


# ---- the little cluster --------------------------------------------------------------------------


def divisions(command: tuple[str, ...]) -> int:
    return command[command.index("--outgrown") + 1].count("=") if "--outgrown" in command else 0


def refusal(command: tuple[str, ...]) -> str:
    return "fragment 0 cannot be divided" if divisions(command) > 3 else ""


def too_large_to_be_placed(command: tuple[str, ...]) -> PartitionDocument:
    """A cut that is finer than that has a fragment which no device holds."""
    cut = with_unknown_sizes(cut_for(command))
    size = 70 * MIB if divisions(command) > 3 else cut.fragments[0].resident_bytes
    first = replace(cut.fragments[0], resident_bytes=size, least_bytes=size)
    return replace(cut, fragments=(first, *cut.fragments[1:]))


def lab(seed: int, jobs: int = 1) -> Cluster:
    """A cluster where no fragment runs for large items. A cut that is too fine is refused, or, for
    every second seed, has no place."""
    cluster = started(
        Random(seed),  # noqa: S311
        jobs,
        failures=0.0,
        too_large=above(0),
        large_items=LARGE,
    )
    if seed % 2:
        cluster.cut = too_large_to_be_placed
    else:
        cluster.cut, cluster.refusal = lambda command: with_unknown_sizes(cut_for(command)), refusal
    return cluster


def check_each_item(cluster: Cluster) -> None:
    """Large items have failed, and each of the others was finished once."""
    for job in cluster.jobs.values():
        assert job.status is not None
        assert word(job.status, "Failed") == "True ItemsFailed"
        items, finer = job.status.items, job.status.finer_cut
        assert items is not None
        assert (items.succeeded, items.failed) == (ITEMS - len(LARGE), len(LARGE))
        assert {each.item for each in job.status.failures} == LARGE
        assert finer is not None
        assert finer.final
        assert cluster.partitions[job.metadata.name].spec.outgrown == finer.outgrown
        name = job_id(job)
        finished = {item: cluster.finished.get((name, item), 0) for item in range(ITEMS)}
        assert finished == {item: int(item not in LARGE) for item in range(ITEMS)}


@pytest.mark.parametrize("seed", [0, 1])
def test_items_that_are_too_large_fail_by_themselves_and_the_others_run(seed: int) -> None:
    cluster = lab(seed)
    settle(cluster)
    check_each_item(cluster)
    finer = status_of(cluster).finer_cut
    assert finer is not None
    assert (finer.cuts, numbers_of(finer)) == (3, [0, 1, 0])
    told = [reason for _, reason, _ in cluster.notes if reason.endswith("Finer")]
    assert [each for at, each in enumerate(told) if each not in told[:at]] == [
        "CutFiner",
        "CannotCutFiner",
    ]


SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.minutes) for seed in range(3, 30))]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_item_has_its_verdict_whatever_dies_meanwhile(seed: int) -> None:
    cluster = lab(seed, jobs=2)
    for _ in range(60):
        if cluster.chance.random() < 0.3:
            disturb(cluster)
        reconcile_all(cluster, dies=0.3)
        cluster.pass_time(cluster.chance.choice((1, 5, 20)))
    heal(cluster)
    settle(cluster)
    check_each_item(cluster)
