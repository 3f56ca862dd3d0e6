"""The model's inputs on their way to devices: read when a task needs them, bounded in bytes. The
dispatcher gets an event for what cannot be delivered."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Final

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.server.device_session import DeviceSession
from shoal_coordinator.server.task_results import Run
from shoal_coordinator.storage.inputs import InputUnsuitable
from shoal_protocol.bulk.link import OutboundActivation, Undelivered
from shoal_protocol.partition import MODEL
from shoal_protocol.tensors import ActivationKey, Array, UnsupportedTensor, encode_activation
from shoal_protocol.v1.session_pb2 import Cancel, CoordinatorMessage
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

logger = logging.getLogger(__name__)

BYTES_IN_FLIGHT: Final = 1 << 28
"""Inputs of all devices together; one alone may be larger."""
LINK_SECONDS: Final = 10.0
"""How long a device may take to open its bulk stream."""

Failed = Callable[[ins.Execute, ev.Failure], None]
"""Receives a task whose inputs cannot be read (INVALID_INPUT), or did not reach its device."""


class ByteBudget:
    """Room for bytes in flight, given in the order asked for."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self.used = 0

    @contextlib.asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[None]:
        """Hold room while the context lasts; what is larger than all of it waits to be alone."""
        size = min(size, self._limit)
        async with self._turn:
            while self.used + size > self._limit:
                self._freed.clear()
                await self._freed.wait()
            self.used += size
        try:
            yield
        finally:
            self.used -= size
            self._freed.set()


class Deliveries:
    """Everything that is on its way, by instruction."""

    def __init__(self, failed: Failed) -> None:
        self._failed = failed
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.budget = ByteBudget(BYTES_IN_FLIGHT)

    def inline(self, order: ins.Execute, run: Run) -> bytes:
        """A task's inputs as the one frame that goes with its message; empty: `start` is needed."""
        try:
            arrays = run.cached(order.item, run.wires[order.stage].model_inputs)
            if arrays is None:
                return b""
            (frame,) = encode_activation(
                _key(order), order.device, arrays, transfer=0, bfloat16=run.bfloat16
            )
        except Exception:  # the ordinary delivery meets it again, and refuses the item
            logger.debug("inputs of %s, item %d", order.job, order.item, exc_info=True)
            return b""
        return frame

    def start(self, session: DeviceSession, order: ins.Execute, run: Run) -> None:
        self._begin(order.instruction, self._deliver(session, order, run))

    def read(
        self,
        order: ins.Travel,
        run: Run,
        names: Iterable[str],
        then: Callable[[ins.Travel, dict[str, Array]], None],
        failed: Callable[[ins.Travel, str], None],
    ) -> None:
        """Have the inputs of an item that travels read."""

        async def read() -> None:
            try:
                async with self.budget.reserve(run.item_bytes(order.item)):
                    then(order, await run.read(order.item, names))
            except Exception as error:  # its tasks meet it again, and refuse the item
                logger.debug("inputs of %s, item %d", order.job, order.item, exc_info=True)
                failed(order, str(error))

        self._begin(order.instruction, read())

    def _begin(self, instruction: int, work: Coroutine[None, None, None]) -> None:
        task = self._tasks[instruction] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(instruction, None))

    def cancel(self, instruction: int) -> None:
        """The instruction is answered, or void."""
        if (task := self._tasks.get(instruction)) is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _deliver(self, session: DeviceSession, order: ins.Execute, run: Run) -> None:
        try:
            async with self.budget.reserve(run.item_bytes(order.item)):
                arrays = await run.read(order.item, run.wires[order.stage].model_inputs)
                async with asyncio.timeout(LINK_SECONDS):
                    await session.linked.wait()
                assert session.link is not None
                link = session.link.bulk
                outbound = OutboundActivation(
                    key=_key(order),
                    device=order.device,
                    tensors=arrays,
                    lossy=run.lossy,
                    bfloat16=run.bfloat16,
                )
                await link.send(outbound)
            return
        except (InputUnsuitable, UnsupportedTensor) as error:
            kind, reason = ev.FailureKind.INVALID_INPUT, str(error)
        except TimeoutError:
            kind = ev.FailureKind.MISSING_ACTIVATION
            reason = f"{session.device} opened no bulk stream within {LINK_SECONDS:g} s"
        except Undelivered as error:
            if session.link is not None and session.link.bulk is link and link.broken is not None:
                # The device is lost, and the task with it: that is no failed try.
                session.end(f"the bulk stream broke: {error}")
                return
            kind, reason = _undelivered(error, session.device, run.place(order.item))
        except Exception as error:  # inputs come from strangers: one item fails, nothing else
            logger.exception("inputs of %s, item %d", order.job, order.item)
            place = run.place(order.item)
            kind, reason = ev.FailureKind.INVALID_INPUT, f"{place}: cannot be sent: {error!r}"
        failure = ev.Failure(kind=kind, message=reason)
        if kind is ev.FailureKind.INVALID_INPUT:
            self._failed(order, failure)
        elif session.unanswered.pop(order.instruction, None) is not None:
            # The device waits for what will not come; it must forget the task before it gets the
            # next try.
            session.send(CoordinatorMessage(cancel=Cancel(instruction=order.instruction)))
            self._failed(order, failure)


def _undelivered(error: Undelivered, device: str, place: str) -> tuple[ev.FailureKind, str]:
    """Whose fault it is that inputs were not taken, and what to say."""
    match error.outcome:
        case None:
            return ev.FailureKind.MISSING_ACTIVATION, str(error)
        case Acknowledgement.REFUSED:
            return ev.FailureKind.INVALID_INPUT, f"{place}: refused by {device}: {error}"
        case Acknowledgement.BUSY:
            return ev.FailureKind.DISK_FULL, f"{device} had no room for the inputs: {error}"
        case _:
            text = f"{device} did not take the inputs: {error}"
            return ev.FailureKind.MISSING_ACTIVATION, text


def _key(order: ins.Execute) -> ActivationKey:
    return ActivationKey(
        job=order.job, epoch=order.epoch, item=order.item, producer=MODEL, consumer=order.stage
    )
