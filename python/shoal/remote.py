"""The devices of a coordinator that this user has joined, as a pool."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc

from shoal.errors import PoolFailed
from shoal.processes import workspace
from shoal.running import Running
from shoal_cli.local.workspace import WorkspaceBusy
from shoal_cli.standalone.remote_pools import RemoteFailed, remote_pool
from shoal_protocol.digests import Digest


@contextlib.asynccontextmanager
async def running_there(target: str, work: Path | None) -> AsyncIterator[Running]:
    """The pool at a coordinator; models are cut on this machine. Raises `PoolFailed`."""
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(workspace(work))
            pool = await remote_pool(target)
        except (RemoteFailed, WorkspaceBusy, OSError) as error:
            raise PoolFailed(str(error)) from error

        async def deliver(digests: Sequence[Digest]) -> None:
            try:
                await pool.send(place.store, digests)
            except RemoteFailed as error:
                raise PoolFailed(str(error)) from error

        async def reopen() -> grpc.aio.Channel | None:
            with contextlib.suppress(RemoteFailed):  # with the one that there is, it is tried again
                return await pool.channel_again()
            return None

        yield Running(
            devices=pool.devices,
            store=place.store,
            target=pool.coordinator.target,
            open_channel=pool.channel,
            reopen=reopen,
            deliver=deliver,
            failed=_never,
        )


async def _never() -> None:
    """A coordinator that is away for long fails the items themselves."""
    await asyncio.Event().wait()
