"""What all runs of jobs share: which task waits for which results.

A device's reply that a task has finished, and the results of the task, come on two streams. The
dispatcher receives the reply when both are here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.server import admission, wire
from shoal_coordinator.server.carrying import carried
from shoal_protocol.assembly import ActivationAssembler, Limits, ReceivedActivation
from shoal_protocol.frames import MalformedFrame, TransferError
from shoal_protocol.partition import MODEL, PartitionDocument
from shoal_protocol.tensors import Array
from shoal_protocol.units import Nanoseconds, nanoseconds
from shoal_protocol.v1.session_pb2 import Step
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, Activation

RESULT_PATIENCE: Final = nanoseconds(60)
"""How long a reply waits for its results."""

_INLINE_LIMITS: Final = Limits(decoded_bytes=1 << 20)

Feed = Callable[[ev.Event], None]
Result = tuple[int, Mapping[str, Array]]
"""Of an item: some of the model's outputs."""


@dataclass(slots=True)
class _Expected:
    """The results of a task that was assigned: whether they are here, and the reply that waits for
    them."""

    arrived: bool = False
    reply: ev.TaskFinished | None = None


class Run(ABC):
    """One run of a job. Where its inputs come from, and where its results go, a subclass says."""

    def __init__(
        self, name: str, document: PartitionDocument, epoch: int, *, lossy: bool, batch: int
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.lossy = lossy
        self.deadline: Nanoseconds | None = None
        self.wires = wire.stage_wires(document, batch)
        self.bfloat16 = frozenset(s.name for s in document.inputs if s.dtype == "bfloat16")
        self.carried = carried(document)
        self.steps = tuple(
            Step(digest=each.digest, inputs=[spec.name for spec in each.inputs])
            for each in document.fragments
        )
        """Those of its stages in an itinerary."""
        self.specs = {name: spec for each in self.wires for name, spec in each.specs.items()}
        self.untouched = tuple(
            name for edge in document.into(MODEL) if edge.producer == MODEL for name in edge.tensors
        )
        """Outputs of the model that are its inputs: no device sends those."""
        self._expected: dict[tuple[int, int], _Expected] = {}
        """By item and stage."""

    # ---- what a subclass says --------------------------------------------------------------------

    @abstractmethod
    def place(self, item: int) -> str:
        """Where an item's inputs are, for people."""

    @abstractmethod
    def item_bytes(self, item: int) -> int:
        """What an item's inputs take in memory."""

    @abstractmethod
    def look_ahead(self) -> None:
        """Many items are about to be asked for at once."""

    @abstractmethod
    def cached(self, item: int, names: Iterable[str]) -> dict[str, Array] | None:
        """Some of an item's inputs if they are small and in memory."""

    @abstractmethod
    async def read(self, item: int, names: Iterable[str]) -> dict[str, Array]:
        """Some of an item's inputs. Raises `InputUnsuitable`, whatever is wrong with them."""

    @abstractmethod
    def finish(self, item: int, attempts: int) -> None:
        """All results of an item are here, after so many tries. Answered by `ItemsStored`."""

    @abstractmethod
    def fail(self, item: int, failure: ev.Failure, attempts: int) -> None:
        """An item has failed for good, after so many tries."""

    @abstractmethod
    async def _take_in(self, received: ReceivedActivation) -> None:
        """Store results; their memory is another's again when this returns."""

    @abstractmethod
    def take_small(self, results: Sequence[Result]) -> None:
        """Store results that are in memory."""

    def take_travelled(self, results: Sequence[Result]) -> None:
        """Store all results of items that have travelled; `finish` follows for each."""
        self.take_small(results)

    @property
    def waiting_files(self) -> int:
        """Files of inputs that have come and were not taken yet."""
        return 0

    # ---- results ---------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """A newer plan: results of tasks of the older one are refused from now on."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._expected.clear()

    def expect(self, order: ins.Execute) -> None:
        if self.wires[order.stage].results:
            self._expected.setdefault((order.item, order.stage), _Expected())

    def admit(self, activation: Activation) -> None:
        """Raise `TransferError` for a result that nobody waits for."""
        key = activation.key
        if key.epoch != self.epoch or (key.item, key.producer) not in self._expected:
            raise TransferError(
                f"nobody waits for item {key.item} of {self.name} in epoch {key.epoch}",
                outcome=Acknowledgement.STALE,
            )
        wires = self.wires[key.producer]
        admission.check_tensors(activation, wires.results, wires.specs)

    async def take(self, received: ReceivedActivation, feed: Feed) -> None:
        """Store a result, and pass on the reply that waited for it."""
        result = (received.key.item, received.key.producer)
        if result not in self._expected:
            return
        await self._take_in(received)
        if (expected := self._expected.get(result)) is None:
            return
        expected.arrived = True
        if (reply := expected.reply) is not None:
            expected.reply = None
            feed(reply)

    def take_inline(self, order: ins.Execute, frame: bytes) -> None:
        """Store a task's results that came with its reply. Raises `TransferError`."""
        assembler = ActivationAssembler(
            _INLINE_LIMITS, lambda activation, _: self.admit(activation)
        )
        received = assembler.feed(frame)
        sent = None if received is None else (received.key.item, received.key.producer)
        if received is None or sent != (order.item, order.stage):
            raise MalformedFrame("the frame in the reply does not hold the task's results")
        self.take_small(((received.key.item, received.tensors),))
        self._expected[order.item, order.stage].arrived = True

    def join(self, order: ins.Execute, reply: ev.TaskFinished, feed: Feed) -> None:
        """Report a finished task to the dispatcher, once its results are here."""
        expected = self._expected.get((order.item, order.stage))
        if expected is None or expected.arrived:
            feed(reply)
        else:
            expected.reply = reply

    def expire(self, now: Nanoseconds, feed: Feed) -> None:
        failure = ev.Failure(
            kind=ev.FailureKind.MISSING_ACTIVATION, message="the result did not arrive"
        )
        for expected in list(self._expected.values()):
            if (reply := expected.reply) is not None and now >= reply.at + RESULT_PATIENCE:
                expected.reply = None
                feed(ev.InstructionFailed(at=now, instruction=reply.instruction, failure=failure))

    def _forget(self, item: int) -> None:
        for stage in range(len(self.wires)):
            self._expected.pop((item, stage), None)
