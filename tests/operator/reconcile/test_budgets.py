"""A device over its budget is reported by its Device, its Placements and its jobs."""

from dataclasses import replace

from reconcile.rules import decide
from reconcile.test_device_pool import snapshot as pool_snapshot
from reconcile.test_device_pool import view
from reconcile.test_inference_job import PLANNED, knows, run, silent, written
from reconcile.test_placement import UNREACHABLE, device, placement
from reconcile.test_placement import see as see_placement
from reconcile.values import MIB, NOW, condition, word
from shoal_api.kinds import Device
from shoal_api.schema import parse
from shoal_operator.reconcile.decision import Decision, DeviceChild
from shoal_operator.reconcile.snapshot import (
    RECOVERY_SECONDS,
    ConnectedDevice,
    CoordinatorView,
    Excess,
    InferenceJobSnapshot,
    RunState,
    Unreachable,
)
from shoal_protocol.units import Bytes

TEXT = "peaked at 126 MiB, budget 100 MiB (126 %)"


def over(name: str, seconds: float = 1.0, peak: int = 126 * MIB) -> ConnectedDevice:
    excess = Excess(peak_bytes=Bytes(peak), budget_bytes=Bytes(100 * MIB), seconds=seconds)
    return replace(device(name, budget=100 * MIB), excess=excess)


# ---- Device --------------------------------------------------------------------------------------


def shown(
    known: tuple[Device, ...], seen: CoordinatorView | Unreachable
) -> tuple[DeviceChild, tuple[Device, ...]]:
    """The one Device that a pool shows, and how it is known then."""
    (child,) = decide(pool_snapshot(devices=known, view=seen)).devices
    parsed = parse(Device, {**child.device})
    assert isinstance(parsed, Device)
    return child, (replace(parsed, status=child.status),)


def test_a_device_over_its_budget_says_so_with_one_event_until_ten_minutes_have_passed() -> None:
    first, known = shown((), view(device("n1")))
    assert word(first.status, "WithinBudget") == "True WithinBudget"
    assert first.notes == ()
    begun, known = shown(known, view(over("n1")))
    assert word(begun.status, "WithinBudget") == "False OverBudget"
    assert condition(begun.status, "WithinBudget").message == TEXT
    assert word(begun.status, "Ready") == "True Connected"
    assert [(each.reason, each.message, each.warning) for each in begun.notes] == [
        ("OverBudget", TEXT, True)
    ]
    lasting, known = shown(known, view(over("n1", RECOVERY_SECONDS - 1, 130 * MIB)))
    assert condition(lasting.status, "WithinBudget").message.startswith("peaked at 130 MiB")
    assert lasting.notes == (), "it was reported when it began"
    past, known = shown(known, view(over("n1", RECOVERY_SECONDS, 130 * MIB)))
    assert word(past.status, "WithinBudget") == "True WithinBudget"
    again, _ = shown(known, view(over("n1")))
    assert len(again.notes) == 1


def test_an_agent_that_has_started_again_is_within_its_budget() -> None:
    _, known = shown((), view(over("n1")))
    child, _ = shown(known, view(device("n1")))
    assert word(child.status, "WithinBudget") == "True WithinBudget"


def test_what_is_known_of_a_budget_stays_while_nobody_reports() -> None:
    _, known = shown((), view(over("n1")))
    for nothing in (UNREACHABLE, view()):
        child, _ = shown(known, nothing)
        assert word(child.status, "WithinBudget") == "False OverBudget"
        assert child.notes == ()


def test_a_share_is_rounded_up_so_that_no_excess_reads_as_100_percent() -> None:
    child, _ = shown((), view(over("n1", peak=100 * MIB + 1)))
    assert condition(child.status, "WithinBudget").message.endswith("(101 %)")


# ---- Placement -----------------------------------------------------------------------------------


def fleet(*devices: ConnectedDevice) -> CoordinatorView:
    return CoordinatorView(begun=0.0, devices=devices, runs={}, fragments=frozenset())


def test_a_placement_says_which_of_its_devices_is_over_its_budget() -> None:
    of, _, status = see_placement(placement(), fleet(over("a"), device("b"), device("c")))
    assert word(status, "WithinBudget") == "False OverBudget"
    assert condition(status, "WithinBudget").message == f"a {TEXT}"
    assert word(status, "Ready") == "True Ready"
    of, _, status = see_placement(of, UNREACHABLE)
    assert word(status, "WithinBudget") == "False OverBudget"
    _, _, status = see_placement(of, fleet(over("a", 700.0), device("b"), device("c")))
    assert word(status, "WithinBudget") == "True WithinBudget"


def test_a_device_that_serves_no_stage_is_not_the_placements() -> None:
    names = [device(name, budget=60 * MIB) for name in "ab"]
    idle = replace(over("z"), budget_bytes=Bytes(MIB))
    _, _, status = see_placement(placement(), fleet(*names, idle))
    assert all("z" not in stage.devices for stage in status.stages)
    assert word(status, "WithinBudget") == "True WithinBudget"


# ---- InferenceJob --------------------------------------------------------------------------------

RUNNING = knows(PLANNED, run(RunState.RUNNING, succeeded=8))


def with_device(snapshot: InferenceJobSnapshot, one: ConnectedDevice) -> InferenceJobSnapshot:
    assert isinstance(snapshot.view, CoordinatorView)
    others = tuple(each for each in snapshot.view.devices if each.name != one.name)
    return replace(snapshot, view=replace(snapshot.view, devices=(one, *others)))


def planned_device() -> str:
    placement = PLANNED.placement
    assert placement is not None
    assert placement.status is not None
    return placement.status.stages[0].devices[0]


def budget_of(decision: Decision) -> str:
    return word(decision.status, "WithinBudget")


def test_a_job_remembers_that_a_device_was_over_its_budget_while_it_ran() -> None:
    name = planned_device()
    started = written(RUNNING, decide(RUNNING))
    assert budget_of(decide(started)) == "True WithinBudget"
    later = replace(started, now="2026-03-01T13:00:00Z")
    assert budget_of(decide(with_device(later, over(name, 1e6)))) == "True WithinBudget"
    during = with_device(later, over(name, 1200.0))
    decision = decide(during)
    assert budget_of(decision) == "False OverBudget"
    assert condition(decision.status, "WithinBudget").message == f"{name} {TEXT}"
    told = written(during, decision)
    assert budget_of(decide(with_device(told, device(name)))) == "False OverBudget"
    assert budget_of(decide(silent(told))) == "False OverBudget"


def test_a_device_that_ran_what_was_moved_to_it_counts_though_no_plan_has_it() -> None:
    stranger = with_device(written(RUNNING, decide(RUNNING)), over("stranger"))
    assert budget_of(decide(stranger)) == "True WithinBudget"
    ran = replace(run(RunState.RUNNING, succeeded=8), devices=("stranger",))
    decision = decide(knows(stranger, ran))
    assert budget_of(decision) == "False OverBudget"
    assert condition(decision.status, "WithinBudget").message == f"stranger {TEXT}"


def test_a_job_that_has_not_started_is_within_every_budget() -> None:
    decision = decide(with_device(PLANNED, over(planned_device())))
    assert budget_of(decision) == "True WithinBudget"
    assert PLANNED.now == NOW
