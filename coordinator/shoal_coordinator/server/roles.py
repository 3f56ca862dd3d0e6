"""Who may call what, by the common name of the caller's certificate.

| who                               | may                                                     |
|-----------------------------------|---------------------------------------------------------|
| a client, such as shoal-operator  | call everything of `Coordinator`                        |
| shoal-viewer                      | call `Coordinator.GetOverview`, which changes nothing   |
| shoal-worker                      | call everything of `Files`                              |
| any other name                    | be a device: sessions of that name, fetching fragments  |

They exclude each other: a worker's certificate opens files alone, and a device's submits no jobs.
(A client may call what a viewer may.) A certificate with several common names opens nothing. Behind
a Unix socket, and without TLS, the file system and the loopback are the identity, and everyone may
call everything.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NoReturn, assert_never

import grpc

from shoal_protocol.channels import is_secured, peer_name
from shoal_protocol.identities import VIEWER, WORKER


class Role(Enum):
    """A caller's role; the value is its name in messages."""

    CLIENT = "a client"
    VIEWER = "a viewer"
    WORKER = "a worker"
    DEVICE = "a device"


_NAMED: Final = {VIEWER: Role.VIEWER, WORKER: Role.WORKER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The rules of one coordinator; `clients` are the common names that may submit jobs."""

    clients: frozenset[str]

    def role_of(self, name: str) -> Role:
        if name in self.clients:
            return Role.CLIENT
        return _NAMED.get(name, Role.DEVICE)

    async def require(
        self, context: grpc.aio.ServicerContext[Any, Any], wanted: Role, *others: Role
    ) -> None:
        """Abort the call with PERMISSION_DENIED for anyone but these."""
        if not is_secured(context):
            return
        name = peer_name(context)
        if name is None:
            reason = "the certificate does not have exactly one common name; issue one that has"
        elif (role := self.role_of(name)) in {wanted, *others}:
            return
        else:
            reason = f"{name!r} is {role.value} here, and may not {_doing(wanted)}"
        await abort(context, grpc.StatusCode.PERMISSION_DENIED, reason)


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], code: grpc.StatusCode, reason: str
) -> NoReturn:
    await context.abort(code, reason)
    raise AssertionError("abort always raises")


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
