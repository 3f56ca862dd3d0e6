"""`shoal run` on inputs of which few are so large that a cut for all is slow for the others."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cli.local.test_report import REPORT
from cli.local.workbench import MIB, Workbench
from made_models import Made, weight
from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.finer_cuts import continued, cut_finer
from shoal_cli.local.orders import bare_manifests, read_orders
from shoal_cli.local.planned_jobs import PlannedJob
from shoal_cli.local.planning import plan_on_pool
from shoal_cli.local.preparation import Prepared, cut_into_store, partition_path
from shoal_cli.local.report import FailedItem, JobReport, Latency
from shoal_cli.local.steps import Json
from shoal_planner.devices import PoolDevice
from shoal_protocol.choices import Mode, Policy, Residency
from shoal_protocol.partition import Outgrown, document_from_json
from shoal_protocol.units import Bytes

SMALL = 600
MADE = Made(
    text="""g (float[1,4,h,w] x) => (float[1,4,h,w] y) {
        a = Conv<pads = [1, 1, 1, 1]>(x, k) b = Conv<pads = [1, 1, 1, 1]>(a, k)
        c = Conv<pads = [1, 1, 1, 1]>(b, k) d = Conv<pads = [1, 1, 1, 1]>(c, k)
        e = Conv<pads = [1, 1, 1, 1]>(d, k)
        f = Add(e, c) g1 = Add(f, b) h1 = Add(g1, a) y = Tanh(h1) }""",
    weights={"k": weight(4, 4, 3, 3)},
    shapes={"x": (1, 4, 512, 512)},
)
"""Of the largest input one fragment takes some 40 MiB, and every node 22 at most."""


def save_inputs(folder: Path, small: int = SMALL) -> Path:
    chance = np.random.default_rng(5)
    folder.mkdir()
    for name, shape in (("a", (small, 1, 4, 32, 32)), ("b", (1, 4, 512, 512))):
        np.savez(folder / f"{name}.npz", x=chance.standard_normal(shape, dtype=np.float32))
    return folder


@pytest.mark.real
@pytest.mark.timeout(170)
def test_small_items_run_in_a_cut_for_them_and_large_ones_afterwards_in_their_own(
    bench: Workbench,
) -> None:
    samples = save_inputs(bench.folder / "mixed")
    places = ("--inputs", samples, "--outputs", bench.folder / "out", "--report", bench.report)
    pool = ("--devices", "2", "--budget", "24Mi", "--verify")
    ran = bench.run("run", MADE.save(bench.folder), *places, *pool)
    assert "b.npz is larger than this cut is for" in " ".join(ran.err.split())
    assert "1 item left; now it is cut for larger ones" in " ".join(ran.err.split())
    report = json.loads(bench.report.read_text())
    (found,) = report["jobs"]
    assert (found["state"], found["succeeded"], found["resumed"]) == ("Complete", SMALL + 1, 0)
    assert found["verification"]["mismatched"] == 0
    assert len(found["cut"]["fragments"]) > 4, "the last cut is that for all"
    tasks = sum(each["tasks"] for each in report["devices"])
    assert tasks < 2 * SMALL, "each small item was computed by one task"
    assert all(each["peak_bytes_above_floor"] <= each["budget_bytes"] for each in report["devices"])


def cut_of(folder: Path, budget: int = 24, small: int = SMALL, **asked: object) -> Json:
    folder.mkdir()
    devices = tuple(PoolDevice(name=name, budget_bytes=Bytes(budget * MIB)) for name in "ab")
    how = {"smaller_first": True, **asked}
    order = CutOrder(
        name="mixed",
        model="mixed",
        path=MADE.save(folder),
        sample=save_inputs(folder / "in", small),
        devices=devices,
        **how,  # type: ignore[arg-type]
    )
    first, again = (
        cut_into_store(order, folder, lambda done, total: None, fragments=False) for _ in range(2)
    )
    assert {**first, "warm": True} == {**again, "warm": True}
    return first


def test_a_cut_leaves_the_largest_inputs_to_another_where_that_saves_time(tmp_path: Path) -> None:
    assert cut_of(tmp_path / "mixed")["rest"]
    assert not cut_of(tmp_path / "few", small=6)["rest"]
    assert not cut_of(tmp_path / "ample", budget=64)["rest"]
    assert not cut_of(tmp_path / "as-asked", fragments=9)["rest"]
    assert not cut_of(tmp_path / "by-size", max_bytes=24 * MIB)["rest"]
    assert not cut_of(tmp_path / "afterwards", smaller_first=False)["rest"]


def job(**values: object) -> JobReport:
    return replace(REPORT.jobs[0], **values)  # type: ignore[arg-type]


def planned(folder: Path, *, rest: bool, outgrown: tuple[Outgrown, ...] = ()) -> PlannedJob:
    manifests = bare_manifests(
        MADE.save(folder),
        inputs=save_inputs(folder / "in"),
        outputs=folder / "out",
        budgets=[24 * MIB] * 2,
        fragments=None,
        residency=Residency.ADAPTIVE,
        policy=Policy.FIFO,
        mode=Mode.STREAMING,
    )
    order = read_orders(manifests, {}).jobs[0]
    cut_into_store(order.plan.cut, folder, lambda done, total: None)
    path = partition_path(folder, order.plan.cut.name)
    cut = replace(order.plan.cut, outgrown=outgrown)
    document = document_from_json(path.read_bytes())
    prepared = Prepared(order=cut, document=document, path=path, advice="", rest=rest)
    return PlannedJob(order=order, prepared=prepared, plan=plan_on_pool(order.plan, prepared))


def test_what_is_left_is_cut_for_all_inputs_without_the_divisions_of_the_first_cut(
    tmp_path: Path,
) -> None:
    divided = (Outgrown(fragment=0, need_bytes=Bytes(30 * MIB)),)
    large = FailedItem(item=SMALL, input="b.npz", reason="b.npz: Budget: it took 25 MiB")
    left = job(state="Failed", reason="ItemsFailed", succeeded=SMALL, failed=1, failures=(large,))
    ran = planned(tmp_path, rest=True, outgrown=divided)
    assert ran.order.plan.cut.smaller_first
    (again,) = cut_finer([(ran, left)])
    assert not again.order.plan.cut.smaller_first
    assert again.order.plan.cut.outgrown == ()
    assert again.why == f"{ran.order.name}: 1 item left; now it is cut for larger ones"

    unfit = FailedItem(item=0, input="a.npz", reason="a.npz[0]: InvalidInput: it has rank 3")
    assert cut_finer([(ran, replace(left, failures=(unfit,)))]) == []
    late = replace(left, reason="DeadlineExceeded")
    assert cut_finer([(ran, late)]) == []
    whole = replace(ran, prepared=replace(ran.prepared, rest=False))
    assert cut_finer([(whole, left)]) == []


def test_a_job_that_ran_in_two_cuts_has_one_report() -> None:
    quick, slow = Latency(p50_seconds=0.1), Latency(p50_seconds=60.0)
    first = job(succeeded=100, resumed=10, retries=2, seconds=9.0, latency=quick)
    then = job(succeeded=110, resumed=100, retries=1, seconds=41.0, latency=slow)
    both = continued(first, then)
    assert (both.succeeded, both.resumed, both.retries, both.seconds) == (110, 10, 3, 50.0)
    assert both.items_per_second == 2.0
    assert both.latency == quick
    assert both.tier_hits == first.tier_hits + then.tier_hits
    assert continued(None, then) == then
    assert continued(replace(first, succeeded=11), then).latency == slow
