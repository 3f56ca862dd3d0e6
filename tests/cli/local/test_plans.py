"""What manifests order is planned side by side: a second model sees what the first takes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from fragment_pools import MIB, partition, placed
from shoal_cli.local import planning
from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.finer_cuts import FinerJob, cover_less
from shoal_cli.local.manifests import manifests_of
from shoal_cli.local.orders import JobOrder, PlanOrder, read_orders
from shoal_cli.local.planned_jobs import with_items
from shoal_cli.local.planning import (
    NoPlan,
    assumption,
    cut_beside,
    find_plan,
    plan_on_pool,
    plans_beside,
    try_finer,
)
from shoal_cli.local.preparation import Prepared
from shoal_planner.explanation import summary
from shoal_planner.outcome import Plan, Rejected
from shoal_planner.placement import MAX_REJECTED
from shoal_planner.sharing import taken_by
from shoal_protocol.choices import Objective
from shoal_protocol.partition import Outgrown, TensorSpec

POOL = """\
apiVersion: shoal.dev/v1alpha1
kind: DevicePool
metadata: {name: shelf}
spec:
  local:
    devices:
    - {name: one, memory: 24Mi}
    - {name: two, memory: 24Mi}
  budget: {memory: 24Mi}
"""
MODEL = """\
---
apiVersion: shoal.dev/v1alpha1
kind: Model
metadata: {name: %(name)s}
spec:
  source: {uri: %(name)s.onnx}
---
apiVersion: shoal.dev/v1alpha1
kind: Partition
metadata: {name: %(name)s}
spec: {modelRef: {name: %(name)s}}
---
apiVersion: shoal.dev/v1alpha1
kind: InferenceJob
metadata: {name: %(name)s}
spec:
  partitionRef: {name: %(name)s}
  poolRef: {name: shelf}
  inputs: {uri: in}
  outputs: {uri: out-%(name)s}
"""
MAKESPAN = "  objective: Makespan\n"


def orders(folder: Path) -> list[PlanOrder]:
    """Jobs of two models on one pool."""
    text = POOL + "".join(MODEL % {"name": name} for name in ("faces", "plates"))
    manifests = manifests_of(str(folder / "job.yaml"), list(yaml.safe_load_all(text)))
    return [order.plan for order in read_orders(manifests, {}).jobs]


def prepared(folder: Path, size_mib: int) -> Prepared:
    document = partition([10**8], [size_mib * MIB])
    order = CutOrder(name="faces", model="faces", path=folder)
    return Prepared(order=order, document=document, path=folder, advice="")


def planned(folder: Path, *sizes_mib: int) -> list[Plan]:
    known: list[tuple[PlanOrder, Plan]] = []
    for order, size in zip(orders(folder), sizes_mib, strict=True):
        others = plans_beside(order, known)
        known.append((order, placed(find_plan(order, prepared(folder, size), others))))
    return [plan for _, plan in known]


def makespan(folder: Path, more: str = "") -> tuple[PlanOrder, Prepared]:
    """A job with this objective, whose model takes the items of one file, 7."""
    text = POOL + MODEL % {"name": "faces"} + MAKESPAN
    text = text.replace("{uri: in}", f"{{uri: {folder}/in{more}}}")
    (folder / "in").mkdir()
    np.save(folder / "in" / "a.npy", np.zeros((7, 1, 4), np.float32))
    manifests = manifests_of(str(folder / "job.yaml"), list(yaml.safe_load_all(text)))
    (order,) = read_orders(manifests, {}).jobs
    found = prepared(folder, 14)
    x = TensorSpec(name="x", dtype="float32", shape=(1, 4))
    return order.plan, replace(found, document=replace(found.document, inputs=(x,)))


def test_a_makespan_is_planned_for_the_items_of_the_inputs(tmp_path: Path) -> None:
    order, prepared = makespan(tmp_path)
    found = plan_on_pool(order, prepared)
    assert found.items == 7
    assert assumption("faces", found) == ""
    said = replace(order, cut=replace(order.cut, items=12))
    assert plan_on_pool(said, prepared).items == 12


def test_of_a_folder_that_is_followed_the_assumption_is_said(tmp_path: Path) -> None:
    found = plan_on_pool(*makespan(tmp_path, ", follow: true"))
    assert found.items is None
    said = "job faces: how many items come is not known; planned for 100"
    assert assumption("faces", found) == said


def test_inputs_are_counted_where_the_objective_asks_only(tmp_path: Path) -> None:
    order, prepared = makespan(tmp_path)
    other = replace(order, cut=replace(order.cut, objective=Objective.LATENCY))
    assert with_items(other, prepared).cut.items is None
    (tmp_path / "in").rename(tmp_path / "elsewhere")  # of which the job says more
    assert with_items(order, prepared).cut.items is None


def test_two_models_that_fit_beside_each_other_hold_no_more_than_there_is(tmp_path: Path) -> None:
    taken = taken_by(planned(tmp_path, 14, 8))
    assert all(each.held_bytes <= 24 * MIB for each in taken.values())


@pytest.mark.parametrize(("cuts", "own"), [(0, 8), (2, 6), (8, 4), (20, 4)])
def test_a_plan_lists_no_more_alternatives_than_a_report_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: int, own: int
) -> None:
    (first, _) = orders(tmp_path)
    found = placed(find_plan(first, prepared(tmp_path, 14)))
    many = tuple(Rejected(alternative=f"plan {n}", reason="slower") for n in range(8))
    monkeypatch.setattr(planning, "plan", lambda *_, **__: replace(found, rejected=many))
    others = tuple(Rejected(alternative=f"cut {n}", reason="slower") for n in range(cuts))
    weighed = replace(prepared(tmp_path, 14), rejected=others)
    listed = placed(find_plan(first, weighed)).rejected
    assert listed == (*many[:own], *others)[:MAX_REJECTED]


def test_the_second_model_is_cut_for_what_the_first_leaves(tmp_path: Path) -> None:
    first, second = orders(tmp_path)
    assert cut_beside(first, []).beside == ()
    found = placed(find_plan(first, prepared(tmp_path, 14), []))
    left = cut_beside(second, [found]).beside
    assert [each.budget_bytes for each in left] == [10 * MIB] * 2
    assert all(
        now.flops_per_second < then.flops_per_second
        for now, then in zip(left, second.cut.devices, strict=True)
    )


def test_a_model_that_does_not_fit_beside_the_first_is_planned_as_if_it_were_alone(
    tmp_path: Path,
) -> None:
    first, second = planned(tmp_path, 20, 20)
    assert first.homes() == second.homes() == (("one", "two"),)
    assert not first.beside
    assert "beside other models there is no room on one, two" in summary(second)
    assert "loaded in turn" in summary(second)


def outgrown(folder: Path) -> JobOrder:
    """A job of which a fragment took more than each device has."""
    (folder / "in").mkdir()
    text = POOL + MODEL % {"name": "faces"} + MAKESPAN
    text = text.replace("{uri: in}", f"{{uri: {folder}/in}}")
    manifests = manifests_of(str(folder / "job.yaml"), list(yaml.safe_load_all(text)))
    (order,) = read_orders(manifests, {}).jobs
    cut = replace(order.plan.cut, outgrown=(Outgrown(fragment=0, need_bytes=9),))
    return replace(order, plan=replace(order.plan, cut=cut))


@pytest.mark.parametrize("needed", [0, 1, 3, 100])
async def test_where_no_finer_cut_fits_ever_more_of_the_largest_items_are_left_out(
    tmp_path: Path, needed: int
) -> None:
    tried: list[CutOrder] = []
    notes: list[str] = []

    async def run(orders: Sequence[JobOrder]) -> Sequence[JobOrder]:
        tried.extend(order.plan.cut for order in orders)
        if tried[-1].left_out < needed:
            raise NoPlan(f"{tried[-1].left_out} are too few")
        return orders

    order = outgrown(tmp_path)
    finer = FinerJob(order=order, fallbacks=tuple(cover_less(order)))
    ran = await try_finer([finer], run, notes.append)
    assert [cut.left_out for cut in tried] == {
        0: [0],
        1: [0, 1],
        3: [0, 1, 2, 4],
        100: [0, 1, 2, 4, 8, 16],
    }[needed]
    assert [bool(cut.outgrown) for cut in tried] == [True, *[False] * (len(tried) - 1)]
    assert [order.plan.cut for order in ran] == ([] if needed == 100 else tried[-1:])
    assert notes == (["it cannot be cut finer: 0 are too few"] if needed else [])


def test_a_preference_for_a_device_that_is_not_there_is_told(tmp_path: Path) -> None:
    pins = "[{fragment: 0, device: onne, policy: Preferred}, {fragment: 1, device: two}]"
    preferring = (
        "---\napiVersion: shoal.dev/v1alpha1\nkind: Placement\nmetadata: {name: faces}\n"
        f"spec: {{partitionRef: {{name: faces}}, poolRef: {{name: shelf}}, pins: {pins}}}\n"
    )
    text = POOL + MODEL % {"name": "faces"} + preferring
    manifests = manifests_of(str(tmp_path / "job.yaml"), list(yaml.safe_load_all(text)))
    assert read_orders(manifests, {}).notes == (
        "Placement faces: fragment 0 prefers onne, which DevicePool shelf does not have "
        "(did you mean one?)",
    )
