"""What a job has its model cut for, when the devices of the pool have unequal budgets."""

from dataclasses import replace

from reconcile.rules import decide
from reconcile.test_inference_job import PLANNED, silent
from reconcile.test_placement import device
from reconcile.values import MIB, NOW, condition, word
from shoal_api.fields import Condition, ConditionStatus
from shoal_api.kinds.partition import PartitionStatus
from shoal_operator.reconcile.decision import Decision
from shoal_operator.reconcile.snapshot import CoordinatorView, InferenceJobSnapshot
from shoal_protocol.units import Bytes

REFUSAL = "node conv1 needs 41 MiB, the limit is 24 MiB"


def refused(*budgets_mib: int, cut_for: int) -> InferenceJobSnapshot:
    """A job whose Partition was refused, on devices with these budgets."""
    partition, view = PLANNED.partition, PLANNED.view
    assert partition is not None
    assert isinstance(view, CoordinatorView)
    cut = Condition(
        type="Cut",
        status=ConditionStatus.FALSE,
        reason="Refused",
        message=REFUSAL,
        observed_generation=partition.generation,
        last_transition_time=NOW,
    )
    partition = replace(
        partition,
        spec=replace(partition.spec, max_fragment_size=Bytes(cut_for * MIB)),
        status=PartitionStatus(conditions=(cut,)),
    )
    devices = tuple(device(f"d{mib}", budget=mib * MIB) for mib in budgets_mib)
    view = replace(view, devices=devices, runs={})
    return replace(PLANNED, partition=partition, document=None, view=view)


def sizes(decision: Decision) -> list[object]:
    """What the job's Partition is to be cut for."""
    found = [child["spec"] for child in decision.children if child["kind"] == "Partition"]
    return [spec["maxFragmentSize"] for spec in found if isinstance(spec, dict)]


def test_a_model_that_cannot_be_cut_for_the_smallest_device_is_cut_for_the_largest() -> None:
    decision = decide(refused(24, 64, 128, cut_for=24))
    assert sizes(decision) == [128 * MIB]
    assert word(decision.status, "Failed") == "False NotFailed"


def test_a_model_that_cannot_be_cut_for_the_largest_device_fails_its_job() -> None:
    decision = decide(refused(24, 64, 128, cut_for=128))
    assert word(decision.status, "Failed") == "True PartitionRefused"
    assert condition(decision.status, "Failed").message == REFUSAL


def test_nobody_gives_up_while_it_is_not_known_which_devices_there_are() -> None:
    decision = decide(silent(refused(24, 64, cut_for=24)))
    assert sizes(decision) == [24 * MIB]
    assert word(decision.status, "Failed") == "False NotFailed"


def test_a_larger_device_changes_nothing_about_a_cut_that_was_made() -> None:
    assert PLANNED.partition is not None
    size = PLANNED.partition.spec.max_fragment_size
    assert isinstance(PLANNED.view, CoordinatorView)
    larger = replace(PLANNED.view, devices=(*PLANNED.view.devices, device("z", budget=900 * MIB)))
    assert sizes(decide(replace(PLANNED, view=larger))) == [size]
