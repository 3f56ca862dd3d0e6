"""Plans as a status says them, when fragments run in blocks."""

from dataclasses import replace

import pytest

from reconcile.rules import decide
from reconcile.test_inference_job import PLANNED, works
from reconcile.values import MIB, document
from shoal_api.kinds.placement import Grant
from shoal_operator.reconcile.decision import SubmitJob
from shoal_operator.reconcile.plans import Site, best_plan, status_of, with_fewest_moves
from shoal_operator.reconcile.snapshot import WorkerPhase
from shoal_planner.devices import PoolDevice
from shoal_planner.goal import Goal
from shoal_planner.outcome import Plan
from shoal_protocol.choices import Objective
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import Bytes


def swappable() -> PartitionDocument:
    """A fragment of 20 MiB that runs in 6."""
    made = document(fragments=1)
    return replace(
        made, fragments=tuple(replace(each, least_bytes=6 * MIB) for each in made.fragments)
    )


def site(**budgets_mib: int) -> Site:
    devices = tuple(
        PoolDevice(name=name, budget_bytes=Bytes(size * MIB)) for name, size in budgets_mib.items()
    )
    return Site(document=swappable(), devices=devices)


def best(of: Site) -> Plan:
    found = best_plan(of, Goal(Objective.THROUGHPUT), ())
    assert isinstance(found, Plan)
    return found


def test_a_status_names_the_fragments_that_run_in_blocks_with_their_grants() -> None:
    of = site(large=21, small=10)
    (stage,) = status_of(best(of), of).stages
    assert (stage.devices, stage.resident_bytes) == (("large", "small"), 20 * MIB)
    small = Grant(fragment=0, device="small", granted_bytes=10 * MIB * 15 // 16)  # rest: free
    assert stage.in_blocks == (small,)


def test_a_status_says_of_each_fragment_what_it_needs_at_least_and_gets() -> None:
    of = site(large=21, small=10)
    (memory,) = status_of(best(of), of).fragments
    assert (memory.fragment, memory.resident_bytes, memory.least_bytes) == (0, 20 * MIB, 6 * MIB)
    assert memory.granted_bytes == 10 * MIB * 15 // 16, "what the smaller device grants"
    whole = site(large=21)
    (memory,) = status_of(best(whole), whole).fragments
    assert memory.granted_bytes == memory.resident_bytes


def test_a_status_says_how_long_an_item_takes_on_each_device() -> None:
    of = site(large=21, small=10)
    (stage,) = status_of(best(of), of).stages
    large, small = stage.device_seconds
    assert stage.compute_seconds is not None
    assert stage.read_seconds is not None
    assert 0 < large < small
    assert small == pytest.approx(stage.compute_seconds + stage.read_seconds), "it reads again"


def test_a_status_says_how_long_a_fragment_takes_as_a_whole_and_within_the_least() -> None:
    of = site(large=21, small=10)
    status = status_of(best(of), of)
    (stage,), (memory,) = status.stages, status.fragments
    large, small = stage.device_seconds
    assert memory.resident_seconds == pytest.approx(large)
    assert memory.least_seconds is not None
    share = (20 - 10 * 15 / 16) / (20 - 6)  # of what is read again within the least
    assert small - large == pytest.approx(share * (memory.least_seconds - large), rel=1e-4)
    unknown = tuple(replace(each, flops=None) for each in of.document.fragments)
    of = replace(of, document=replace(of.document, fragments=unknown))
    (memory,) = status_of(best(of), of).fragments
    assert (memory.resident_seconds, memory.least_seconds) == (None, None)


def test_a_device_that_keeps_its_fragments_keeps_its_grants() -> None:
    of = site(a=10, b=10, c=21)
    first = best(of)
    before = status_of(first, of).stages
    moved = tuple(replace(each, devices=tuple(reversed(each.devices))) for each in before)
    plan = with_fewest_moves(of, first, moved, frozenset())
    (stage,) = plan.stages
    assert stage.devices == moved[0].devices
    assert [share.device for share in stage.shares] == list(stage.devices)
    blocks = status_of(plan, of).stages[0].in_blocks
    assert {each.device for each in blocks} == {"a", "b"}


def test_a_job_is_submitted_with_what_the_plan_grants_its_fragments() -> None:
    placement = PLANNED.placement
    assert placement is not None
    assert placement.status is not None
    first, *others = placement.status.stages
    small = Grant(fragment=first.fragments[0], device=first.devices[0], granted_bytes=8 << 20)
    stages = (replace(first, in_blocks=(small,)), *others)
    placement = replace(placement, status=replace(placement.status, stages=stages))
    done = decide(works(replace(PLANNED, placement=placement), "in", WorkerPhase.SUCCEEDED))
    (call,) = done.calls
    assert isinstance(call, SubmitJob)
    assert [sum(granted) for granted in call.granted_bytes] == [8 << 20, 0, 0]
    assert list(map(len, call.granted_bytes)) == list(map(len, call.stages))
