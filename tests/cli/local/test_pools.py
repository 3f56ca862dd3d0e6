"""Pools of a run: when they start, and what several of them show together."""

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest

from shoal_cli.local import planning, runner
from shoal_cli.local.cgroups import Enforce
from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.manifests import load_manifests
from shoal_cli.local.observer import Observer
from shoal_cli.local.orders import bare_manifests, read_orders
from shoal_cli.local.pool import PoolRun, RunOptions
from shoal_cli.local.preparation import Prepared
from shoal_cli.local.steps import Progress, StepRefused
from shoal_cli.local.supervisor import Supervisor
from shoal_cli.local.watch import DeviceTally
from shoal_cli.local.workspace import Workspace, open_workspace
from shoal_protocol.choices import Mode, Policy, Residency
from shoal_protocol.v1 import coordinator_pb2 as pb

POOL = """\
apiVersion: shoal.dev/v1alpha1
kind: DevicePool
metadata: {{name: {name}}}
spec:
  local: {{devices: [{{name: one, memory: 32Mi}}]}}
  budget: {{memory: 32Mi}}
"""


def pool_run(name: str, folder: Path, workspace: Workspace) -> PoolRun:
    (folder / f"{name}.yaml").write_text(POOL.format(name=name))
    pool = load_manifests([folder / f"{name}.yaml"]).pools[name]
    supervisor = Supervisor(lambda _: None)
    return PoolRun(pool=pool, workspace=workspace, supervisor=supervisor, prefix=f"{name}.")


async def test_devices_of_one_name_in_two_pools_are_told_apart(tmp_path: Path) -> None:
    with open_workspace(tmp_path / "work") as workspace:
        runs = [pool_run(name, tmp_path, workspace) for name in ("shelf", "loft")]
        for number, run in enumerate(runs):
            tally = DeviceTally()
            tally.add(pb.DeviceStatus(name="one", queued=number))
            run.watch.devices["one"] = tally
        shown = runner.snapshot(runs)
        assert {device.name: device.queued for device in shown.devices} == {
            "shelf.one": 0,
            "loft.one": 1,
        }
        assert shown.restarts == {"shelf.one": 0, "loft.one": 0}
        for run in runs:
            await run.close()


async def test_devices_start_while_the_model_is_cut_and_end_where_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = tmp_path / "in"
    inputs.mkdir()
    np.save(inputs / "0.npy", np.zeros(1, np.float32))
    (tmp_path / "model.onnx").touch()
    manifests = bare_manifests(
        tmp_path / "model.onnx",
        inputs=inputs,
        outputs=tmp_path / "out",
        budgets=[32 << 20],
        fragments=None,
        residency=Residency.ADAPTIVE,
        policy=Policy.MABAC,
        mode=Mode.STREAMING,
    )
    started: list[Path] = []

    async def refuse(order: CutOrder, store: Path, on_progress: Progress) -> Prepared:
        async with asyncio.timeout(60):
            while len(started) < 2:  # the coordinator and the agent
                started[:] = processes_of(tmp_path)
                await asyncio.sleep(0.05)
        raise StepRefused("PreparationRefused", "it is no model")

    monkeypatch.setattr(planning, "prepare", refuse)
    with open_workspace(tmp_path / "work") as workspace:
        run = runner._Run(workspace, RunOptions(enforce=Enforce.NONE), Observer())
        with pytest.raises(StepRefused, match="it is no model"):
            await run.run(read_orders(manifests, {}))
        assert not processes_of(tmp_path)
        assert not run._devices, "where a finer cut is refused, the first run's readings stand"


def processes_of(folder: Path) -> list[Path]:
    """Those that name it in their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                found.append(path)
    return found
