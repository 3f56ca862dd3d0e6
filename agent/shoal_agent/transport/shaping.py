"""What leaves the agent: streams to other processes, and slow links that are simulated for them.

Simulated links are for the devices of one machine in local mode, in user space: the bulk that
leaves the agent, and fragments that come, are slowed down. The rate is that of one
shared link in each direction (what comes from another agent was slowed down by that one); the
latency delays each message that leaves, while others are on their way already, as on a real link.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from time import monotonic
from typing import Final

from shoal_protocol.bulk.local import connect
from shoal_protocol.bulk.transport import GrpcTransport, Received, Transport, TransportBroken
from shoal_protocol.frame_sizes import MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.frames import Frame
from shoal_protocol.services import FrameStream

_MESSAGES_ON_THE_WAY: Final = 256
"""What a simulated link holds at most: 16 MiB. Who sends more waits."""


_UNSENT_PART: Final = 128
_UNSENT_AT_LEAST_BYTES: Final = 64 << 10
"""Of a budget, what the kernel may hold of each local stream, and what it always may: one wakes the
receiver for each of these, so a large payload takes longer. A kernel holds up to twice as much, and
charges it to the agent's group: with 1 MiB, agents of 12 to 16 MiB were killed there."""


def unsent_bytes(budget_bytes: int) -> int:
    """What a local stream of an agent with this budget may leave to the kernel."""
    return min(max(budget_bytes // _UNSENT_PART, _UNSENT_AT_LEAST_BYTES), MAXIMUM_PAYLOAD_BYTES)


class Uplink:
    """The way out of this agent. Simulated: bits per second, and seconds one way; zero means
    unlimited, and none."""

    def __init__(
        self,
        rate_bits_per_second: float = 0.0,
        latency_seconds: float = 0.0,
        *,
        unsent_bytes: int = MAXIMUM_PAYLOAD_BYTES,
    ) -> None:
        self._unsent_bytes = unsent_bytes
        self._seconds_per_byte = 8 / rate_bits_per_second if rate_bits_per_second else 0.0
        self.latency_seconds = latency_seconds
        self._free_at = 0.0

    @property
    def shaped(self) -> bool:
        return bool(self._seconds_per_byte or self.latency_seconds)

    async def depart(self, size: int) -> None:
        """Wait until the link has carried so many bytes."""
        if not self._seconds_per_byte:
            return
        now = monotonic()
        self._free_at = max(now, self._free_at) + size * self._seconds_per_byte
        await asyncio.sleep(self._free_at - now)

    def open(self, address: str, call: Callable[[], FrameStream], device: str = "") -> Transport:
        """A stream of this device to whoever serves `address`: a local one where that is offered,
        else one of gRPC, by `call`."""
        stream = connect(address, device, unsent_bytes=self._unsent_bytes)
        return self.shape(stream or GrpcTransport.of_call(call()))

    def shape(self, transport: Transport) -> Transport:
        """The transport as it is over this link."""
        return _ShapedTransport(transport, self) if self.shaped else transport


class _ShapedTransport:
    """Writes frames in order, each `latency_seconds` after it left."""

    frame_bytes = 64 << 10
    local = False

    def __init__(self, transport: Transport, uplink: Uplink) -> None:
        self._transport = transport
        self._uplink = uplink
        self._on_the_way: deque[tuple[float, Sequence[Frame]]] = deque()
        self._room = asyncio.Semaphore(_MESSAGES_ON_THE_WAY)
        self._filled = asyncio.Event()
        self._broken: TransportBroken | None = None
        self._task = asyncio.create_task(self._deliver(), name="simulated link")

    def received(self) -> AsyncIterator[Iterable[Received]]:
        """Those of the transport: the other side slows its own down."""
        return self._transport.received()

    def heard(self) -> int | None:
        """As of the transport."""
        return self._transport.heard()

    async def write(self, frames: Sequence[Frame]) -> None:
        """Returns when the frames have left. Raises what delivering an earlier one raised."""
        await self._room.acquire()
        if self._broken is not None:
            self._room.release()
            raise self._broken
        await self._uplink.depart(sum(frame.size for frame in frames))
        self._on_the_way.append((monotonic() + self._uplink.latency_seconds, frames))
        self._filled.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._transport.close()

    async def _deliver(self) -> None:
        while True:
            while not self._on_the_way:
                self._filled.clear()
                await self._filled.wait()
            due, frames = self._on_the_way.popleft()
            await asyncio.sleep(max(0.0, due - monotonic()))
            try:
                await self._transport.write(frames)
            except TransportBroken as error:
                self._broken = error
                return
            finally:
                self._room.release()
