"""Which running coordinator `top`, `describe`, `why` and `logs` are about, and a client of it.

| given                       | the coordinator                                                   |
|-----------------------------|-------------------------------------------------------------------|
| --pool, --namespace, ...    | of a pool of the cluster, through `kubectl port-forward`          |
| --coordinator               | at that address                                                   |
| --work                      | of the local run with that work folder                            |
| nothing                     | of the only local run; for `kubectl shoal` as if --pool was given |
"""

import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shoal_cli.commands import coordinators

if TYPE_CHECKING:
    from shoal_cli.live.cluster import ClusterPool, Kubectl
    from shoal_cli.local.workspace import RunningPool
    from shoal_protocol.coordinator_client import CoordinatorClient

PLUGIN: Final = "kubectl-shoal"
_LOCAL: Final = "A run on this machine"
_CLUSTER: Final = "A pool of a cluster"

Work = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        rich_help_panel=_LOCAL,
        help="The run with this work folder. [dim]Default: the only one that goes on[/dim]",
    ),
]
Pool = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_CLUSTER,
        help="A DevicePool. [dim]Default: the only one of the namespace[/dim]",
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        metavar="NAME",
        rich_help_panel=_CLUSTER,
        help="Its namespace. [dim]Default: kubectl's[/dim]",
    ),
]
Context = Annotated[
    str | None, typer.Option(metavar="NAME", rich_help_panel=_CLUSTER, help="As of kubectl.")
]
Kubeconfig = Annotated[
    Path | None, typer.Option(metavar="FILE", rich_help_panel=_CLUSTER, help="As of kubectl.")
]


class NoCoordinator(Exception):
    """No coordinator was named, and there is none, or more than one."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a command line says of the coordinator."""

    coordinator: str | None
    work: Path | None
    pool: str | None
    namespace: str | None
    context: str | None
    kubeconfig: Path | None

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
        asked = options or self.pool
        plugin = Path(sys.argv[0]).name == PLUGIN and not (self.coordinator or self.work)
        if asked and (self.coordinator or self.work):
            raise typer.BadParameter("--coordinator, --work and a cluster's pool exclude each other")
        return Kubectl(options) if asked or plugin else None


def local_pool(work: Path | None) -> "RunningPool | None":
    """The pool of a run on this machine; None where none was named and none runs. Raises
    `NoCoordinator`."""
    from shoal_cli.local.workspace import running_pools

    pools = running_pools()
    if work is not None:
        pools = [pool for pool in pools if pool.work == work.resolve()]
        if not pools:
            raise NoCoordinator(f"no run with the work folder {work} goes on")
    match pools:
        case []:
            return None
        case [pool]:
            return pool
        case _:
            raise NoCoordinator(_several(pools))


def _several(pools: "Sequence[RunningPool]") -> str:
    lines = "\n".join(f"  {pool.name}: --coordinator {pool.target}  ({pool.work})" for pool in pools)
    return f"several pools run on this machine; name one:\n{lines}"


@contextlib.asynccontextmanager
async def watching(target: Target) -> AsyncIterator[tuple[str, "CoordinatorClient"]]:
    """A client of the coordinator, and what to call it. Raises `NoCoordinator`,
    `cluster.ClusterRefused`, and what `coordinators.calling` raises."""
    if (kubectl := target.kubectl) is not None:
        from shoal_cli.live.cluster import find_pool

        pool = find_pool(kubectl, target.pool)
        async with forwarded(pool) as client:
            yield f"pool {pool.name} in {pool.namespace}", client
        return
    address, title = target.coordinator, target.coordinator or "the coordinator that was joined"
    if address is None and (local := local_pool(target.work)) is not None:
        address, title = local.target, f"{local.name} on this machine ({local.work})"
    try:
        async with coordinators.calling(address) as client:
            yield title, client
    except NotJoined as error:
        if address is not None:
            raise
        raise NoCoordinator(_NONE) from error
