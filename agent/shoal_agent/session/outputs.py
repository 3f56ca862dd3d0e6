"""The outputs of tasks: results go up with the reply or before it, activations along the routes
that are known when the task ends, and kept ones when the coordinator names a route later.

Everything that leaves takes memory until it has left: the ledger is asked first.
"""

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager

from shoal_agent.execution.values import Made
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.runtime.results import RunResult
from shoal_agent.session.answers import failure, failure_of
from shoal_agent.telemetry.counters import Counters
from shoal_agent.telemetry.machine import steady_nanoseconds
from shoal_agent.transport.activations import ActivationStore
from shoal_protocol.bulk.link import OutboundActivation, Undelivered
from shoal_protocol.frame_sizes import frame_bytes
from shoal_protocol.tensors import (
    MODEL,
    ActivationKey,
    Array,
    UnsupportedTensor,
    encode_activation,
    memory_bytes,
)
from shoal_protocol.units import Nanoseconds, seconds
from shoal_protocol.v1 import session_pb2 as pb

Deliver = Callable[[OutboundActivation, str], Awaitable[int]]
"""Send to a peer, or with no address through the coordinator; raises `Undelivered`."""


class Outputs:
    """The outgoing half of one session's tasks."""

    def __init__(
        self,
        device: str,
        fragments: Fragments,
        store: ActivationStore,
        deliver: Deliver,
        counters: Counters,
    ) -> None:
        self._device = device
        self._fragments = fragments
        self._store = store
        self._deliver = deliver
        self._counters = counters
        self._one_by_one = asyncio.Lock()

    async def keep(
        self, task: Made, message: pb.Execute, outputs: dict[str, Array]
    ) -> tuple[str, ...]:
        """Keep what later stages need; the names. Raises `SpillFull`, `OSError`."""
        names = tuple(message.kept)
        if not names:
            routed = {name for route in message.routes for name in route.tensors}
            results = set(message.results)
            names = tuple(name for name in outputs if name not in results or name in routed)
        kept = {name: outputs[name] for name in names if name in outputs}
        if kept:
            await self._store.put(task, kept)
            if not self._store.in_memory(task):  # nor here any more: the next run has their memory
                outputs.update(self._store.get(task) or {})
        return tuple(kept)

    @contextmanager
    def room(
        self, task: Made, message: pb.Execute, outputs: Mapping[str, Array], kept: Iterable[str]
    ) -> Iterator[bool]:
        """Room for a task's outputs until they are delivered.

        False: they lie in their fragment's share of the budget, so nothing may run meanwhile.
        """
        settled = frozenset(kept if self._store.in_memory(task) else ())
        size = _leaving_bytes(message, self._device, outputs, settled)
        room = self._fragments.request_move(size)
        if not room:
            self._fragments.hold(message.digest)
        try:
            yield room
        finally:
            if room:
                self._fragments.end_move(size)
            else:
                self._fragments.release(message.digest)

    async def hand_on(self, task: Made, message: pb.Execute, result: RunResult) -> pb.Reply:
        """Send results up and activations along the routes that are known; the reply."""
        asked = [name for route in message.routes for name in route.tensors] + list(message.results)
        unknown = sorted(set(asked) - result.outputs.keys())
        if unknown:
            text = f"the fragment makes no output {unknown[0]}"
            return pb.Reply(failure=failure(pb.RUNTIME, text))
        # What is kept may be on disk by now; then it is sent from there. Only what is sent stays.
        output_bytes = sum(array.nbytes for array in result.outputs.values())
        kept = self._store.get(task) or {}
        outputs = {name: array for name, array in result.outputs.items() if name in asked}
        outputs.update(kept)
        remote = [route for route in message.routes if route.device != self._device]
        frame = _result_frame(task, message, result.outputs)
        ways = [*remote]
        if message.results and not frame:
            ways.append(pb.Route(consumer=MODEL, tensors=message.results))
        settle = self._store.settling(task) if kept else None
        work = [
            self._deliver(_outbound(task, way, outputs, settle, lossy=message.lossy), way.address)
            for way in ways
        ]
        result.outputs.clear()
        answers = await _all_delivered(work)
        if len(ways) > len(remote) and (lost := answers.pop()) is not None:
            return pb.Reply(failure=failure_of(lost))
        self._counters.sent_bytes += len(frame)
        missed = {
            route.consumer
            for route, answer in zip(remote, answers, strict=True)
            if answer is not None
        }
        reply = pb.Reply()  # filled in place: a message that is given to another is copied
        executed = reply.executed
        executed.compute_seconds = result.compute_seconds
        executed.processor_seconds = result.processor_seconds
        if (usual := self._fragments.processor.times.read(message.digest)) is not None:
            executed.task_seconds = usual
        executed.within.extend(self._fragments.processor.times.within(message.digest))
        executed.output_bytes = output_bytes
        executed.peak_bytes = result.peak_bytes
        executed.batch = result.batch
        executed.delivered.extend(r.consumer for r in message.routes if r.consumer not in missed)
        executed.result_frame = frame
        return reply

    async def forward(self, message: pb.Forward) -> pb.Reply:
        """Send a kept activation on; the answer."""
        key = made(message.task)
        with self._store.lend(key) as held:
            if held is None or not set(message.route.tensors) <= held.keys():
                text = f"stage {key.stage} of item {key.item} is not kept here"
                reply = pb.Reply(failure=failure(pb.MISSING_ACTIVATION, text))
            else:
                reply = await self._send_kept(key, message, held)
        reply.instruction = message.instruction
        return reply

    async def _send_kept(
        self, task: Made, message: pb.Forward, held: Mapping[str, Array]
    ) -> pb.Reply:
        began, route = steady_nanoseconds(), message.route
        settle = self._store.settling(task)
        outbound = _outbound(task, route, held, settle, lossy=message.lossy)
        size = sum(map(memory_bytes, outbound.tensors.values()))
        needed = frame_bytes(size) + (0 if settle is None else size)
        sent_bytes = 0
        try:
            if route.device != self._device:
                async with self._room_to_send(needed):
                    sent_bytes = await self._deliver(outbound, route.address)
        except Undelivered as error:
            return pb.Reply(failure=failure_of(error))
        spent = seconds(Nanoseconds(steady_nanoseconds() - began))
        return pb.Reply(forwarded=pb.Forwarded(sent_bytes=sent_bytes, seconds=spent))

    @asynccontextmanager
    async def _room_to_send(self, size: int) -> AsyncIterator[None]:
        """Room for what is sent on. Where there is none, one at a time is sent without: otherwise
        nothing would ever leave a device that is full of fragments."""
        if self._fragments.request_move(size):
            try:
                yield
            finally:
                self._fragments.end_move(size)
        else:
            async with self._one_by_one:
                yield


def _leaving_bytes(
    message: pb.Execute, device: str, outputs: Mapping[str, Array], settled: frozenset[str]
) -> int:
    """What a task's outputs take on their way, with their frames; `settled` have places already."""
    ways = [list(route.tensors) for route in message.routes if route.device != device]
    ways.append(list(message.results))
    sizes = {name: memory_bytes(array) for name, array in outputs.items()}
    leaving = {name for way in ways for name in way} - settled
    frames = sum(frame_bytes(sum(sizes.get(name, 0) for name in way)) for way in ways)
    return frames + sum(sizes.get(name, 0) for name in leaving)


def _outbound(
    task: Made,
    way: pb.Route,
    outputs: Mapping[str, Array],
    settle: Callable[[], None] | None,
    *,
    lossy: bool,
) -> OutboundActivation:
    return OutboundActivation(
        key=_edge(task, way.consumer),
        device=way.device,
        tensors={name: outputs[name] for name in way.tensors},
        lossy=lossy,
        ticket=way.ticket,
        settle=settle,
    )


def _result_frame(task: Made, message: pb.Execute, outputs: Mapping[str, Array]) -> bytes:
    """The results as the one frame that goes with the reply; empty where they are too large."""
    tensors = {name: outputs[name] for name in message.results}
    if not tensors or sum(array.nbytes for array in tensors.values()) > message.reply_bytes:
        return b""
    try:
        encoded = encode_activation(_edge(task, MODEL), "", tensors, transfer=0)
    except UnsupportedTensor:
        return b""  # sending it on the bulk stream fails with the reason
    return next(iter(encoded)) if encoded.encoded_bytes <= message.reply_bytes else b""


async def _all_delivered(work: Sequence[Awaitable[int]]) -> list[Undelivered | None]:
    """For each: None, or why not. One alone, as in every chain, needs no task of its own."""
    if len(work) == 1:
        return [await _delivered(work[0])]
    return await asyncio.gather(*map(_delivered, work)) if work else []


async def _delivered(work: Awaitable[int]) -> Undelivered | None:
    try:
        await work
    except Undelivered as error:
        return error
    return None


def _edge(task: Made, consumer: int) -> ActivationKey:
    """The key of what a task sends to a consumer."""
    return ActivationKey(
        job=task.job, epoch=task.epoch, item=task.item, producer=task.stage, consumer=consumer
    )


def made(task: pb.Task) -> Made:
    """A task's name as the queue has it."""
    return Made(task.job, task.epoch, task.item, task.stage)
