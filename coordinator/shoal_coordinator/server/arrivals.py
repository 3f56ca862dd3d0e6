"""What devices send over their bulk streams: results, activations for others, and items that have
travelled. Each is admitted by what the device was given."""

from collections.abc import Callable, Iterable, Mapping

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.server import admission, wire
from shoal_coordinator.server.device_session import DeviceSession
from shoal_coordinator.server.task_results import Run
from shoal_coordinator.server.travels import Travels
from shoal_protocol.assembly import ReceivedActivation
from shoal_protocol.bulk.transport import Payload
from shoal_protocol.frames import TransferError
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, Activation, Items


class Arrivals:
    """The `Results` of the devices' links."""

    def __init__(
        self,
        sessions: Mapping[str, DeviceSession],
        runs: Mapping[str, Run],
        travels: Travels,
        feed: Callable[[ev.Event, str | None], None],
    ) -> None:
        """`feed` gives the dispatcher an event that concerns a job."""
        self._sessions = sessions
        self._runs = runs
        self._travels = travels
        self._feed = feed

    def admit(self, device: str, activation: Activation) -> None:
        """Raise `TransferError` for a result that this device is not to give."""
        run = self._runs.get(activation.key.job)
        if run is None or activation.key.consumer != -1:
            raise TransferError(
                f"job {activation.key.job[:80]!r} does not run here",
                outcome=Acknowledgement.STALE,
            )
        admission.check_result_given(self._given(device), activation)
        run.admit(activation)

    def admit_relay(self, device: str, activation: Activation) -> None:
        """Raise `TransferError` for an activation that this device is not to send to another."""
        key = activation.key
        run = self._runs.get(key.job)
        if run is None or run.epoch != key.epoch:
            reason = "the job does not run in this epoch"
            raise TransferError(reason, outcome=Acknowledgement.STALE)
        admission.check_route_given(self._given(device), activation)
        wires = run.wires[key.producer]
        admission.check_tensors(activation, wires.outgoing[key.consumer], wires.specs)

    def _given(self, device: str) -> Iterable[wire.Answerable]:
        session = self._sessions.get(device)
        return () if session is None else session.unanswered.values()

    async def take(self, device: str, received: ReceivedActivation) -> None:
        """Take a result."""
        if (run := self._runs.get(received.key.job)) is not None:
            await run.take(received, lambda event: self._feed(event, run.name))

    async def take_items(self, device: str, items: Items, payload: Payload) -> None:
        """Take the results of items that have travelled."""
        await self._travels.take_items(device, items, payload)
