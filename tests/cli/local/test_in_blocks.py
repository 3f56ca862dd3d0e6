"""`shoal run` on devices that cannot hold what they run: real agents, inside their budgets."""

import numpy as np
import pytest

from cli.local.test_preparation import MIB
from cli.local.workbench import Ran, Workbench
from made_models import deep

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]


def run_deep(bench: Workbench, devices: int, budget_mib: int) -> Ran:
    """Eight items through 24 MiB of layers, compared with the whole model."""
    folder = bench.folder / "deep"
    (folder / "in").mkdir(parents=True)
    deep().save(folder)
    for item in range(8):
        np.savez(folder / "in" / f"{item}.npz", x=deep().inputs(seed=item)["x"])
    places = ("--inputs", folder / "in", "--outputs", folder / "out", "--report", bench.report)
    pool = ("--devices", str(devices), "--budget", f"{budget_mib}Mi")
    return bench.run("run", folder / "model.onnx", *places, *pool, "--verify")


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
