"""What a pool is made of, wherever its devices are."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from shoal_planner.devices import PoolDevice
from shoal_protocol.digests import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A pool whose `devices` are ready. Models are cut into the `store`; `deliver` takes fragments
    from there to the coordinator at `target`, which `open_channel` leads to. `failed` returns
    never, and raises `PoolFailed` when the pool cannot continue."""

    devices: tuple[PoolDevice, ...]
    store: Path
    target: str
    open_channel: Callable[[], grpc.aio.Channel]
    deliver: Callable[[Sequence[Digest]], Awaitable[None]]
    failed: Callable[[], Awaitable[None]]
