"""A Partition is cut by one worker, and its document kept in a ConfigMap."""

import json
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from reconcile.values import (
    DIGEST,
    MIB,
    NAMESPACE,
    NOW,
    SETTINGS,
    condition,
    document,
    make,
    model,
    passes_its_schema,
    pool,
    word,
)
from shoal_api.fields import Condition, ConditionStatus
from shoal_api.kinds import DevicePool, Model, Partition, Placement
from shoal_api.kinds.device_pool import DevicePoolStatus
from shoal_api.kinds.model import ModelStatus
from shoal_api.kinds.partition import PartitionStatus
from shoal_operator.reconcile.decision import Decision, Manifest
from shoal_operator.reconcile.partition import current_document, read_document, reconcile_partition
from shoal_operator.reconcile.snapshot import (
    PartitionSnapshot,
    StoredDocument,
    Worker,
    WorkerPhase,
)
from shoal_protocol.partition import TensorSpec, document_to_json


def ready_model(**more: object) -> Model:
    of = model(**more)  # type: ignore[arg-type]
    ready = Condition(
        type="Ready",
        status=ConditionStatus.TRUE,
        reason="Ready",
        observed_generation=of.metadata.generation,
        last_transition_time=NOW,
    )
    return replace(of, status=ModelStatus(conditions=(ready,), digest=DIGEST))


def partition(generation: int = 1, **how: object) -> Partition:
    return make(Partition, "rec-3", {"modelRef": {"name": "rec"}, **how}, generation=generation)


def see(
    of: Partition,
    *workers: Worker,
    on: Model | None = None,
    kept: StoredDocument | None = None,
    pools: tuple[DevicePool, ...] = (),
    now: str = NOW,
    offline: bool = False,
) -> Decision:
    return decided(
        PartitionSnapshot(
            now=now,
            settings=replace(SETTINGS, offline=offline),
            partition=of,
            model=on,
            workers=workers,
            document=kept,
            pools=pools,
        )
    )


def decided(snapshot: PartitionSnapshot) -> Decision:
    decision = reconcile_partition(snapshot)
    assert isinstance(decision.status, PartitionStatus)
    assert passes_its_schema(replace(snapshot.partition, status=decision.status))
    return decision


def written(of: Partition, decision: Decision) -> Partition:
    assert isinstance(decision.status, PartitionStatus)
    return replace(of, status=decision.status)


def only_child(decision: Decision, kind: str) -> Manifest:
    (child,) = decision.children
    assert child["kind"] == kind
    return child


def name_of(child: Manifest) -> str:
    metadata = child["metadata"]
    assert isinstance(metadata, dict)
    return str(metadata["name"])


def command_of(child: Manifest) -> list[str]:
    pods: object = child["spec"]
    for step in ("template", "spec", "containers"):
        assert isinstance(pods, dict)
        pods = pods[step]
    assert isinstance(pods, list)
    command = pods[0]["command"]
    assert isinstance(command, list)
    return command


def cut(of: Partition, on: Model, pools: tuple[DevicePool, ...] = ()) -> tuple[Worker, Decision]:
    """The worker that has cut, and what is decided then."""
    name = name_of(only_child(see(of, on=on, pools=pools), "Job"))
    output = document_to_json(document()).encode()
    done = Worker(name=name, phase=WorkerPhase.SUCCEEDED, output=output)
    return done, see(of, done, on=on, pools=pools)


def test_the_document_is_kept_in_a_config_map_and_told() -> None:
    of, on = partition(fragments=3), ready_model()
    _, decision = cut(of, on)
    kept = read_document(only_child(decision, "ConfigMap"))
    assert kept is not None
    assert kept.document == document()
    assert kept.arguments == ("--fragments", "3", "--digest", DIGEST)
    assert word(decision.status, "Ready") == "True Ready"
    assert isinstance(decision.status, PartitionStatus)
    assert [each.successors for each in decision.status.fragments] == [(1,), (2,), ()]
    assert decision.status.boundary_bytes == 64
    assert [note.message for note in decision.notes] == [
        "3 fragments, the largest needs 20 MiB resident"
    ]


def test_the_worker_goes_when_the_document_is_kept_and_then_nothing_changes() -> None:
    of, on = partition(fragments=3), ready_model()
    done, decision = cut(of, on)
    assert decision.removals == (), "its answer is needed until the ConfigMap is there"
    kept = read_document(only_child(decision, "ConfigMap"))
    of = written(of, decision)
    after = see(of, done, on=on, kept=kept)
    assert [key.name for key in after.removals] == [done.name]
    last = see(of, on=on, kept=kept, now="2026-03-02T12:00:00Z")
    assert last == Decision(status=last.status)
    assert last.status == of.status


def test_a_config_map_that_somebody_spoilt_is_made_again() -> None:
    of, on = partition(fragments=3), ready_model()
    _, decision = cut(of, on)
    child: Any = only_child(decision, "ConfigMap")
    assert read_document(child) is not None
    data = {"partition.json.gz": "bm9uc2Vuc2U="}
    assert read_document({**child, "binaryData": data}) is None
    for arguments in ("[", "[" * 200_000, '{"--to": 1}', "[1]"):
        noted = {**child["metadata"]["annotations"], "shoal.dev/arguments": arguments}
        metadata = {**child["metadata"], "annotations": noted}
        assert read_document({**child, "metadata": metadata}) is None
    only_child(see(written(of, decision), on=on), "Job")


@pytest.mark.parametrize(
    ("how", "arguments"),
    [
        ({"fragments": 5}, ["--fragments", "5"]),
        ({"maxFragmentSize": "16Mi"}, ["--max-bytes", str(16 * MIB)]),
        ({"cuts": ["a", "ij,jk->ik"]}, ["--cut", "a", "--cut", "ij,jk->ik"]),
        ({}, ["--max-bytes", str(24 * MIB)]),
    ],
)
def test_the_worker_is_told_how_to_cut(how: dict[str, Any], arguments: list[str]) -> None:
    pools = (pool("one"), pool("two", budget={"memory": "24Mi"}))
    child = only_child(see(partition(**how), on=ready_model(), pools=pools), "Job")
    command = command_of(child)
    assert command[:3] == ["shoal", "partition", "pvc://models/rec.onnx"]
    assert command[3 : 3 + len(arguments)] == arguments
    assert command[-3:] == ["--document", "--volume", "models=/volumes/models"]


def test_without_a_pool_there_is_nothing_to_cut_for() -> None:
    decision = see(partition(), on=ready_model())
    assert word(decision.status, "Cut") == "False WaitingForPool"
    assert decision.children == ()
    percent = pool(budget={"percent": 50})
    assert word(see(partition(), on=ready_model(), pools=(percent,)).status, "Cut") == (
        "False WaitingForPool"
    )
    percent = replace(percent, status=DevicePoolStatus(smallest_budget_bytes=32 * MIB))
    child = only_child(see(partition(), on=ready_model(), pools=(percent,)), "Job")
    assert str(32 * MIB) in command_of(child)


def test_a_smaller_pool_that_comes_later_cuts_nothing_anew() -> None:
    of, on, first = partition(), ready_model(), pool("one")
    _, decision = cut(of, on, (first,))
    kept = read_document(only_child(decision, "ConfigMap"))
    small = pool("two", budget={"memory": "8Mi"})
    after = see(written(of, decision), on=on, kept=kept, pools=(first, small))
    assert after == Decision(status=after.status)


@dataclass(frozen=True, slots=True)
class Uncut:
    """A Partition that says no size: cut for 64 MiB, in fragments of 20 MiB, and placed."""

    of: Partition
    kept: StoredDocument
    on: Model = field(default_factory=ready_model)

    def see(self, budget: str, *workers: Worker, runs: bool = False) -> Decision:
        """On a pool that has this budget now, beside one that nobody uses."""
        pools = pool("one", budget={"memory": budget}), pool("two", budget={"memory": "8Mi"})
        spec = {"partitionRef": {"name": "rec-3"}, "poolRef": {"name": "one"}}
        return decided(
            PartitionSnapshot(
                now=NOW,
                settings=SETTINGS,
                partition=self.of,
                model=self.on,
                workers=workers,
                document=self.kept,
                pools=pools,
                placements=(make(Placement, "rec", spec),),
                runs=runs,
            )
        )


@pytest.fixture
def uncut() -> Uncut:
    of, on = partition(), ready_model()
    _, decision = cut(of, on, (pool("one"),))
    kept = read_document(only_child(decision, "ConfigMap"))
    assert kept is not None
    return Uncut(written(of, decision), kept)


@pytest.mark.parametrize("budget", ["16Mi", "128Mi"])
def test_other_budgets_cut_anew_and_the_finished_cut_stays_until_then(
    uncut: Uncut, budget: str
) -> None:
    cutting = uncut.see(budget)
    child = only_child(cutting, "Job")
    assert command_of(child)[3:5] == ["--max-bytes", str(int(budget[:-2]) * MIB)]
    assert cutting.status == uncut.of.status
    output = document_to_json(document(2)).encode()
    done = Worker(name=name_of(child), phase=WorkerPhase.SUCCEEDED, output=output)
    stored = uncut.see(budget, done)
    kept = read_document(only_child(stored, "ConfigMap"))
    assert kept is not None
    assert kept.document == document(2)
    after = replace(uncut, of=written(uncut.of, stored), kept=kept).see(budget)
    assert after == Decision(status=after.status)
    assert word(after.status, "Ready") == "True Ready"


@pytest.mark.parametrize("budget", ["20Mi", "64Mi", "72Mi"])
def test_budgets_that_hold_the_fragments_and_are_not_much_larger_cut_nothing_anew(
    uncut: Uncut, budget: str
) -> None:
    after = uncut.see(budget)
    assert after == Decision(status=after.status)
    assert after.status == uncut.of.status


def test_while_a_job_runs_nothing_is_cut_anew(uncut: Uncut) -> None:
    after = uncut.see("16Mi", runs=True)
    assert after == Decision(status=after.status, requeue_seconds=after.requeue_seconds)
    assert after.status == uncut.of.status
    assert after.requeue_seconds, "nobody says when the job ends"


def test_where_no_cut_is_possible_for_other_budgets_the_finished_one_stays(uncut: Uncut) -> None:
    name = name_of(only_child(uncut.see("16Mi"), "Job"))
    failed = Worker(name=name, phase=WorkerPhase.FAILED, message="too large", refused=True)
    after = uncut.see("16Mi", failed)
    assert after.status == uncut.of.status
    assert [(note.reason, note.warning) for note in after.notes] == [("Refused", True)]
    assert (after.children, after.removals) == ((), ())
    back = uncut.see("64Mi", failed)
    assert [key.name for key in back.removals] == [name]


def test_an_edit_cuts_anew_and_shows_nothing_of_the_old_cut() -> None:
    of, on = partition(fragments=3), ready_model()
    _, decision = cut(of, on)
    kept = read_document(only_child(decision, "ConfigMap"))
    edited = replace(partition(generation=2, fragments=4), status=written(of, decision).status)
    after = see(edited, on=on, kept=kept)
    only_child(after, "Job")
    assert word(after.status, "Ready") == "False Cutting"
    assert isinstance(after.status, PartitionStatus)
    assert after.status.fragments == ()
    assert current_document(written(edited, after), kept) is None
    assert current_document(written(of, decision), kept) == document()


def test_a_status_that_tells_of_another_document_makes_none_current() -> None:
    of, on = partition(fragments=3), ready_model()
    _, decision = cut(of, on)
    other = StoredDocument(recipe="", arguments=(), document=document(4))
    assert current_document(written(of, decision), other) is None


@pytest.mark.parametrize(("on", "reason"), [(None, "ModelNotFound"), (model(), "ModelNotReady")])
def test_it_waits_for_its_model(on: Model | None, reason: str) -> None:
    decision = see(partition(fragments=2), on=on)
    assert word(decision.status, "Ready") == f"False {reason}"
    assert decision.children == ()


def test_a_model_that_was_edited_is_waited_for() -> None:
    on = ready_model()
    edited = replace(model(shapes=[{"input": "x", "shape": [1]}], generation=2), status=on.status)
    assert word(see(partition(fragments=2), on=edited).status, "Ready") == "False ModelNotReady"


def test_a_document_too_large_for_a_config_map_is_said_so() -> None:
    chance = Random(1)  # noqa: S311 - bytes that do not pack
    made = document()
    names = tuple(
        TensorSpec(name=chance.randbytes(200).hex(), dtype="float", shape=None) for _ in range(6000)
    )
    large = replace(
        made,
        fragments=(
            replace(made.fragments[0], outputs=(*made.fragments[0].outputs, *names)),
            *made.fragments[1:],
        ),
    )
    of, on = partition(fragments=3), ready_model()
    name = name_of(only_child(see(of, on=on), "Job"))
    output = document_to_json(large).encode()
    decision = see(of, Worker(name=name, phase=WorkerPhase.SUCCEEDED, output=output), on=on)
    assert word(decision.status, "Ready") == "False DocumentTooLarge"
    assert "a ConfigMap holds 976.6 KiB" in condition(decision.status, "Ready").message
    assert decision.children == ()


def test_a_refusal_stands_and_a_failure_is_tried_again() -> None:
    of, on = partition(fragments=3), ready_model()
    name = name_of(only_child(see(of, on=on), "Job"))
    refused = Worker(
        name=name, phase=WorkerPhase.FAILED, refused=True, message="node Conv_3 needs 80 MiB"
    )
    of = written(of, see(of, refused, on=on))
    later = "2026-03-01T13:00:00Z"
    decision = see(of, refused, on=on, now=later)
    assert (decision.children, decision.removals) == ((), ())
    assert word(decision.status, "Cut") == "False Refused"
    failed = Worker(name=name, phase=WorkerPhase.FAILED, message="OOMKilled", ended_at=NOW)
    of = written(partition(fragments=3), see(partition(fragments=3), failed, on=on))
    again = see(of, failed, on=on, now=later)
    assert [key.name for key in again.removals] == [name]


def test_offline_a_remote_model_is_not_cut() -> None:
    on = replace(ready_model(), spec=model("https://models.example/rec.onnx").spec)
    decision = see(partition(fragments=3), on=on, offline=True)
    assert word(decision.status, "Cut") == "False Offline"


def test_an_unreadable_answer_is_said_so() -> None:
    of, on = partition(fragments=3), ready_model()
    name = name_of(only_child(see(of, on=on), "Job"))
    output = json.dumps({"version": 99}).encode()
    decision = see(of, Worker(name=name, phase=WorkerPhase.SUCCEEDED, output=output), on=on)
    assert word(decision.status, "Cut") == "False DocumentUnreadable"


def test_workers_that_deliver_are_left_alone() -> None:
    of, on = partition(fragments=3), ready_model()
    deliver = Worker(name="rec-3-deliver-01234567", phase=WorkerPhase.RUNNING)
    stale = Worker(name="rec-3-cut-01234567", phase=WorkerPhase.RUNNING)
    decision = see(of, deliver, stale, on=on)
    assert [(key.namespace, key.name) for key in decision.removals] == [(NAMESPACE, stale.name)]
