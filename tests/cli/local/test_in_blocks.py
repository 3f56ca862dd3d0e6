"""`shoal run` on devices that cannot hold what they run: real agents, inside their budgets."""

from pathlib import Path

import numpy as np
import pytest

from cli.local.test_preparation import MIB
from cli.local.workbench import Ran, Workbench
from made_models import deep

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]


def make_deep(bench: Workbench) -> Path:
    """A folder with 24 MiB of layers, and eight items for them."""
    folder = bench.folder / "deep"
    (folder / "in").mkdir(parents=True)
    deep().save(folder)
    for item in range(8):
        np.savez(folder / "in" / f"{item}.npz", x=deep().inputs(seed=item)["x"])
    return folder


def run_deep(bench: Workbench, devices: int, budget_mib: int) -> Ran:
    """Eight items through 24 MiB of layers, compared with the whole model."""
    folder = make_deep(bench)
    places = ("--inputs", folder / "in", "--outputs", folder / "out", "--report", bench.report)
    pool = ("--devices", str(devices), "--budget", f"{budget_mib}Mi")
    return bench.run("run", folder / "model.onnx", *places, *pool, "--verify")


POOL = """\
apiVersion: shoal.dev/v1alpha1
kind: Model
metadata: {name: deep}
spec: {source: {uri: deep/model.onnx}}
---
apiVersion: shoal.dev/v1alpha1
kind: DevicePool
metadata: {name: shelf}
spec:
  local: {devices: [{name: one, memory: 12Mi}, {name: two, memory: 12Mi}]}
  budget: {memory: 12Mi}
  cache: {size: 16Mi}
---
apiVersion: shoal.dev/v1alpha1
kind: InferenceJob
metadata: {name: deep}
spec:
  modelRef: {name: deep}
  poolRef: {name: shelf}
  inputs: {uri: pvc://deep/in}
  outputs: {uri: pvc://deep/out}
"""


def test_a_model_is_cut_finer_where_a_disk_has_no_room_for_a_fragment_that_memory_has(
    bench: Workbench,
) -> None:
    folder = make_deep(bench)
    (bench.folder / "pool.yaml").write_text(POOL)
    volume = ("--volume", f"deep={folder}")
    ran = bench.run(
        "run", bench.folder / "pool.yaml", *volume, "--report", bench.report, "--verify"
    )
    assert ran.status == 0, ran.err
    jobs = ran.report["jobs"]
    assert isinstance(jobs, list)
    (job,) = jobs
    assert job["succeeded"] == 8
    assert len(job["stages"]) > 2, (
        "a half of the model has room in memory, in blocks, and none here"
    )


@pytest.mark.parametrize(
    ("devices", "budget_mib"), [pytest.param(1, 16, marks=pytest.mark.minutes), (2, 12)]
)
def test_a_model_larger_than_the_devices_runs_in_blocks_without_a_load_more(
    bench: Workbench, devices: int, budget_mib: int
) -> None:
    ran = run_deep(bench, devices, budget_mib)
    assert ran.status == 0, ran.err
    reports = ran.report["devices"]
    assert isinstance(reports, list)
    for device in reports:
        (fragment,) = device["fragments"]
        assert fragment["granted_bytes"] <= budget_mib * MIB
        assert device["peak_bytes_above_floor"] <= budget_mib * MIB
        assert device["loads"] == 1
    assert "in blocks" in ran.out
