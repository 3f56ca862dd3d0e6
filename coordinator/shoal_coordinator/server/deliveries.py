"""The model's inputs on their way to devices: read when a task wants them, bounded in bytes, sent
again while the device says BUSY. What cannot be delivered is told to the dispatcher."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Final

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.server.exchange import ExchangeLink, LinkBroken
from shoal_coordinator.server.runs import JobRun
from shoal_coordinator.server.sessions import DeviceSession
from shoal_coordinator.storage.inputs import InputUnsuitable
from shoal_protocol.codecs import LinkCodec
from shoal_protocol.partition import MODEL
from shoal_protocol.tensors import (
    ActivationKey,
    Array,
    EncodedActivation,
    UnsupportedTensor,
    encode_activation,
)
from shoal_protocol.v1 import tensors_pb2 as pb
from shoal_protocol.v1.session_pb2 import Cancel, CoordinatorMessage
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

logger = logging.getLogger(__name__)

BYTES_IN_FLIGHT: Final = 1 << 28
"""Inputs of all devices together; one alone may be larger."""
BUSY_SECONDS: Final = 60.0
LINK_SECONDS: Final = 10.0
_ENCODE_IN_THREAD_FROM_BYTES: Final = 64 << 10

Undeliverable = Callable[[DeviceSession, ins.Execute, ev.Failure], None]
Unreadable = Callable[[ins.Execute, ev.Failure], None]


class ByteBudget:
    """Room for bytes in flight, given in the order asked for."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used = 0

    @contextlib.asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[None]:
        """Hold room while the context lasts; what is larger than all of it waits to be alone."""
        size = min(size, self._limit)
        if self._waiting or self.used + size > self._limit:
            granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, granted))
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._give_back(size)
                raise
        else:
            self.used += size
        try:
            yield
        finally:
            self._give_back(size)

    def _give_back(self, size: int) -> None:
        self.used -= size
        while self._waiting:
            size, granted = self._waiting[0]
            if not granted.cancelled():
                if self.used + size > self._limit:
                    return
                self.used += size
                granted.set_result(None)
            self._waiting.popleft()


class Deliveries:
    """Everything that is on its way, by instruction."""

    def __init__(self, undeliverable: Undeliverable, unreadable: Unreadable) -> None:
        self._undeliverable = undeliverable
        self._unreadable = unreadable
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.budget = ByteBudget(BYTES_IN_FLIGHT)

    def inline(self, order: ins.Execute, run: JobRun) -> bytes:
        """A task's inputs as the one frame that goes with its message; empty: `start` is needed."""
        arrays = run.prefetched(order.item, run.wires[order.stage].model_inputs)
        if arrays is None:
            return b""
        try:
            (frame,) = _encoded(order, run, arrays, pb.NONE)
        except UnsupportedTensor:
            return b""
        return frame

    def start(self, session: DeviceSession, order: ins.Execute, run: JobRun) -> None:
        """Bring a task's inputs to its device."""
        task = asyncio.create_task(self._deliver(session, order, run))
        self._tasks[order.instruction] = task
        task.add_done_callback(lambda _: self._tasks.pop(order.instruction, None))

    def cancel(self, instruction: int) -> None:
        """The instruction is answered, or void."""
        if (task := self._tasks.get(instruction)) is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _deliver(self, session: DeviceSession, order: ins.Execute, run: JobRun) -> None:
        names = run.wires[order.stage].model_inputs
        kind, reason = ev.FailureKind.MISSING_ACTIVATION, ""
        try:
            async with self.budget.reserve(run.inputs.item_bytes(order.item)):
                arrays = await run.read(order.item, names)
                async with asyncio.timeout(LINK_SECONDS):
                    await session.linked.wait()
                assert session.link is not None
                answer = await self._send(session.link, order, run, arrays)
        except (InputUnsuitable, UnsupportedTensor) as error:
            kind, reason = ev.FailureKind.INVALID_INPUT, str(error)
        except TimeoutError:
            reason = f"{session.device} opened no bulk stream within {LINK_SECONDS:g} s"
        except LinkBroken as error:
            reason = str(error)
        except Exception as error:  # inputs come from strangers: one item fails, nothing else
            logger.exception("inputs of %s, item %d", order.job, order.item)
            place = run.inputs.place(order.item)
            kind, reason = ev.FailureKind.INVALID_INPUT, f"{place}: cannot be sent: {error!r}"
        else:
            match answer.outcome:
                case Acknowledgement.ACCEPTED:
                    return
                case Acknowledgement.REFUSED:
                    kind = ev.FailureKind.INVALID_INPUT
                    reason = f"{run.inputs.place(order.item)}: refused by {session.device}: "
                case _:
                    reason = f"{session.device} did not take the inputs: "
            reason += answer.message
        failure = ev.Failure(kind=kind, message=reason)
        if kind is ev.FailureKind.INVALID_INPUT:
            self._unreadable(order, failure)
        elif session.given.pop(order.instruction, None) is not None:
            # The device waits for what will not come; it is to forget the task before it hears of
            # the next try.
            session.tell(CoordinatorMessage(cancel=Cancel(instruction=order.instruction)))
            self._undeliverable(session, order, failure)

    async def _send(
        self, link: ExchangeLink, order: ins.Execute, run: JobRun, arrays: dict[str, Array]
    ) -> Acknowledgement:
        encoded = await _encode(link.codec, order, run, arrays)
        started, delay = perf_counter(), 0.02
        while True:
            begun = perf_counter()
            answer = await link.send(lambda number: replace(encoded, transfer=number))
            if answer.outcome == Acknowledgement.ACCEPTED:
                link.codec.observe_transfer(encoded.encoded_bytes, perf_counter() - begun)
            late = perf_counter() - started > BUSY_SECONDS
            if answer.outcome != Acknowledgement.BUSY or late:
                return answer
            await asyncio.sleep(delay)
            delay = min(1.0, 2 * delay)


async def _encode(
    codec: LinkCodec, order: ins.Execute, run: JobRun, arrays: dict[str, Array]
) -> EncodedActivation:
    speed = codec.bytes_per_second
    plain = speed is None or speed >= LinkCodec.FAST_BYTES_PER_SECOND
    size = sum(array.nbytes for array in arrays.values())
    if plain or size < _ENCODE_IN_THREAD_FROM_BYTES:
        return _encoded(order, run, arrays, codec)
    return await asyncio.to_thread(_encoded, order, run, arrays, codec)


def _encoded(
    order: ins.Execute, run: JobRun, arrays: Mapping[str, Array], codec: pb.Codec | LinkCodec
) -> EncodedActivation:
    return encode_activation(
        ActivationKey(
            job=order.job,
            epoch=order.epoch,
            item=order.item,
            producer=MODEL,
            consumer=order.stage,
        ),
        order.device,
        arrays,
        transfer=0,
        codec=codec,
        lossy=run.lossy,
        bfloat16=run.bfloat16,
    )
