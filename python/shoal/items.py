"""The items of one model, over one call to the coordinator.

A coordinator that ends is started again by the pool's supervisor. The call is then opened anew, and
the items without an answer are sent again; each of them gets one answer. Items are in memory until
then.
"""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Final

import grpc
import numpy as np

from shoal.calls import Call, CallEnded, Calls
from shoal.errors import ItemFailed, ModelFailed, PoolClosed, PoolFailed, ShoalError
from shoal.running import Reopen
from shoal_protocol import eager
from shoal_protocol.assembly import Limits
from shoal_protocol.called_items import ItemFrame, ItemReader, frames_of
from shoal_protocol.elements import truths
from shoal_protocol.frames import Frame
from shoal_protocol.tensors import Array, UnsupportedTensor
from shoal_protocol.v1 import coordinator_pb2 as pb

Arrays = dict[str, Array]

RETRY_SECONDS: Final = 0.25
GIVE_UP_SECONDS: Final = 60.0
"""How long a coordinator may be away."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An item without an answer; `place` is the user's number of it."""

    place: int
    inputs: Sequence[Frame]
    answer: eager.Prompt[Arrays]


def own_arrays(inputs: Mapping[str, Array]) -> Arrays:
    """Copies of an item's arrays: the program may fill its own again while the item is under way.
    Raises `TypeError`."""
    wanted = "an item is a dictionary of arrays by the names of the model's inputs"
    if not isinstance(inputs, Mapping):
        raise TypeError(f"{wanted}, not {type(inputs).__name__}")
    for name in inputs:
        if not isinstance(name, str):
            raise TypeError(f"{wanted}, not by {type(name).__name__}")
    return {name: _own(value) for name, value in inputs.items()}


def _own(value: object) -> Array:
    array = np.array(value)
    # NumPy has a type for text of any length, too.
    return array.astype(object) if array.dtype.kind == "T" else truths(array)


class Items:
    """Until `close`, which ends the channel too. Items that wait then fail with the same error."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        target: str,
        start: pb.SubmitJobRequest,
        reopen: Reopen | None = None,
    ) -> None:
        """The channel leads to the target, which a local stream may lead to as well. `reopen`: as
        of `Running`."""
        self._channel = channel
        self._reopen = reopen
        self._calls = Calls(channel, target)
        self._start = start
        self._numbers = count()
        self._waiting: dict[int, _Waiting] = {}
        """By number, in the order in which they came."""
        self._unsent: deque[int] = deque()
        self._open: Call | None = None
        """The call that has begun."""
        self._sending: asyncio.Task[None] | None = None
        self._lost_at = math.inf
        self._failure: ShoalError | None = None
        # Not a task: who waits for an answer goes on where it is read.
        self._serving = eager.Running(self._serve(), None)

    async def compute(self, place: int, inputs: Mapping[str, Array]) -> Arrays:
        """An item's results. The arrays must not change before that. Raises `ItemFailed`, or what
        ends all items."""
        if self._failure is not None:
            raise self._failure
        number = next(self._numbers)
        try:
            frames = frames_of(number, inputs)
        except UnsupportedTensor as error:
            raise ItemFailed(place, "InvalidInput", str(error)) from error
        answer: eager.Prompt[Arrays] = eager.Prompt()
        self._waiting[number] = _Waiting(place, frames, answer)
        self._unsent.append(number)
        self._send_now()
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    def fail(self, error: ShoalError) -> None:
        """End all items that wait, and refuse further ones."""
        self._failure = self._failure or error
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(self._failure)

    async def close(self) -> None:
        self.fail(PoolClosed())
        self._serving.cancel()
        await asyncio.gather(self._serving.ended, return_exceptions=True)
        await self._channel.close()

    # ---- the call --------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Call, again and again, until nothing can be computed any more."""
        try:
            while self._failure is None:
                await self._call()
        except Exception as error:  # whatever it is, nobody may wait for ever
            self.fail(PoolFailed(f"the items of {self._start.name} cannot be sent: {error!r}"))

    async def _call(self) -> None:
        call = self._calls.open(self._start)
        self._unsent = deque(self._waiting)
        self._sending = asyncio.create_task(self._begin(call))
        reason = "the coordinator ended the call"
        try:
            await self._receive(call)
        except CallEnded as error:
            reason = str(error)
            if error.refused:
                self.fail(PoolFailed(f"the coordinator refused {self._start.name}: {reason}"))
        finally:
            self._open = None
            sending, self._sending = self._sending, None
            if sending is not None:
                sending.cancel()
            await call.close()
            if sending is not None:
                await asyncio.gather(sending, return_exceptions=True)
        if self._failure is None:
            await self._be_patient(reason)

    async def _be_patient(self, reason: str) -> None:
        """The coordinator is away: wait a little, but not for ever."""
        self._lost_at = min(self._lost_at, monotonic())
        if monotonic() - self._lost_at > GIVE_UP_SECONDS:
            self.fail(PoolFailed(f"no coordinator for {GIVE_UP_SECONDS:g} s: {reason}"))
        await asyncio.sleep(RETRY_SECONDS)
        if self._reopen is not None and (channel := await self._reopen()) is not None:
            before, self._channel = self._channel, channel
            self._calls.use(channel)
            await before.close()

    async def _begin(self, call: Call) -> None:
        with contextlib.suppress(CallEnded):
            await call.write(pb.InferRequest(start=self._start))
            self._open = call
            await self._send(call)

    def _send_now(self) -> None:
        """Send what is unsent, unless that is being sent; what the stream takes leaves at once."""
        if self._open is not None and (self._sending is None or self._sending.done()):
            self._sending = eager.begin(self._send(self._open))

    async def _send(self, call: Call) -> None:
        """Until all has left, or the call breaks, of which `_receive` learns the reason."""
        with contextlib.suppress(CallEnded):
            while self._unsent:
                waiting = self._waiting.get(self._unsent.popleft())
                if waiting is not None:
                    for frame in waiting.inputs:
                        await call.write(frame)

    async def _receive(self, call: Call) -> None:
        reader = ItemReader(_take_any, Limits())
        async for message in call.answers():
            if isinstance(message, ItemFrame):
                if (item := reader.add(*message)) is not None:
                    self._give(item.number, item.tensors)
            elif message.HasField("failure"):
                self._give_failure(message.failure)
            else:
                self._lost_at = math.inf

    def _give(self, number: int, results: Arrays) -> None:
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.give(results)

    def _give_failure(self, failure: pb.InferFailure) -> None:
        need = failure.need_bytes if failure.HasField("need_bytes") else None
        have = failure.have_bytes if failure.HasField("have_bytes") else None
        device = failure.device or None
        if not failure.HasField("item"):
            text = f"{self._start.name}: {failure.message}"
            self.fail(ModelFailed(text, need=need, have=have, device=device))
        elif (waiting := self._waiting.get(failure.item)) is not None:
            error = ItemFailed(
                waiting.place, failure.kind, failure.message, need=need, have=have, device=device
            )
            if not waiting.answer.done():
                waiting.answer.set_exception(error)


def _take_any(_: object) -> None:
    """The results are what the coordinator says they are."""
