"""The session of one device: what it greeted with, what waits for its answer, what is unsent."""

import asyncio
from dataclasses import dataclass, field
from time import monotonic
from typing import TypeAlias

from shoal_coordinator.server import wire
from shoal_coordinator.server.exchange import DeviceLink
from shoal_coordinator.server.fragment_times import FragmentTimes
from shoal_protocol.control import ControlStream
from shoal_protocol.pacing import LONGEST_SECONDS, Outbox
from shoal_protocol.tickets import new_ticket_key
from shoal_protocol.v1.session_pb2 import AgentMessage, CoordinatorMessage, Hello, Telemetry

SessionStream: TypeAlias = ControlStream[CoordinatorMessage, AgentMessage]
"""The stream that carries a session's messages, over gRPC or on one host."""


@dataclass(slots=True, eq=False, kw_only=True)
class DeviceSession:
    """One session. `unanswered` are the instructions that wait for their answers; those up to
    `since` were given before it, perhaps with the tickets of another one."""

    number: int
    hello: Hello
    since: int = 0
    unanswered: dict[int, wire.Answerable] = field(default_factory=dict)
    link: DeviceLink | None = None
    linked: asyncio.Event = field(default_factory=asyncio.Event)
    telemetry: Telemetry = field(default_factory=Telemetry)
    received_at: float = field(default_factory=monotonic)
    draining: bool = False
    ended: asyncio.Future[str] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    ticket_key: bytes = field(default_factory=new_ticket_key)
    outbox: Outbox[CoordinatorMessage] = field(default_factory=Outbox)
    """Messages that have not been sent. A device that leaves it full is cut off."""
    times: FragmentTimes = field(init=False)

    def __post_init__(self) -> None:
        self.times = FragmentTimes(self.hello)

    @property
    def device(self) -> str:
        return self.hello.device

    def send(self, message: CoordinatorMessage) -> None:
        if self.outbox.full:
            self.end(f"{len(self.outbox)} messages are unsent")
        else:
            self.outbox.put(message)

    def end(self, reason: str) -> None:
        """Close the session."""
        if not self.ended.done():
            self.ended.set_result(reason)

    def waits_for(self, message: AgentMessage) -> bool:
        return message.HasField("reply") and message.reply.instruction in self.unanswered

    async def write_all(self, stream: SessionStream) -> None:
        await self.outbox.write_all(
            stream.write,
            lambda: len(self.unanswered) > 1,
            longest_seconds=0.0 if stream.local else LONGEST_SECONDS,
        )
