"""Which running coordinator `top`, `describe`, `why` and `logs` are about, and a client of it.

| given                       | the coordinator                                                   |
|-----------------------------|-------------------------------------------------------------------|
| --pool, --namespace, ...    | of a pool of the cluster, through `kubectl port-forward`          |
| --coordinator               | at that address                                                   |
| --work                      | of the local run with that work folder                            |
| nothing, `kubectl shoal`    | as if --pool was given                                            |
| nothing                     | $SHOAL_COORDINATOR, else of the only local run, else the only one |
|                             | that was joined                                                   |
"""

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

if TYPE_CHECKING:
    from shoal_cli.live.cluster import Kubectl
    from shoal_cli.live.view import View
    from shoal_cli.local.workspace import RunningPool
    from shoal_protocol.coordinator_client import CoordinatorClient
    from shoal_protocol.v1 import coordinator_pb2 as pb

PLUGIN: Final = "kubectl-shoal"
_LOCAL: Final = "A run on this machine"
_CLUSTER: Final = "A pool of a cluster"
_NONE: Final = """\
no `shoal run` and no pool of a program is active here, and no coordinator was joined; name one:
--coordinator HOST:PORT   one that `shoal join` has joined, or unix:/path
--pool NAME               a DevicePool of the cluster that kubectl talks to"""

Job = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.")]
OutputKind = Literal["text", "json"]
Output = Annotated[OutputKind, typer.Option("--output", "-o", help="For people, or for programs.")]


class NoCoordinator(Exception):
    """No coordinator was named, and there is none, or more than one."""


class Unknown(Exception):
    """A coordinator has nothing of this name."""

    def __init__(self, name: str, view: "View", *, on_cluster: bool) -> None:
        jobs = ", ".join(job.name for job in view.jobs) or "none"
        devices = ", ".join(device.name for device in view.devices) or "none"
        text = f"there is no {name} here; jobs: {jobs}; devices: {devices}"
        if on_cluster:
            text += (
                "\na coordinator forgets jobs that are complete; `shoal why JOB` reads their status"
            )
        super().__init__(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The options that say which coordinator."""

    coordinator: Annotated[
        str | None,
        typer.Option(
            "--coordinator",
            metavar="HOST:PORT",
            help="A coordinator that `shoal join` has joined, or unix:/path. [dim]Default: "
            "$SHOAL_COORDINATOR, else the run on this machine, else the only one that was joined"
            "[/dim]",
        ),
    ] = None
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_LOCAL,
            help="The run with this work folder. [dim]Default: the only active one[/dim]",
        ),
    ] = None
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_CLUSTER,
            help="A DevicePool. [dim]Default: the only one of the namespace[/dim]",
        ),
    ] = None
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAME",
            rich_help_panel=_CLUSTER,
            help="Its namespace. [dim]Default: kubectl's[/dim]",
        ),
    ] = None
    context: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=_CLUSTER, help="As in kubectl.")
    ] = None
    kubeconfig: Annotated[
        Path | None, typer.Option(metavar="FILE", rich_help_panel=_CLUSTER, help="As in kubectl.")
    ] = None

    @property
    def kubectl(self) -> "Kubectl | None":
        """Where the command is about a cluster."""
        from shoal_cli.live.cluster import Kubectl

        named = (
            ("namespace", self.namespace),
            ("context", self.context),
            ("kubeconfig", self.kubeconfig),
        )
        options = tuple(f"--{name}={value}" for name, value in named if value is not None)
        elsewhere = bool(self.coordinator or self.work)
        asked = bool(options or self.pool)
        if asked and elsewhere:
            raise typer.BadParameter("name a coordinator, a work folder or a pool, not several")
        plugin = Path(sys.argv[0]).name == PLUGIN
        return Kubectl(options) if asked or (plugin and not elsewhere) else None


def local_pool(work: Path | None) -> "RunningPool | None":
    """The pool of a run on this machine; None where none was named and none runs. Raises
    `NoCoordinator`."""
    from shoal_cli.local.workspace import running_pools

    pools = running_pools()
    if work is not None:
        pools = [pool for pool in pools if pool.work == work.resolve()]
        if not pools:
            raise NoCoordinator(f"no active run has the work folder {work}")
    match pools:
        case []:
            return None
        case [pool]:
            return pool
        case _:
            raise NoCoordinator(_several(pools))


def _several(pools: "Sequence[RunningPool]") -> str:
    lines = (f"{pool.name}: --coordinator {pool.target} (in {pool.work})" for pool in pools)
    return "\n".join(("several pools run on this machine; name one:", *lines))


@contextlib.asynccontextmanager
async def watching(target: Target) -> AsyncIterator[tuple[str, "CoordinatorClient"]]:
    """What to call the coordinator, and a client of it. Raises `NoCoordinator`,
    `cluster.ClusterRefused`, and what `joined.reach` and `Reachable.calling` raise."""
    from shoal_cli.live.cluster import find_pool
    from shoal_cli.transfer.joined import explained, joined, reach

    if (kubectl := target.kubectl) is not None:
        pool = find_pool(kubectl, target.pool)
        title = f"pool {pool.name} in {pool.namespace}"
        async with pool.calling() as client:
            with explained(title):
                yield title, client
        return
    address = target.coordinator
    if address is None and target.work is None:
        address = os.environ.get("SHOAL_COORDINATOR")
    title = address or "the coordinator that was joined"
    if address is None and (local := local_pool(target.work)) is not None:
        address, title = local.target, f"pool {local.name} in {local.work}"
    if address is None and not joined():
        raise NoCoordinator(_NONE)
    async with reach(address).calling() as client:
        yield title, client


async def overview(client: "CoordinatorClient", job: str = "") -> "pb.Overview":
    """What the coordinator does, and one job in detail. Raises `CallFailed`, and `NoCoordinator`
    where it is too old to say."""
    import grpc

    from shoal_protocol.coordinator_client import CallFailed

    try:
        return await client.overview(job)
    except CallFailed as error:
        if error.code is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        raise NoCoordinator(
            "this coordinator is older than this command and cannot be asked; upgrade it"
        ) from error


async def name_there(client: "CoordinatorClient", target: Target, name: str) -> str:
    """What the coordinator calls a job of that name. Raises `Unknown`."""
    from shoal_cli.live.view import view_of

    view = view_of(await overview(client))
    if not (jobs := view.jobs_called(name)):
        raise Unknown(name, view, on_cluster=target.kubectl is not None)
    return jobs[0].name
