"""What a coordinator says to an agent that has a fragment in its cache."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from time import monotonic
from typing import Any, Final, cast

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from agent.fragment_making import MadeFragment, dense_model, write_fragment
from fuzz.logged_errors import no_logged_errors
from fuzz.scratch import empty_folder, event_loop
from shoal_agent.cache.disk import FragmentCache
from shoal_agent.cache.fetching import Fetcher
from shoal_agent.memory.residency import Ledger
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.runtime.processor import Processor
from shoal_agent.session.control import Session
from shoal_agent.session.greeting import SessionBroken
from shoal_agent.telemetry.counters import Counters
from shoal_agent.telemetry.link import LinkMeters
from shoal_agent.transport.activations import ActivationStore
from shoal_agent.transport.links import PeerLink, PeerLinks
from shoal_agent.transport.shaping import Uplink
from shoal_protocol.bulk.link import Undelivered
from shoal_protocol.services import SessionClient
from shoal_protocol.tensors import ActivationKey, encode_activation
from shoal_protocol.units import Bytes
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest

MIB: Final = 1 << 20
BUDGET: Final = Bytes(64 * MIB)
NAME: Final = "pi-4"
ANSWERED: Final = ("load", "unload", "prefetch", "execute", "forward", "plan")
HANG_SECONDS: Final = 5
ANSWER_SECONDS: Final = 0.01
"""For how long the next instruction waits for the answer to the last one."""
NEED: Final = 8 * MIB
TEXT: Final = np.array([["a", "bc", ""]], object)
"""Not what the fragment takes."""


def serve(data: bytes) -> None:
    """Whatever a coordinator says ends the session at most, and the next one begins clean."""
    try:
        batch = pb.CoordinatorBatch.FromString(data)
    except DecodeError:
        return  # gRPC refuses it
    with no_logged_errors():
        event_loop().run(_converse(batch.messages, ANSWER_SECONDS))


async def _converse(
    messages: Iterable[pb.CoordinatorMessage], answer_seconds: float
) -> list[pb.Reply]:
    """One session of a device that has its fragment in memory; what it answered."""
    device, client = _device(), _Client(messages, answer_seconds)
    async with asyncio.timeout(HANG_SECONDS):
        await device.fragments.load(_fragment().digest, NEED, [])
        with contextlib.suppress(SessionBroken):
            session = Session(device, cast(SessionClient, client), 60, device.open_store())
            await session.run(lambda: None)
    device.fragments.buffers.give_back()
    assert not device.fragments.ledger.reserved, "what a session had is returned"
    return client.replies


class _Client:
    """The calls to a coordinator that says `messages` (a `SessionClient`)."""

    def __init__(self, messages: Iterable[pb.CoordinatorMessage], answer_seconds: float) -> None:
        self._messages = messages
        self._answer_seconds = answer_seconds
        self._said: list[pb.AgentMessage] = []

    @property
    def replies(self) -> list[pb.Reply]:
        """What the agent has answered."""
        return [each.reply for each in self._said if each.HasField("reply")]

    def connect(self) -> "_Call":
        return _Call(self._control(), self._said)

    def exchange(self, device: str) -> "_Call":
        return _Call(_silence(), [])

    def fetch_fragment(self, request: FetchFragmentRequest, timeout: float) -> "_Call":
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata(), "not here"
        )

    async def _control(self) -> AsyncIterator[pb.CoordinatorMessage]:
        yield pb.CoordinatorMessage(welcome=pb.Welcome(session=1, ticket_key=bytes(32)))
        for message in self._messages:
            yield message
            if message.WhichOneof("message") in ANSWERED:
                replies, until = len(self.replies), monotonic() + self._answer_seconds
                while len(self.replies) == replies and monotonic() < until:
                    await asyncio.sleep(0)


class _Call:
    """One stream of it."""

    def __init__(self, incoming: AsyncIterator[Any], said: list[Any]) -> None:
        self._incoming = incoming
        self._said = said

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._incoming

    async def write(self, message: Any) -> None:
        if isinstance(message, pb.AgentMessage):
            self._said.extend(message.batch.messages or (message,))

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    async def details(self) -> str:
        return ""

    def cancel(self) -> None:
        """Nothing holds it."""


async def _silence() -> AsyncIterator[bytes]:
    await asyncio.get_running_loop().create_future()
    yield b""


class _NoPeers(PeerLinks):
    """The addresses that are fuzzed are not dialled."""

    def link(self, device: str, address: str) -> PeerLink:
        raise Undelivered("nobody is there")


class _Device:
    """An agent (a `Device`) with a fragment in its cache."""

    name = NAME
    largest_budget_bytes = BUDGET

    def __init__(self) -> None:
        cache = FragmentCache(_fragment().folder.parents[1], 1 << 30)
        processor, runtime = _processor()
        self.uplink = Uplink()
        self.link_meters = LinkMeters()
        self.counters = Counters()
        self.links: PeerLinks = _NoPeers(None, self.uplink, self.counters, insecure=False)
        self.fragments = Fragments(
            ledger=Ledger(budget=BUDGET),
            cache=cache,
            fetcher=Fetcher(cache, lambda *_: None, self.uplink.depart),
            runtime=runtime,
            processor=processor,
            counters=self.counters,
            on_evicted=lambda *_: None,
        )

    def hello(self) -> pb.Hello:
        return pb.Hello(device=NAME, budget_bytes=BUDGET)

    def resident(self) -> list[pb.ResidentFragment]:
        return []

    def telemetry(self) -> pb.Telemetry:
        return pb.Telemetry()

    def open_store(self) -> ActivationStore:
        return ActivationStore(
            empty_folder("spill"), 4 * MIB, self.fragments, self.fragments.buffers
        )


@cache
def _device() -> _Device:
    return _Device()


@cache
def _processor() -> tuple[Processor, Runtime]:
    meter, executor = MemoryMeter(), ThreadPoolExecutor(1, "processor")
    runtime = executor.submit(Runtime, meter, threads=1, limit_bytes=BUDGET).result()
    executor.submit(meter.settle).result()
    return Processor(runtime, executor), runtime


@cache
def _fragment() -> MadeFragment:
    return write_fragment(empty_folder("cache"), dense_model([8, 8]), NEED)


# ---- seeds -------------------------------------------------------------------------------------


def seeds() -> Iterable[bytes]:
    """All instructions, in an order in which they work."""
    messages = _instructions(np.ones((1, 8), np.float32))
    replies = event_loop().run(_converse(messages, HANG_SECONDS))
    done = {reply.instruction for reply in replies if not reply.HasField("failure")}
    assert done == {1, 2, 3, 6}, replies
    yield pb.CoordinatorBatch(messages=messages).SerializeToString()
    for message in messages:
        yield pb.CoordinatorBatch(messages=[messages[0], message]).SerializeToString()
    yield pb.CoordinatorBatch(messages=_instructions(TEXT)).SerializeToString()


def _instructions(x: np.ndarray) -> list[pb.CoordinatorMessage]:
    digest = _fragment().digest
    task = pb.Task(job="job", epoch=1, item=0, stage=1)
    key = ActivationKey(job="job", epoch=1, item=0, producer=-1, consumer=1)
    (frame,) = encode_activation(key, NAME, {"x": x}, transfer=0)
    route = pb.Route(consumer=2, device="nano", address="unix:/nowhere", tensors=["y"])
    execute = pb.Execute(
        instruction=3,
        task=task,
        digest=digest,
        inputs=[pb.InputSource(producer=-1, tensors=["x"])],
        results=["y"],
        kept=["y"],
        deadline_seconds=5,
        reply_bytes=1000,
        input_frame=frame,
    )
    plan = pb.Plan(
        instruction=2,
        job="job",
        epoch=1,
        ticket=bytes(16),
        steps=[pb.Step(digest=digest, inputs=["x"])],
        sends=["y"],
        next_ticket=bytes(16),
    )
    absent = "sha256:" + "0" * 64
    return [
        pb.CoordinatorMessage(
            load=pb.Load(instruction=1, digest=digest, resident_bytes=NEED, peers=["a@unix:/b"])
        ),
        pb.CoordinatorMessage(probe=pb.Probe(nonce=1)),
        pb.CoordinatorMessage(plan=plan),
        pb.CoordinatorMessage(execute=execute),
        pb.CoordinatorMessage(forward=pb.Forward(instruction=4, task=task, route=route)),
        pb.CoordinatorMessage(peer_lost=pb.PeerLost(device="nano")),
        pb.CoordinatorMessage(release=pb.Release(tasks=[task])),
        pb.CoordinatorMessage(prefetch=pb.Prefetch(instruction=5, digest=absent)),
        pb.CoordinatorMessage(cancel=pb.Cancel(job="job", epoch=2)),
        pb.CoordinatorMessage(cancel=pb.Cancel(instruction=3)),
        pb.CoordinatorMessage(unload=pb.Unload(instruction=6, digest=digest)),
    ]
