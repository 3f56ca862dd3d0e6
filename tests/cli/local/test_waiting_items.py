"""`shoal run` on devices that have no room for other items beside what they run: these wait."""

import json
from pathlib import Path

import numpy as np
import pytest

from cli.local.workbench import MIB, Workbench
from made_models import Made, weight
from shoal_cli.local.covered_inputs import suit_inputs
from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.cut_search import PreparationRefused, find_cut
from shoal_cli.local.preparation import cut_into_store
from shoal_compiler.cutting import Cut
from shoal_compiler.profile import Source
from shoal_planner.cuts import CutRequest, Refusal, choose_cuts
from shoal_planner.devices import PoolDevice
from shoal_planner.outcome import Plan
from shoal_planner.placement import plan_without_alternatives
from shoal_protocol.units import Bytes

ITEMS = 6
MADE = Made(
    text="""g (float[1,4,512,512] x) => (float[1,4,256,256] y) {
        a = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, b) r = Relu(a)
        c = Conv<pads = [1, 1, 1, 1]>(r, b) y = Tanh(c) }""",
    weights={"b": weight(4, 4, 3, 3)},
    shapes={"x": (1, 4, 512, 512)},
)


def table() -> Made:
    """In one fragment it runs in blocks in 18 MiB while items wait; in three that are loaded in
    turn, with room for them."""
    return Made(
        text="""g (int64[64] ids, float[3000,512] x) => (float[64,512] y) {
            m = ReduceMean<axes = [0]>(x) e = Gather(T, ids) g = Add(e, m)
            a = MatMul(g, W0) b = Relu(a) c = MatMul(b, V0)
            d = MatMul(c, W1) f = Relu(d) y = MatMul(f, V1) }""",
        weights={
            "T": weight(8000, 512),
            **{f"W{layer}": weight(512, 2048, seed=layer) for layer in range(2)},
            **{f"V{layer}": weight(2048, 512, seed=layer) for layer in range(2)},
        },
    )


@pytest.mark.real
@pytest.mark.timeout(150)
@pytest.mark.parametrize("devices", [1, 3])
def test_items_larger_than_the_room_that_is_left_wait_and_all_are_run(
    devices: int, bench: Workbench
) -> None:
    model, samples = MADE.save(bench.folder), bench.folder / "wide"
    samples.mkdir()
    for number in range(ITEMS):
        np.savez(samples / f"{number}.npz", x=MADE.inputs(seed=number)["x"])
    too_small = (PoolDevice(name="d", budget_bytes=Bytes(MIB)),)
    order = CutOrder(name="wide", model="wide", path=model, devices=too_small)
    with pytest.raises(PreparationRefused) as refused:
        cut_into_store(order, bench.folder, lambda done, total: None)
    least = refused.value.need_bytes
    assert least is not None
    meanwhile = choose_cuts(Source.open(model).profile(), CutRequest(max_bytes=1))
    assert isinstance(meanwhile, Refusal)
    assert least + 4 * MIB < (meanwhile.need_bytes or 0)

    pool = ("--devices", str(devices), "--budget", str(least), "--report", bench.report)
    planned = bench.run("plan", model, "--inputs", samples, *pool[:4])
    assert "other items wait on disk" in " ".join(planned.out.split())
    places = ("--inputs", samples, "--outputs", bench.folder / "out")
    ran = bench.run("run", model, *places, *pool, "--verify")
    assert f"{ITEMS}/{ITEMS}" in ran.out
    report = json.loads(bench.report.read_text())
    assert not report["deaths"]
    assert all(each["peak_bytes_above_floor"] <= each["budget_bytes"] for each in report["devices"])


def test_what_is_held_at_once_while_items_wait_comes_before_a_finer_cut_in_turn(
    tmp_path: Path,
) -> None:
    model = Source.open(table().save(tmp_path))
    pool = (PoolDevice(name="d", budget_bytes=Bytes(18 * MIB)),)
    order = CutOrder(name="table", model="table", path=tmp_path / "model.onnx", devices=pool)
    finer = choose_cuts(model.profile(), CutRequest(max_bytes=pool[0].budget_bytes))
    assert not isinstance(finer, Refusal)
    cuts = Cut(model, model.profile(), finer), find_cut(order, suit_inputs(order, model))[0]
    in_turn, found = (plan_without_alternatives(each.document, pool, order.goal) for each in cuts)
    assert isinstance(in_turn, Plan)
    assert isinstance(found, Plan)
    assert (in_turn.reloading, in_turn.waiting) == (True, False)
    assert (found.reloading, found.waiting) == (False, True)
