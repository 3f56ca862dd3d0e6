"""What a pool is made of, wherever its devices are, and whose it is."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

import grpc

from shoal_planner.devices import PoolDevice
from shoal_protocol.digests import Digest

Reopen: TypeAlias = Callable[[], Awaitable[grpc.aio.Channel | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A pool whose `devices` are ready. Models are cut into the `store`; `deliver` takes fragments
    from there to the coordinator at `target`, which `open_channel` leads to. `reopen`
    gives another channel in the place of one that broke, or None: that one is to be used. `failed`
    returns never, and raises `PoolFailed` when the pool cannot continue."""

    devices: tuple[PoolDevice, ...]
    store: Path
    target: str
    open_channel: Callable[[], grpc.aio.Channel]
    deliver: Callable[[Sequence[Digest]], Awaitable[None]]
    failed: Callable[[], Awaitable[None]]
    reopen: Reopen | None = None


class OfOneProcess:
    """What another process can make nothing of."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} can be neither copied nor sent to another process, which has "
            "to start a pool and load a model itself; threads may share them"
        )
