"""A budget that a plan names is enough: the model is cut for it, and placed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cli.local.workbench import MIB, cut_within
from made_models import Made, weight
from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.preparation import cut_into_store, partition_path
from shoal_planner.budgets import with_other_budgets
from shoal_planner.devices import PoolDevice
from shoal_planner.goal import Goal
from shoal_planner.outcome import Infeasible, Plan
from shoal_planner.placement import plan
from shoal_protocol.choices import Objective
from shoal_protocol.partition import document_from_json
from shoal_protocol.units import Bytes

TABLE = Made(
    text="""g (int64[128] x) => (float[1,8192] y) {
        rows = Gather(T, x) z = ReduceMean<axes = [0]>(rows) y = MatMul(z, W) }""",
    weights={"T": np.broadcast_to(np.float32(1), (1 << 17, 64)), "W": weight(64, 8192)},
    feeds={"x": np.arange(128)},
)
"""A table that runs in blocks in far less than its rows take when they may stay."""
LATE = Made(
    text="""g (float[1,512] x) => (float[1,1024] y) {
        n = Neg(W) m = Concat<axis = 1>(W, n) a = MatMul(x, m)
        o = Neg(V) p = Concat<axis = 1>(V, o) y = MatMul(a, p) }""",
    weights={"W": weight(512, 1024), "V": weight(2048, 512)},
    shapes={"x": (1, 512)},
)
"""A weight that is worked out at run time, so that a cut behind it gains nothing."""
WIDE_ITEM = Made(
    text="""g (float[1,4,1024,1024] x) => (float[1,4,1024,1024] y) {
        a = Conv<pads = [1, 1, 1, 1]>(x, b) y = Relu(a) }""",
    weights={"b": weight(4, 4, 3, 3)},
    shapes={"x": (1, 4, 1024, 1024)},
)
OPEN = Made(
    text="""g (float[rows,1024] x) => (float[rows,1024] y) {
        a = MatMul(x, V) b = Relu(a) c = Add(b, x)
        d = MatMul(c, W) e = Relu(d) y = Add(e, c) }""",
    weights={"V": weight(1024, 1024), "W": weight(1024, 1024, seed=1)},
)
"""Small parts of its layers need more in one fragment than larger ones: each is a node more."""


@pytest.mark.parametrize("made", [TABLE, LATE, WIDE_ITEM], ids=["table", "late", "wide item"])
@pytest.mark.parametrize("devices", [1, 3])
def test_the_smallest_budget_of_a_plan_is_enough_to_cut_the_model_for(
    made: Made, devices: int, tmp_path: Path
) -> None:
    path = made.save(tmp_path)
    whole = cut_within(path, tmp_path, *[512] * devices)
    ample = [
        PoolDevice(name=f"d{number}", budget_bytes=Bytes(512 * MIB)) for number in range(devices)
    ]
    named = with_other_budgets(whole, ample, Goal(Objective.THROUGHPUT))
    smallest = tuple(replace(each, budget_bytes=Bytes(named.smallest_bytes)) for each in ample)
    order = CutOrder(name="deep", model="deep", path=path, devices=smallest)
    cut_into_store(order, tmp_path, lambda done, total: None)
    document = document_from_json(partition_path(tmp_path, "deep").read_bytes())
    assert isinstance(plan(document, smallest, Objective.THROUGHPUT), Plan)


def on_device(path: Path, budget_bytes: int, fragments: int) -> Plan | Infeasible:
    """The plan of so many fragments, for the items of `in` beside the model."""
    devices = (PoolDevice(name="d", budget_bytes=Bytes(budget_bytes)),)
    order = CutOrder(
        name="deep",
        model="deep",
        path=path,
        devices=devices,
        fragments=fragments,
        sample=path.parent / "in",
    )
    cut_into_store(order, path.parent, lambda done, total: None)
    document = document_from_json(partition_path(path.parent, "deep").read_bytes())
    assert len(document.fragments) == fragments
    return plan(document, devices, Objective.THROUGHPUT)


def with_items(made: Made, folder: Path) -> Path:
    (folder / "in").mkdir()
    np.save(folder / "in" / "a.npy", np.zeros((16, 1024), np.float32))
    return made.save(folder)


def test_what_a_refused_fragment_needs_is_the_least_of_its_forms(tmp_path: Path) -> None:
    path = with_items(OPEN, tmp_path)
    refused = on_device(path, 2 * MIB, 1)
    assert isinstance(refused, Infeasible)
    assert refused.need_bytes is not None
    assert isinstance(on_device(path, refused.need_bytes, 1), Plan), "it is enough"
    less = refused.need_bytes - MIB // 16
    assert isinstance(on_device(path, less, 1), Infeasible), "and not more than would do"


@pytest.mark.parametrize("rows", ["rows", "16"], ids=["open", "fixed"])
def test_a_number_of_fragments_is_held_in_small_parts_of_layers_whatever_inputs_leave_open(
    tmp_path: Path, rows: str
) -> None:
    path = with_items(replace(OPEN, text=OPEN.text.replace("rows", rows)), tmp_path)
    assert isinstance(on_device(path, 8 * MIB, 2), Plan)
