"""Probes of links, over a pipe that two real ends of a stream share."""

from typing import Any

from protocol.test_bulk import Pipe, Taker, serving
from shoal_agent.telemetry.link import COORDINATOR, LARGE_BYTES, LinkMeters
from shoal_agent.transport.probing import PROBES, Neighbours, probe
from shoal_protocol.bulk.link import BulkLink
from shoal_protocol.bulk.receiving import Intake
from shoal_protocol.v1 import session_pb2 as pb


def ends() -> tuple[Pipe, BulkLink, Pipe, BulkLink]:
    near, far = Pipe(), Pipe()
    near.other, far.other = far, near
    return near, BulkLink(near), far, BulkLink(far, Intake(Taker()))


def sent(pipe: Pipe) -> int:
    return sum(map(len, pipe.written))


async def test_a_probe_measures_a_link_and_the_processor_with_bytes_that_are_bounded() -> None:
    near, sender, far, receiver = ends()
    meters = LinkMeters()
    async with serving(sender, receiver):
        await probe(sender, meters, "jetson")
    link = meters.read()
    ((name, peer),) = link.peers
    assert name == "jetson"
    assert peer.bytes_per_second is not None
    assert peer.round_trip_seconds is not None
    assert link.transfer_seconds_per_byte is not None
    assert PROBES * LARGE_BYTES < sent(near) < PROBES * LARGE_BYTES + 500
    assert sent(far) < 500
    assert not meters.to("jetson").ages


async def test_the_coordinator_answers_with_as_many_bytes_since_inputs_come_from_there() -> None:
    _, sender, far, receiver = ends()
    async with serving(sender, receiver):
        await probe(sender, LinkMeters(), COORDINATOR, answer_bytes=LARGE_BYTES)
    assert PROBES * LARGE_BYTES < sent(far) < PROBES * LARGE_BYTES + 500


async def test_a_link_on_which_something_is_on_its_way_is_not_probed() -> None:
    near, sender, _, receiver = ends()
    async with serving(sender, receiver):
        assert sender.probed
        near.flows.clear()
        waiting = await sender.enqueue(lambda number: (), size=1)
        assert not sender.probed
        near.flows.set()
        waiting.fail("it says nothing")
    near.local = True
    assert not BulkLink(near).probed, "it stays on this host"


class HeldAtFirst(BulkLink):
    """Its first ping finds the other end held, for as long as a probe takes."""

    pings = 0

    async def ping(self, size: int = 0, answer_bytes: int = 0) -> float:
        await super().ping(size, answer_bytes)
        self.pings += 1
        return 0.2 if size or self.pings == 1 else 0.001


async def test_an_end_that_is_held_for_a_while_does_not_make_a_slow_link_look_fast() -> None:
    near, far = Pipe(), Pipe()
    near.other, far.other = far, near
    sender, receiver, meters = HeldAtFirst(near), BulkLink(far, Intake(Taker())), LinkMeters()
    async with serving(sender, receiver):
        await probe(sender, meters, "jetson")
    rate = meters.to("jetson").read().bytes_per_second
    assert rate is not None
    assert rate < 1.1 * LARGE_BYTES / 0.2


class Links:
    """Links that are there as soon as they are opened."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, str]] = []

    def link(self, device: str, address: str) -> "Links":
        self.opened.append((device, address))
        return self

    def open(self) -> Any:
        return {device: None for device, _ in self.opened}


def expect(neighbours: Neighbours, *names: str) -> None:
    devices = [pb.Neighbour(device=name, address=f"{name}:7400") for name in names]
    neighbours.expect(pb.Neighbours(devices=devices))


def test_links_that_a_plan_counts_on_are_opened_once_and_one_at_a_time() -> None:
    links, meters = Links(), LinkMeters()
    neighbours = Neighbours(links, meters)
    meters.to("known").transferred(LARGE_BYTES, 0.1)
    expect(neighbours, "known", "jetson", "pi-4", "pi-5")
    seen = [list(neighbours.open()) for _ in range(5)]
    assert seen == [
        ["jetson"],
        ["jetson", "pi-4"],
        *[["jetson", "pi-4", "pi-5"]] * 3,
    ]
    assert links.opened[0] == ("jetson", "jetson:7400")


def test_a_coordinator_that_tells_of_devices_without_end_takes_no_memory() -> None:
    links = Links()
    neighbours = Neighbours(links, LinkMeters())
    for number in range(1000):
        expect(neighbours, f"d{number}")
    for _ in range(1000):
        neighbours.open()
    assert len(links.opened) == 64
