"""What several pools of one run show together."""

from pathlib import Path

from shoal_cli.local.manifests import load_manifests
from shoal_cli.local.pool import PoolRun
from shoal_cli.local.runner import snapshot
from shoal_cli.local.supervisor import Supervisor
from shoal_cli.local.watch import DeviceTally
from shoal_cli.local.workspace import Workspace, open_workspace
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
        shown = snapshot(runs)
        assert {device.name: device.queued for device in shown.devices} == {
            "shelf.one": 0,
            "loft.one": 1,
        }
        assert shown.restarts == {"shelf.one": 0, "loft.one": 0}
        for run in runs:
            await run.close()
