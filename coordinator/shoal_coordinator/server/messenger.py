"""Messages to devices, each after the releases that were decided before it.

A release asks for no answer and is in no hurry, so it waits a moment for a message to be sent with.
No message may overtake it: a task that runs again must not lose its outputs to a release that was
meant for its first run.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.server import wire
from shoal_coordinator.server.device_session import DeviceSession
from shoal_protocol.v1 import session_pb2 as pb

RELEASE_SECONDS: Final = 0.02
"""How long a release waits for a message to be sent with."""


class Messenger:
    """What goes to the sessions that are open, by device."""

    def __init__(self, sessions: Mapping[str, DeviceSession]) -> None:
        self._sessions = sessions
        self._released: dict[str, list[ins.Release]] = {}
        self._flushing: asyncio.TimerHandle | None = None

    def send(self, device: str, message: pb.CoordinatorMessage) -> None:
        """Send a message, if the device has a session."""
        if (session := self._sessions.get(device)) is None:
            return
        if (released := self._released.pop(device, None)) is not None:
            session.send(wire.release_message(released))
        session.send(message)

    def release(self, order: ins.Release) -> None:
        """Send a release with the next message; `flush_soon` has to follow."""
        self._released.setdefault(order.device, []).append(order)

    def flush_soon(self) -> None:
        """Send what is released in a while, if no message has taken it along until then."""
        if self._released and self._flushing is None:
            loop = asyncio.get_running_loop()
            self._flushing = loop.call_later(RELEASE_SECONDS, self._flush)

    def left(self, device: str) -> None:
        """Its session has ended: what was released is gone with it."""
        self._released.pop(device, None)

    def _flush(self) -> None:
        self._flushing = None
        for device, released in self._released.items():
            if (session := self._sessions.get(device)) is not None:
                session.send(wire.release_message(released))
        self._released.clear()
