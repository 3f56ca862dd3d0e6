"""How devices reach one another: directly, or through the coordinator."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.server import wire
from shoal_coordinator.server.sessions import DeviceSession
from shoal_protocol.units import Nanoseconds, nanoseconds

RELAYED: Final = nanoseconds(60)
"""How long activations between two devices are relayed after one could not reach the other."""


class Relay(StrEnum):
    """Which activations pass through the coordinator: those that cannot do otherwise, or all."""

    AUTO = "Auto"
    ALWAYS = "Always"


class Routes:
    """The addresses that devices are given of one another."""

    def __init__(
        self, sessions: Mapping[str, DeviceSession], relay: Relay, *, named_peers: bool
    ) -> None:
        """`named_peers`: peers are secured by TLS, so that a target needs the device's name."""
        self._sessions = sessions
        self._relay = relay
        self._named_peers = named_peers
        self._relay_until: dict[tuple[str, str], Nanoseconds] = {}

    def address(self, device: str, target: str, now: Nanoseconds) -> str:
        """How a device reaches another; empty: through the coordinator."""
        session = self._sessions.get(target)
        if self._relay is Relay.ALWAYS or session is None:
            return ""
        until = self._relay_until.get((device, target))
        if until is not None:
            if now < until:
                return ""
            del self._relay_until[device, target]
        return session.hello.address

    def peers(self, devices: tuple[str, ...]) -> tuple[str, ...]:
        """Where fragments can be fetched: the targets of those devices that have one."""
        sessions = (self._sessions.get(device) for device in devices)
        return tuple(
            f"{session.device}@{session.hello.address}"
            if self._named_peers and not session.hello.address.startswith("unix:")
            else session.hello.address
            for session in sessions
            if session is not None and session.hello.address
        )

    def note(self, order: wire.Given, event: ev.Event, at: Nanoseconds) -> None:
        """Where a device could not reach another, the coordinator relays for a while."""
        for target in _missed_targets(order, event):
            self._relay_until[order.device, target] = Nanoseconds(at + RELAYED)


def _missed_targets(order: ins.Instruction, event: ev.Event) -> list[str]:
    """The devices that the sender could not reach, by its answer to an instruction."""
    match order, event:
        case ins.Execute(), ev.TaskFinished():
            return [target for stage, target in order.routes if stage not in event.delivered]
        case ins.Forward(), ev.InstructionFailed() if (
            event.failure.kind is ev.FailureKind.UNREACHABLE
        ):
            return [order.target]
        case _:
            return []
