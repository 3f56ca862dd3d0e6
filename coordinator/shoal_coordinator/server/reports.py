"""What the telemetry of a device tells the dispatcher."""

from collections.abc import Iterator

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.server import wire
from shoal_coordinator.server.device_session import DeviceSession
from shoal_coordinator.server.excesses import Excesses
from shoal_protocol.fragment_store import MAXIMUM_LISTED
from shoal_protocol.units import Bytes, Nanoseconds
from shoal_protocol.v1 import session_pb2 as pb


def reported(
    session: DeviceSession, telemetry: pb.Telemetry, excesses: Excesses, at: Nanoseconds
) -> Iterator[ev.BudgetChanged | ev.DeviceTelemetry]:
    """Note it in the session, and what was measured. Raises `wire.Malformed`."""
    hello, number = session.hello, session.number
    if telemetry.HasField("budget_bytes"):
        excesses.changed(hello, hello.budget_bytes)
        hello.budget_bytes = wire.size(telemetry.budget_bytes)
        resident = telemetry.resident[:MAXIMUM_LISTED]
        yield ev.BudgetChanged(
            at=at,
            device=session.device,
            session=number,
            budget=Bytes(hello.budget_bytes),
            resident={wire.digest_of(r.digest): wire.size(r.resident_bytes) for r in resident},
        )
    session.telemetry = telemetry
    excesses.reported(hello, telemetry)
    for measured in telemetry.tasks[:MAXIMUM_LISTED]:
        session.times.ran(measured.digest, measured)
    yield ev.DeviceTelemetry(
        at=at,
        device=session.device,
        session=number,
        telemetry=wire.telemetry_of(telemetry),
        fetched=wire.size(telemetry.fetched_bytes),
    )
