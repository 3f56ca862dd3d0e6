"""Links and relaying, with wires that can stand still or break."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coordinator.dispatch.driving import chain, digest, job
from shoal_coordinator.dispatch.events import InstructionFailed
from shoal_coordinator.dispatch.instructions import Execute, Forward, Tier, Travel
from shoal_coordinator.server import exchange
from shoal_coordinator.server.deliveries import ByteBudget
from shoal_coordinator.server.exchange import DeviceLink, ExchangeHub
from shoal_coordinator.server.routes import MAXIMUM_PAIRS, Relay, RelayedPairs, Routes
from shoal_coordinator.server.wire import answer
from shoal_protocol.assembly import ActivationAssembler, ReceivedActivation
from shoal_protocol.bulk.link import OutboundActivation, Undelivered
from shoal_protocol.bulk.transport import Payload, Received, read_message
from shoal_protocol.frame_sizes import MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.frames import Frame, TransferError, acknowledgement, ping, split_frame
from shoal_protocol.tensors import ActivationKey, encode_activation
from shoal_protocol.units import nanoseconds
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, Activation, FrameHeader, Items


class Taker:
    """Takes every result and lets everything pass, unless a test says otherwise."""

    def __init__(self) -> None:
        self.taken: list[ReceivedActivation] = []
        self.items: list[tuple[str, bytes]] = []
        self.knows = True

    def admit(self, device: str, activation: Activation) -> None:
        if not self.knows:
            raise TransferError("unknown", outcome=Acknowledgement.STALE)

    def admit_relay(self, device: str, activation: Activation) -> None:
        self.admit(device, activation)

    async def take_items(self, device: str, items: Items, payload: Payload) -> None:
        self.items.append((device, items.ticket + await payload.read()))

    async def take(self, device: str, received: ReceivedActivation) -> None:
        self.taken.append(received)


class Wire:
    """A device's end of a link, and the transport between: what it sends, and what it gets."""

    frame_bytes = MAXIMUM_PAYLOAD_BYTES
    local = False

    def __init__(self, hub: ExchangeHub, device: str) -> None:
        self.sent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.got: asyncio.Queue[bytes] = asyncio.Queue()
        self.flows = asyncio.Event()
        self.flows.set()
        self.link = DeviceLink(device, hub, self)
        hub.links[device] = self.link
        self.serving = asyncio.create_task(self.link.run())

    def heard(self) -> int | None:
        """Nobody asks."""
        return None

    async def write(self, frames: Sequence[Frame]) -> None:
        await self.flows.wait()
        for frame in frames:
            self.got.put_nowait(bytes(frame))

    async def close(self) -> None:
        """Nothing to let go of."""

    async def received(self) -> AsyncIterator[Iterable[Received]]:
        while (frame := await self.sent.get()) is not None:
            yield read_message(frame)

    def send(self, *frames: bytes | Frame) -> None:
        for frame in frames:
            self.sent.put_nowait(bytes(frame))

    async def answer(self) -> tuple[int, Acknowledgement]:
        """The next acknowledgement that comes."""
        while True:
            header, _ = split_frame(await asyncio.wait_for(self.got.get(), 10))
            if header.WhichOneof("kind") == "acknowledgement":
                return header.transfer, header.acknowledgement

    async def receive(self) -> ReceivedActivation:
        """The next activation that comes whole; broken ones raise `TransferError`."""
        assembler = ActivationAssembler()
        while True:
            message = await asyncio.wait_for(self.got.get(), 10)
            if (received := assembler.feed(message)) is not None:
                return received

    async def disconnect(self) -> None:
        self.link.bulk.end("gone")
        await asyncio.gather(self.serving, return_exceptions=True)


def frames(device: str, transfer: int = 1, size: int = 1000) -> list[bytes]:
    key = ActivationKey(job="job", epoch=1, item=transfer, producer=0, consumer=1)
    array = np.full(size, transfer, np.uint8)
    return list(encode_activation(key, device, {"a": array}, transfer=transfer, frame_bytes=100))


@pytest.fixture
async def hub() -> ExchangeHub:
    return ExchangeHub(Taker())


async def test_a_relayed_transfer_arrives_untouched_and_its_answer_returns(
    hub: ExchangeHub,
) -> None:
    a, b = Wire(hub, "a"), Wire(hub, "b")
    for transfer in (7, 8):
        a.send(*frames("b", transfer))
        received = await b.receive()
        assert received.transfer == transfer - 6
        assert received.device == "b"
        np.testing.assert_array_equal(received.tensors["a"], np.full(1000, transfer, np.uint8))
        b.send(acknowledgement(received.transfer, Acknowledgement.BUSY, "later"))
        assert await a.answer() == (
            transfer,
            Acknowledgement(outcome=Acknowledgement.BUSY, message="later"),
        )
    assert hub.relayed_bytes == 2000
    await a.disconnect()
    await b.disconnect()


async def test_an_item_is_taken_and_not_answered(hub: ExchangeHub) -> None:
    a = Wire(hub, "a")
    header = FrameHeader(last=True)
    header.items.ticket = b"t"
    a.send(Frame(header.SerializeToString(), (b"abc",), 3), ping(3))
    assert [(await a.answer())[0]] == [3]
    assert hub.results.items == [("a", b"tabc")]  # type: ignore[attr-defined]
    await a.disconnect()


async def test_a_ping_is_answered_and_nobody_else_learns_of_it(hub: ExchangeHub) -> None:
    a = Wire(hub, "a")
    a.send(ping(3), *frames("", 4), ping(5))
    assert [(await a.answer())[0] for _ in range(3)] == [3, 4, 5]
    assert len(hub.results.taken) == 1  # type: ignore[attr-defined]
    await a.disconnect()


async def test_two_devices_that_relay_to_each_other_do_not_hold_each_other_up(
    hub: ExchangeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "FRAME_SECONDS", 0.1)
    a, b = Wire(hub, "a"), Wire(hub, "b")
    for wire, other in ((a, "b"), (b, "a")):
        wire.flows.clear()
        wire.send(*frames(other), *frames("", 2))
    # Nobody takes what is relayed: the readers give it up, and the results behind it arrive.
    taken = hub.results.taken  # type: ignore[attr-defined]
    async with asyncio.timeout(60):
        while len(taken) < 2:
            await asyncio.sleep(0.01)
    assert [received.key.item for received in taken] == [2, 2]
    await a.disconnect()
    await b.disconnect()


async def test_a_sender_that_breaks_off_spoils_only_its_own_transfer(hub: ExchangeHub) -> None:
    a, b, c = Wire(hub, "a"), Wire(hub, "b"), Wire(hub, "c")
    a.send(*frames("b")[:5])
    while hub.relayed_bytes < 500:
        await asyncio.sleep(0)
    await a.disconnect()
    c.send(*frames("b", 2))
    assembler = ActivationAssembler()
    outcomes: list[object] = []
    while len(outcomes) < 2:
        try:
            received = assembler.feed(await asyncio.wait_for(b.got.get(), 10))
        except TransferError as error:
            outcomes.append(error.outcome)
        else:
            if received is not None:
                outcomes.append(received.key.item)
    assert outcomes == [Acknowledgement.REFUSED, 2]
    await b.disconnect()
    await c.disconnect()


async def test_a_receiver_that_breaks_off_is_answered_for(hub: ExchangeHub) -> None:
    a, b = Wire(hub, "a"), Wire(hub, "b")
    b.flows.clear()
    a.send(*frames("b"), *frames("", 2))
    while not hub.relayed_bytes:
        await asyncio.sleep(0)
    await b.disconnect()
    number, answer = await a.answer()
    assert (number, answer.outcome) == (1, Acknowledgement.BUSY)
    assert (await a.answer())[1].outcome == Acknowledgement.ACCEPTED
    a.send(*frames("b", 3))
    number, answer = await a.answer()
    assert (number, answer.outcome) == (3, Acknowledgement.BUSY)
    del hub.links["b"]
    a.send(*frames("b", 4))
    number, answer = await a.answer()
    assert (number, answer.outcome) == (4, Acknowledgement.STALE)
    assert answer.message == "b is not connected"
    await a.disconnect()


async def test_what_nobody_waits_for_is_stale(hub: ExchangeHub) -> None:
    a = Wire(hub, "a")
    hub.results.knows = False  # type: ignore[attr-defined]
    a.send(*frames(""), *frames("a", 2))
    assert [await a.answer(), await a.answer()] == [
        (1, Acknowledgement(outcome=Acknowledgement.STALE, message="unknown")),
        (
            2,
            Acknowledgement(outcome=Acknowledgement.STALE, message="unknown"),
        ),
    ]
    assert hub.receiving_bytes == 0
    await a.disconnect()


async def test_results_beyond_what_memory_allows_are_asked_for_again(
    hub: ExchangeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "RESULT_BYTES", 1500)
    a, b = Wire(hub, "a"), Wire(hub, "b")
    first, *rest = frames("")
    a.send(first)
    while not hub.receiving_bytes:
        await asyncio.sleep(0)
    b.send(*frames("", 5))
    assert (await b.answer())[1].outcome == Acknowledgement.BUSY
    a.send(*rest)
    assert (await a.answer())[1].outcome == Acknowledgement.ACCEPTED
    b.send(*frames("", 6))
    assert (await b.answer())[1].outcome == Acknowledgement.ACCEPTED
    assert hub.receiving_bytes == 0
    await a.disconnect()
    await b.disconnect()


async def test_a_receiver_that_refuses_a_relayed_transfer_at_once_gets_the_next_one(
    hub: ExchangeHub,
) -> None:
    """What is still to come of the refused one must not hold its link up."""
    a, b, c = Wire(hub, "a"), Wire(hub, "b"), Wire(hub, "c")
    first, *rest = frames("b")
    a.send(first)
    header, _ = split_frame(await asyncio.wait_for(b.got.get(), 10))
    b.send(acknowledgement(header.transfer, Acknowledgement.BUSY, "full"))
    assert (await a.answer())[1].outcome == Acknowledgement.BUSY
    c.send(*frames("b", 2))
    assembler = ActivationAssembler()
    while True:
        received = None
        with contextlib.suppress(TransferError):  # the end of the refused one, without its start
            received = assembler.feed(await asyncio.wait_for(b.got.get(), 10))
        if received is not None:
            break
    assert received.key.item == 2
    a.send(*rest, *frames("", 3))
    b.send(acknowledgement(received.transfer))
    assert (await c.answer())[1].outcome == Acknowledgement.ACCEPTED
    assert await a.answer() == (3, Acknowledgement())
    for wire in (a, b, c):
        await wire.disconnect()


def test_pairs_that_are_relayed_are_forgotten_in_time_and_are_bounded() -> None:
    pairs = RelayedPairs()
    pairs.add("a", "b", nanoseconds(0))
    assert pairs.relayed("a", "b", nanoseconds(59))
    assert not pairs.relayed("b", "a", nanoseconds(59))
    assert not pairs.relayed("a", "b", nanoseconds(60))
    assert len(pairs) == 0
    for number in range(MAXIMUM_PAIRS + 100):
        pairs.add("a", str(number), nanoseconds(100))
        pairs.add("a", "often", nanoseconds(100))
    assert len(pairs) == MAXIMUM_PAIRS
    assert not pairs.relayed("a", "0", nanoseconds(100))
    assert pairs.relayed("a", "often", nanoseconds(100))


def some_routes(addresses: dict[str, str], relay: Relay = Relay.AUTO) -> Routes:
    sessions: Any = {
        name: SimpleNamespace(hello=pb.Hello(address=address), ticket_key=b"", since=5)
        for name, address in addresses.items()
    }
    return Routes(sessions, relay, named_peers=True)


def test_of_a_way_that_has_failed_the_hop_is_relayed_that_the_device_says() -> None:
    routes, now = some_routes({name: f"{name}:7400" for name in "abc"}), nanoseconds(0)
    travel = Travel(
        instruction=7, device="a", job="j", epoch=1, item=0, route=1, devices=("a", "b", "c")
    )
    failed = pb.Reply(instruction=7, failure=pb.Failure(code=pb.UNREACHABLE, message="it broke"))
    event = answer(failed, travel, "b", now)
    assert isinstance(event, InstructionFailed)
    assert event.failure.device == "b"
    routes.note(travel, event, now)
    assert (routes.relayed_from("a", now), routes.relayed_from("b", now)) == ([], ["c"])


def test_a_device_with_a_new_session_is_tried_directly_again() -> None:
    routes, now = some_routes({name: f"{name}:7400" for name in "abc"}), nanoseconds(0)
    forward = Forward(
        instruction=7, device="a", target="b", job="j", epoch=1, item=0, producer=0, consumer=1
    )
    for target in ("b", "c"):
        order = replace(forward, target=target)
        failed = pb.Reply(instruction=7, failure=pb.Failure(code=pb.UNREACHABLE))
        routes.note(order, answer(failed, order, "a", now), now)
    assert routes.relayed_from("a", now) == ["b", "c"]
    routes.joined("b")
    assert routes.relayed_from("a", now) == ["c"]


def test_what_was_given_before_a_session_says_nothing_of_it() -> None:
    """Its tickets were those of the one before."""
    routes, now = some_routes({name: f"{name}:7400" for name in "abc"}), nanoseconds(0)
    routed = ((1, "b"), (2, "c"))
    for number, relayed in ((4, []), (6, ["b"])):
        order = Execute(
            instruction=number,
            device="a",
            job="j",
            epoch=1,
            item=0,
            stage=0,
            digest=digest("a"),
            tier=Tier.RESIDENT,
            attempt=1,
            routes=routed,
        )
        executed = pb.Reply(instruction=number, executed=pb.Executed(delivered=[2]))
        routes.note(order, answer(executed, order, "a", now), now)
        assert routes.relayed_from("a", now) == relayed


def test_where_devices_have_certificates_none_is_sent_to_a_socket_without_any() -> None:
    """A device could have others open sockets of their own machines, and give data to whoever
    is there."""
    routes, now = some_routes({"a": "a:7400", "b": "unix:/run/theirs"}), nanoseconds(0)
    assert routes.address("a", "b", now) is None
    assert routes.address("b", "a", now) is not None
    assert routes.peers(("a", "b")) == ("a@a:7400",)


async def test_a_send_ends_with_the_link(hub: ExchangeHub) -> None:
    a = Wire(hub, "a")
    key = ActivationKey(job="job", epoch=1, item=1, producer=0, consumer=1)
    outbound = OutboundActivation(key=key, device="a", tensors={"a": np.zeros(9)})
    sending = asyncio.create_task(a.link.bulk.send(outbound))
    await a.receive()
    await a.disconnect()
    with pytest.raises(Undelivered, match="gone"):
        await sending
    with pytest.raises(Undelivered, match="gone"):
        await a.link.bulk.send(outbound)


async def test_bytes_in_flight_are_bounded_and_given_in_order() -> None:
    budget = ByteBudget(100)
    order: list[int] = []
    gates = [asyncio.Event() for _ in range(4)]

    async def hold(number: int, size: int) -> None:
        async with budget.reserve(size):
            order.append(number)
            await gates[number].wait()

    tasks = [asyncio.create_task(hold(n, size)) for n, size in enumerate((60, 60, 1000, 10))]
    await asyncio.sleep(0)
    assert (order, budget.used) == ([0], 60)
    tasks[1].cancel()
    gates[0].set()
    await asyncio.gather(tasks[0], tasks[1], return_exceptions=True)
    while len(order) < 2:
        await asyncio.sleep(0)
    # The large one is alone; the small one, which would fit nowhere before, comes after it.
    assert (order, budget.used) == ([0, 2], 100)
    gates[2].set()
    gates[3].set()
    await asyncio.gather(*tasks[2:])
    assert (order, budget.used) == ([0, 2, 3], 0)


def test_devices_are_told_whom_they_will_send_to_by_a_plan() -> None:
    """Not of themselves, not of those who cannot be reached, and not over links within a host."""
    addresses = {"a": "a:7400", "b": "b:7400", "c": "unix:/c", "d": "", "e": "e:7400"}
    routes = some_routes(addresses)
    homes = {"first": ("a", "b"), "next": ("b",), "last": ("c", "d", "e")}
    planned = job(chain(*homes, homes=homes))
    sent = dict(routes.introductions(planned, nanoseconds(0)))
    named = {name: list(message.neighbours.devices) for name, message in sent.items()}
    assert named == {
        "a": [pb.Neighbour(device="b", address="b:7400")],
        "b": [pb.Neighbour(device="e", address="e:7400")],
    }
    always = some_routes(addresses, Relay.ALWAYS)
    assert not list(always.introductions(planned, nanoseconds(0)))
