"""A coordinator as a pool for a program: its devices, a channel to it, fragments sent to it."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from shoal_cli.standalone.remote_devices import NoDevices, planned_for, ready_devices
from shoal_cli.transfer.coordinators import upload_fragments
from shoal_cli.transfer.joined import (
    CallRefused,
    CoordinatorAway,
    JoinRefused,
    NotJoined,
    Reachable,
    reach,
)
from shoal_cli.transfer.places import TransferBroken, TransferRefused, with_tries
from shoal_planner.devices import PoolDevice
from shoal_protocol.channels import AddressRefused
from shoal_protocol.digests import Digest


class RemoteFailed(Exception):
    """The coordinator cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class RemotePool:
    """A coordinator, and the devices that were ready when it was asked."""

    coordinator: Reachable
    devices: tuple[PoolDevice, ...]

    def channel(self) -> grpc.aio.Channel:
        """A channel to the coordinator. Raises `RemoteFailed`."""
        with _translated():
            return self.coordinator.channel()

    async def channel_again(self) -> grpc.aio.Channel:
        """Another one, after a renewal where that is due. Raises `RemoteFailed`."""
        with _translated():
            await asyncio.to_thread(self.coordinator.renew)
            return self.coordinator.channel()

    async def send(self, store: Path, digests: Sequence[Digest]) -> None:
        """Upload the fragments that the coordinator lacks. Raises `RemoteFailed`."""
        with _translated():
            async with self.coordinator.calling() as client:
                target = self.coordinator.target
                upload = partial(upload_fragments, store, digests, client, target)
                await with_tries(partial(upload, on_bytes=lambda size: None))


async def remote_pool(target: str | None) -> RemotePool:
    """The pool of a coordinator, by default the only one that was joined. Raises `RemoteFailed`."""
    with _translated():
        coordinator = reach(target)
        devices = await ready_devices(coordinator)
    return RemotePool(coordinator, planned_for(devices))


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (
        *(NotJoined, JoinRefused, CoordinatorAway, CallRefused, NoDevices),
        *(TransferRefused, TransferBroken, AddressRefused, OSError),
    ) as error:
        raise RemoteFailed(str(error)) from error
