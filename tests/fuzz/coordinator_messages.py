"""What a device says to a coordinator that has a job for it."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from google.protobuf.message import DecodeError

from coordinator.dispatch.invariants import violations
from coordinator.scripted import put_model, submission, whole_model
from fuzz.logged_errors import no_logged_errors
from fuzz.scratch import empty_folder, event_loop, scratch_folder
from shoal_coordinator.dispatch.machine import Limits
from shoal_coordinator.server import wire
from shoal_coordinator.server.device_session import DeviceSession
from shoal_coordinator.server.driver import Driver
from shoal_coordinator.server.exchange import ExchangeHub
from shoal_coordinator.server.metrics import CoordinatorMetrics
from shoal_coordinator.server.routes import Relay
from shoal_coordinator.server.runs import open_run
from shoal_coordinator.server.sessions import Sessions
from shoal_coordinator.storage.job_records import CrashCount
from shoal_protocol import PROTOCOL
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.services import ConnectContext
from shoal_protocol.tensors import ActivationKey, encode_activation
from shoal_protocol.v1 import session_pb2 as pb

ROWS: Final = np.arange(4, dtype=np.float32).reshape(2, 1, 2)
TURNS: Final = 4
"""Of the event loop, between two messages."""
HANG_SECONDS: Final = 5


class Aborted(Exception):
    """The coordinator has ended the stream."""


class Stream:
    """A control stream without a network (a `ConnectContext`)."""

    def __init__(self) -> None:
        self.instructions: deque[pb.CoordinatorMessage] = deque()

    async def write(self, message: pb.CoordinatorMessage) -> None:
        self.instructions.extend(message.batch.messages or (message,))

    async def abort(self, code: object, reason: str) -> None:
        raise Aborted(reason)

    def peer(self) -> str:
        return "unix:"

    def auth_context(self) -> dict[str, Any]:
        return {}


Requests = Callable[[Stream], AsyncIterator[pb.AgentMessage]]


def serve(data: bytes) -> None:
    """Whatever a device says ends its session at most, and leaves the dispatcher's state whole."""
    try:
        batch = pb.AgentBatch.FromString(data)
    except DecodeError:
        return  # gRPC refuses it

    async def requests(_: Stream) -> AsyncIterator[pb.AgentMessage]:
        for message in batch.messages:
            yield message
            await _a_moment()

    with no_logged_errors():
        event_loop().run(_converse(requests))


def seeds() -> Iterable[bytes]:
    """What a device says that does all it is asked for; and one that also says all else."""
    for messages in ([], _unasked()):
        said = _Answers(messages)
        assert event_loop().run(_converse(said.requests)) == len(ROWS), "the job is done"
        yield pb.AgentBatch(messages=said.messages).SerializeToString()


async def _converse(requests: Requests) -> int:
    """One session, while there is a job; how many items have their results afterwards."""
    document, by_device = _document(), dict[str, DeviceSession]()
    driver = Driver(
        by_device,
        limits=Limits(),
        relay=Relay.AUTO,
        named_peers=False,
        task_seconds=60,
        metrics=_metrics(),
    )
    hub = ExchangeHub(driver.arrivals)
    sessions = Sessions(driver, hub, by_device, tls=False, expire=False, telemetry_seconds=60)
    request = submission(document, _inputs(), empty_folder("out"))
    run = open_run(request, document, 1, CrashCount(empty_folder("state") / "crashes"))
    driver.runs["job"] = run
    run.start(driver.feed, driver.fail)
    # What is prefetched must not depend on how fast its thread is.
    while run.prefetch.cached(0, ["x"]) is None:
        await asyncio.sleep(0)
    spec = wire.job_spec(request, document, items=len(ROWS), epoch=1, deadline=None)
    driver.submit(spec, frozenset(), {})
    stream = Stream()
    with contextlib.suppress(Aborted):
        async with asyncio.timeout(HANG_SECONDS):
            await sessions.connect(requests(stream), cast(ConnectContext, stream))
    await driver.deliveries.close()
    await run.close(complete=False)
    assert not driver.broken.done(), driver.broken.exception()
    assert not violations(driver.state), violations(driver.state)
    return len(list(Path(request.outputs_uri).glob("*.npz")))


async def _a_moment() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


@cache
def _metrics() -> CoordinatorMetrics:
    return CoordinatorMetrics()


@cache
def _document() -> PartitionDocument:
    return put_model(scratch_folder() / "store")


@cache
def _inputs() -> Path:
    folder = empty_folder("rows")
    for number, row in enumerate(ROWS):
        np.save(folder / f"{number}.npy", row)
    return folder


# ---- seeds -------------------------------------------------------------------------------------


class _Answers:
    """A device that answers; `messages` are all that it said, which begins with `first`."""

    def __init__(self, unasked: list[pb.AgentMessage]) -> None:
        hello = pb.Hello(protocol=PROTOCOL, device="pi-4", incarnation=1, budget_bytes=10_000)
        self.messages = [pb.AgentMessage(hello=hello), *unasked]

    async def requests(self, stream: Stream) -> AsyncIterator[pb.AgentMessage]:
        for message in self.messages:
            yield message
        for _ in range(1000):  # turns of the loop; then there is nothing more to do
            await asyncio.sleep(0.0005)
            while stream.instructions:
                if (answer := _answer(stream.instructions.popleft())) is not None:
                    self.messages.append(answer)
                    yield answer


def _answer(message: pb.CoordinatorMessage) -> pb.AgentMessage | None:
    match message.WhichOneof("message"):
        case "load":
            reply = pb.Reply(
                instruction=message.load.instruction, loaded=pb.Loaded(resident_bytes=999)
            )
        case "unload":
            reply = pb.Reply(instruction=message.unload.instruction, unloaded=pb.Unloaded())
        case "prefetch":
            reply = pb.Reply(instruction=message.prefetch.instruction, prefetched=pb.Prefetched())
        case "execute":
            executed = pb.Executed(compute_seconds=0.001, result_frame=_results(message.execute))
            reply = pb.Reply(instruction=message.execute.instruction, executed=executed)
        case _:
            return None
    return pb.AgentMessage(reply=reply)


def _results(order: pb.Execute) -> bytes:
    if not order.results:
        return b""
    task = order.task
    key = ActivationKey(
        job=task.job, epoch=task.epoch, item=task.item, producer=task.stage, consumer=-1
    )
    whole = whole_model(ROWS[task.item])
    tensors = {name: whole[name] for name in order.results}
    return b"".join(encode_activation(key, "", tensors, transfer=0))


def _unasked() -> list[pb.AgentMessage]:
    digest = _document().fragments[0].digest
    telemetry = pb.Telemetry(
        cpu_fraction=0.5,
        memory_available_bytes=1 << 30,
        temperature_celsius=50,
        battery_fraction=1,
        round_trip_seconds=0.01,
    )
    resident = pb.ResidentFragment(digest=digest, resident_bytes=1 << 19)
    failure = pb.Failure(code=pb.BUDGET, message="no", need_bytes=2, have_bytes=1)
    return [
        pb.AgentMessage(telemetry=telemetry),
        pb.AgentMessage(telemetry=pb.Telemetry(budget_bytes=1 << 20, resident=[resident])),
        pb.AgentMessage(evicted=pb.Evicted(digest=digest, reason="room")),
        pb.AgentMessage(probe_reply=pb.ProbeReply(nonce=1)),
        pb.AgentMessage(reply=pb.Reply(instruction=77, failure=failure)),
    ]
