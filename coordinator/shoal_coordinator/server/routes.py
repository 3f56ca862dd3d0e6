"""How devices reach one another: directly, or through the coordinator."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import islice
from typing import Final

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.server import wire
from shoal_coordinator.server.device_session import DeviceSession
from shoal_protocol.units import Nanoseconds, nanoseconds
from shoal_protocol.v1 import session_pb2 as pb

RELAYED: Final = nanoseconds(60)
"""How long activations between two devices are relayed after one could not reach the other."""
MAXIMUM_PAIRS: Final = 4096
"""Beyond these, the pair that failed longest ago tries the direct way again."""

MAXIMUM_NEIGHBOURS: Final = 16
"""That a device is sent at once."""


class RelayedPairs:
    """Pairs of devices, and until when activations from the one to the other are relayed."""

    def __init__(self) -> None:
        self._until: OrderedDict[tuple[str, str], Nanoseconds] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, source: str, target: str, now: Nanoseconds) -> None:
        self._until[source, target] = Nanoseconds(now + RELAYED)
        self._until.move_to_end((source, target))
        if len(self._until) > MAXIMUM_PAIRS:
            self._until.popitem(last=False)

    def forget(self, device: str) -> None:
        for pair in [pair for pair in self._until if device in pair]:
            del self._until[pair]

    def relayed(self, source: str, target: str, now: Nanoseconds) -> bool:
        until = self._until.get((source, target))
        if until is None:
            return False
        if now >= until:
            del self._until[source, target]
            return False
        return True

    def targets(self, source: str, now: Nanoseconds) -> list[str]:
        """To which devices activations from this one are relayed."""
        pairs = self._until.items()
        return [target for (each, target), until in pairs if each == source and now < until]


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
        self._relayed = RelayedPairs()

    def address(self, device: str, target: str, now: Nanoseconds) -> wire.Address | None:
        """How a device reaches another; None: through the coordinator."""
        if (session := self._reachable(target)) is None:
            return None
        if self._relay is Relay.ALWAYS or self._relayed.relayed(device, target, now):
            return None
        return wire.Address(session.hello.address, session.ticket_key)

    def _reachable(self, device: str) -> DeviceSession | None:
        """The session of a device that others may dial. A Unix socket proves nobody's name: where
        devices have certificates, one could have others open sockets of their own machines."""
        session = self._sessions.get(device)
        if session is None or not (address := session.hello.address):
            return None
        return None if self._named_peers and address.startswith("unix:") else session

    def joined(self, device: str) -> None:
        """A device has a new session: what kept others from it may have been its last one."""
        self._relayed.forget(device)

    def relayed_from(self, device: str, now: Nanoseconds) -> list[str]:
        """The devices that it could not reach of late."""
        return self._relayed.targets(device, now)

    def peers(self, devices: tuple[str, ...]) -> tuple[str, ...]:
        """Where fragments can be fetched: the targets of those devices that have one."""
        return tuple(
            f"{device}@{session.hello.address}" if self._named_peers else session.hello.address
            for device in devices
            if (session := self._reachable(device)) is not None
        )

    def introductions(
        self, job: ev.JobSpec, now: Nanoseconds
    ) -> Iterator[tuple[str, pb.CoordinatorMessage]]:
        """What devices are sent about those that they will send to by the plan of a job. A link
        that stays on a host needs no probe."""
        for device, targets in _pairs(job).items():
            found = ((target, self.address(device, target, now)) for target in targets)
            known = [
                pb.Neighbour(device=target, address=address.target)
                for target, address in islice(found, MAXIMUM_NEIGHBOURS)
                if address is not None and not address.target.startswith("unix:")
            ]
            if known:
                message = pb.Neighbours(devices=known)
                yield device, pb.CoordinatorMessage(neighbours=message)

    def note(self, order: wire.Answerable, event: ev.Event, at: Nanoseconds) -> None:
        """Where a device could not reach another, the coordinator relays for a while."""
        for source, target in _missed(order, event):
            there = self._sessions.get(target)
            if there is None or order.instruction > there.since:
                self._relayed.add(source, target, at)


def _pairs(job: ev.JobSpec) -> dict[str, list[str]]:
    """By device the others that it will send to, the nearest stages first."""
    found: dict[str, dict[str, None]] = {}
    for stage in job.stages:
        for before in stage.predecessors:
            for source in job.stages[before].homes:
                others = (home for home in stage.homes if home != source)
                found.setdefault(source, {}).update(dict.fromkeys(others))
    return {device: list(targets) for device, targets in found.items()}


def _missed(order: ins.Instruction, event: ev.Event) -> list[tuple[str, str]]:
    """The pairs of devices of which one could not reach the other, by an answer."""
    match order, event:
        case ins.Execute(), ev.TaskFinished():
            missed = (target for stage, target in order.routes if stage not in event.delivered)
            return [(order.device, target) for target in missed]
        case ((ins.Forward() | ins.Travel()), ev.InstructionFailed(failure=failure)) if (
            failure.kind is ev.FailureKind.UNREACHABLE
        ):
            if isinstance(order, ins.Forward):
                return [(order.device, order.target)]
            hops = zip(order.devices, order.devices[1:], strict=False)
            return [hop for hop in hops if hop[0] == failure.device != hop[1]]
        case _:
            return []
