"""What a session asks of the agent that it belongs to."""

from collections.abc import Sequence
from typing import Protocol

from shoal_agent.runtime.fragments import Fragments
from shoal_agent.telemetry.counters import Counters
from shoal_agent.telemetry.link import LinkMeters
from shoal_agent.transport.links import PeerLinks
from shoal_agent.transport.shaping import Uplink
from shoal_protocol.units import Bytes
from shoal_protocol.v1 import session_pb2 as pb


class Device(Protocol):
    """The agent that a session belongs to, which outlives it. Its budget may change, up to the
    largest."""

    name: str
    largest_budget_bytes: Bytes
    fragments: Fragments
    counters: Counters
    links: PeerLinks
    uplink: Uplink
    link_meters: LinkMeters

    def hello(self) -> pb.Hello: ...
    def resident(self) -> Sequence[pb.ResidentFragment]: ...
    def telemetry(self) -> pb.Telemetry: ...
