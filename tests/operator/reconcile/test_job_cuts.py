"""What a job has its model cut for, when the devices of the pool have unequal budgets."""

from dataclasses import replace

from reconcile.rules import decide, name_of
from reconcile.test_inference_job import PLANNED, knows, run, silent
from reconcile.test_placement import device
from reconcile.values import MIB, NOW, condition, word
from shoal_api.fields import Condition, ConditionStatus
from shoal_api.kinds.device_pool import Budget, DevicePoolStatus
from shoal_api.kinds.partition import PartitionStatus
from shoal_api.kinds.placement import PlacementStatus
from shoal_operator.reconcile.decision import Decision, SubmitJob
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    DeviceState,
    InferenceJobSnapshot,
    RunState,
)
from shoal_protocol.units import Bytes

NO_PLACE = "fragment 0 of ocr needs 22 MiB resident; d17 has 17 MiB; cut finer or raise the budget"
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


def test_a_job_that_ends_without_a_cut_does_not_say_that_one_is_being_made() -> None:
    snapshot = refused(24, 64, 128, cut_for=128)
    cutting = Condition(
        type="Planned",
        status=ConditionStatus.FALSE,
        reason="PartitionNotReady",
        message="Partition ocr is not ready: ppocr is being cut (worker ocr-cut-1)",
        last_transition_time=NOW,
    )
    status = replace(snapshot.before, conditions=(cutting,))
    decision = decide(replace(snapshot, job=replace(snapshot.job, status=status)))
    assert word(decision.status, "Planned") == "False PartitionRefused"
    assert condition(decision.status, "Planned").message == REFUSAL


def test_nobody_gives_up_while_it_is_not_known_which_devices_there_are() -> None:
    decision = decide(silent(refused(24, 64, cut_for=24)))
    assert sizes(decision) == [24 * MIB]
    assert word(decision.status, "Failed") == "False NotFailed"


def raised(agents_ready: Condition, generation: int = 2) -> InferenceJobSnapshot:
    """A job that was refused in 2 MiB, when its pool has been given 24 MiB just now."""
    snapshot = refused(2, cut_for=2)
    pool = snapshot.pool
    assert pool is not None
    return replace(
        snapshot,
        pool=replace(
            pool,
            metadata=replace(pool.metadata, generation=generation),
            spec=replace(pool.spec, budget=Budget(memory=Bytes(24 * MIB))),
            status=DevicePoolStatus(conditions=(agents_ready,)),
        ),
    )


def test_nobody_gives_up_while_agents_adopt_a_budget_that_was_raised() -> None:
    """A failed job is often retried within the seconds that they take."""
    connected = Condition(
        type="AgentsReady",
        status=ConditionStatus.TRUE,
        reason="AllConnected",
        message="",
        observed_generation=1,
        last_transition_time="2026-03-01T11:00:00Z",
    )
    assert word(decide(raised(connected)).status, "Failed") == "False NotFailed"
    updating = replace(
        connected,
        status=ConditionStatus.FALSE,
        reason="Updating",
        observed_generation=2,
        last_transition_time=NOW,
    )
    assert word(decide(raised(updating)).status, "Failed") == "False NotFailed"
    for_ever = replace(updating, last_transition_time="2026-03-01T11:00:00Z")
    assert word(decide(raised(for_ever)).status, "Failed") == "True PartitionRefused"


def test_a_larger_device_changes_nothing_about_a_cut_that_was_made() -> None:
    assert PLANNED.partition is not None
    size = PLANNED.partition.spec.max_fragment_size
    assert isinstance(PLANNED.view, CoordinatorView)
    larger = replace(PLANNED.view, devices=(*PLANNED.view.devices, device("z", budget=900 * MIB)))
    assert sizes(decide(replace(PLANNED, view=larger))) == [size]


def without_a_place(
    *budgets_mib: int,
    cut_for: int,
    state: DeviceState = DeviceState.READY,
    before: str = "2026-03-01T11:59:00Z",
) -> InferenceJobSnapshot:
    """A job whose fragments fit nowhere any more since a moment `before`."""
    partition, placement, view = PLANNED.partition, PLANNED.placement, PLANNED.view
    assert partition is not None
    assert placement is not None
    assert PLANNED.pool is not None
    assert isinstance(view, CoordinatorView)
    planned = Condition(
        type="Planned",
        status=ConditionStatus.FALSE,
        reason="Infeasible",
        message=NO_PLACE,
        last_transition_time=before,
    )
    size = Bytes(cut_for * MIB)
    budget = Budget(memory=Bytes(min(budgets_mib) * MIB))
    devices = (device(f"d{mib}", state, budget=mib * MIB) for mib in budgets_mib)
    return replace(
        PLANNED,
        partition=replace(partition, spec=replace(partition.spec, max_fragment_size=size)),
        placement=replace(placement, status=PlacementStatus(conditions=(planned,))),
        pool=replace(PLANNED.pool, spec=replace(PLANNED.pool.spec, budget=budget)),
        view=replace(view, devices=tuple(devices)),
    )


def test_a_model_is_cut_anew_when_budgets_became_smaller_and_its_fragments_fit_nowhere() -> None:
    assert sizes(decide(without_a_place(17, cut_for=24))) == [17 * MIB]


def test_the_cut_stays_while_a_device_has_what_it_was_made_for() -> None:
    assert sizes(decide(without_a_place(17, 24, cut_for=24))) == [24 * MIB]


def test_the_cut_stays_while_a_device_is_away_that_may_have_room() -> None:
    away = without_a_place(17, cut_for=24, state=DeviceState.SILENT)
    assert sizes(decide(away)) == [24 * MIB]


def test_the_cut_stays_where_fragments_have_a_place_in_smaller_budgets() -> None:
    smaller = replace(without_a_place(17, cut_for=24), placement=PLANNED.placement)
    assert sizes(decide(smaller)) == [24 * MIB]


def test_a_run_goes_on_until_the_fragments_of_its_newest_plan_are_delivered() -> None:
    """Its Partition was edited, so they are others."""
    snapshot = knows(PLANNED, run(RunState.RUNNING, succeeded=8, plan=0))
    assert isinstance(snapshot.view, CoordinatorView)
    assert [type(call) for call in decide(snapshot).calls] == [SubmitJob]
    decision = decide(replace(snapshot, view=replace(snapshot.view, fragments=frozenset())))
    assert decision.calls == ()
    assert [child["kind"] for child in decision.children] == ["Job"]
    assert "-deliver-" in name_of(decision.children[0])
    assert word(decision.status, "Complete") == "False Running"
