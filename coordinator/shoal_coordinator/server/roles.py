"""Who may call what, by the common name of the caller's certificate.

| who                               | may                                                     |
|-----------------------------------|---------------------------------------------------------|
| a client, such as shoal-operator  | call everything of `Coordinator`                        |
| shoal-viewer                      | call `Coordinator.GetOverview` and `ListItems`, which   |
|                                   | change nothing                                          |
| shoal-worker                      | call everything of `Files`                              |
| shoal-user                        | both; but its jobs have their folders on the volume     |
| any other name                    | be a device: sessions of that name, fetching fragments  |

A worker's certificate opens files alone, and a device's submits no jobs. A client may call what a
viewer may. A user comes over the network, and is nobody on the coordinator's machine: no job of
theirs reads or writes other folders than its own. A certificate with several common names opens
nothing. Behind a Unix socket, and without TLS, the file system and the loopback are the identity,
and everyone may call everything.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, assert_never

import grpc

from shoal_coordinator.server.refusals import abort
from shoal_protocol.channels import is_secured, peer_name
from shoal_protocol.identities import USER, VIEWER, WORKER


class Role(Enum):
    """A caller's role; the value is its name in messages."""

    CLIENT = "a client"
    VIEWER = "a viewer"
    WORKER = "a worker"
    DEVICE = "a device"


_NAMED: Final = {
    USER: (Role.CLIENT, Role.WORKER),
    VIEWER: (Role.VIEWER,),
    WORKER: (Role.WORKER,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The rules of one coordinator; `clients` are the common names that may submit jobs."""

    clients: frozenset[str]

    def roles_of(self, name: str) -> tuple[Role, ...]:
        if name in self.clients:
            return (Role.CLIENT,)
        return _NAMED.get(name, (Role.DEVICE,))

    async def require(self, context: grpc.aio.ServicerContext[Any, Any], *wanted: Role) -> None:
        """Abort the call with PERMISSION_DENIED for anyone but these."""
        if not is_secured(context):
            return
        name = peer_name(context)
        if name is None:
            reason = "the certificate does not have exactly one common name; issue one that has"
        elif not set(wanted).isdisjoint(roles := self.roles_of(name)):
            return
        else:
            known = " and ".join(role.value for role in roles)
            reason = f"{name!r} is {known} here, and may not {_doing(wanted[0])}"
        await abort(context, grpc.StatusCode.PERMISSION_DENIED, reason)

    async def require_folders(
        self, context: grpc.aio.ServicerContext[Any, Any], *folders: str
    ) -> None:
        """Abort the call where a user names folders of this machine."""
        if any(folders) and is_secured(context) and peer_name(context) == USER:
            reason = f"{USER!r} may not name folders of the coordinator's machine; send the files"
            await abort(context, grpc.StatusCode.PERMISSION_DENIED, reason)


def _doing(role: Role) -> str:
    match role:
        case Role.CLIENT:
            return "submit jobs to this coordinator"
        case Role.VIEWER:
            return "see what this coordinator does"
        case Role.WORKER:
            return "put or fetch files"
        case Role.DEVICE:
            return "open a device's session or fetch fragments"
        case _:
            assert_never(role)
