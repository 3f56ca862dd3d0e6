"""Items that travel: their routes as devices learn them, their way in, and their results.

The dispatcher says when a route is planned and which item travels on it (`dispatch.itineraries`).
Tickets are made here: each leg of a route has one, and the results have one as well, so that only
the device that was named sends an item on, and only while the route is in use.
"""

import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Final

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.server import admission
from shoal_coordinator.server.deliveries import Deliveries
from shoal_coordinator.server.metrics import CoordinatorMetrics
from shoal_coordinator.server.routes import Routes
from shoal_coordinator.server.sessions import DeviceSession
from shoal_coordinator.server.task_results import Run
from shoal_coordinator.server.timeline import Timeline
from shoal_protocol.bulk.link import Undelivered
from shoal_protocol.bulk.transport import Payload
from shoal_protocol.frames import MalformedFrame
from shoal_protocol.items import TICKET_BYTES, item_frame, read_layout
from shoal_protocol.tensors import Array, UnsupportedTensor
from shoal_protocol.units import Nanoseconds, seconds
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Item

logger = logging.getLogger(__name__)

_KNOWN_ROUTES: Final = 1024
_KNOWN_LAYOUTS: Final = 64
_LONGEST: Final = 1 << 62

Answered = Callable[[ins.Travel, ev.Event], None]


@dataclass(slots=True)
class _Route:
    """Tickets by the stage that an item enters with them, that of the results behind the last; and
    layouts of results that were checked."""

    tickets: dict[int, bytes] = field(default_factory=dict)
    checked: set[bytes] = field(default_factory=set)

    def ticket(self, stage: int) -> bytes:
        if stage not in self.tickets:
            self.tickets[stage] = secrets.token_bytes(TICKET_BYTES)
        return self.tickets[stage]


class Travels:
    """All items that travel now."""

    def __init__(
        self,
        sessions: Mapping[str, DeviceSession],
        runs: Mapping[str, Run],
        deliveries: Deliveries,
        timeline: Timeline,
        metrics: CoordinatorMetrics,
        answered: Answered,
    ) -> None:
        """`answered` receives what has become of each item, unless its number is void before."""
        self._sessions = sessions
        self._runs = runs
        self._deliveries = deliveries
        self._timeline = timeline
        self._metrics = metrics
        self._answered = answered
        self._routes: OrderedDict[int, _Route] = OrderedDict()
        self._under_way: dict[int, ins.Travel] = {}

    def leg(
        self, order: ins.Plan, routes: Routes, now: Nanoseconds
    ) -> pb.CoordinatorMessage | None:
        """The message of a Plan; None: the next device cannot be reached directly."""
        if (run := self._runs.get(order.job)) is None:
            return None
        route = self._routes.setdefault(order.route, _Route())
        if len(self._routes) > _KNOWN_ROUTES:
            self._routes.popitem(last=False)
        first, last = order.stages
        message = pb.CoordinatorMessage()
        plan = message.plan
        plan.instruction, plan.job, plan.epoch = order.instruction, order.job, order.epoch
        plan.ticket, plan.next_ticket = route.ticket(first), route.ticket(last)
        plan.steps.extend(run.steps[first:last])
        plan.sends.extend(run.carried[last])
        if last < len(order.devices):
            plan.device = order.devices[last]
            if (found := routes.address(order.device, plan.device, now)) is None:
                return None
            plan.address = found.target
        return message

    def enter(self, order: ins.Travel) -> None:
        """Send an item to its first device."""
        run, route = self._runs.get(order.job), self._routes.get(order.route)
        if run is None or route is None:
            return
        number, now = order.instruction, Nanoseconds(monotonic_ns())
        self._under_way[number] = order
        for device in dict.fromkeys(order.devices):
            if (session := self._sessions.get(device)) is not None:
                session.unanswered[number] = order
                self._timeline.instructed(device, now)
        self._metrics.count_travel(len(order.devices))
        names, arrays = run.carried[0], None
        with suppress(Exception):  # reading them meets it again
            arrays = run.cached(order.item, names)
        if arrays is not None:
            self._push(order, route, arrays)
        else:
            self._deliveries.read(
                order, run, names, lambda read: self._push(order, route, read), self._fail
            )

    def _push(self, order: ins.Travel, route: _Route, arrays: Mapping[str, Array]) -> None:
        session = self._sessions.get(order.device)
        try:
            if session is None or session.link is None:
                raise Undelivered(f"{order.device} has no bulk stream")
            frame = item_frame(route.ticket(0), order.instruction, (), arrays)
            session.link.bulk.push(frame, _nothing)
        except (Undelivered, UnsupportedTensor) as error:
            self._fail(order, str(error))

    def void(self, number: int) -> bool:
        """What comes of an item is ignored from now on; whether it travelled."""
        order = self._under_way.pop(number, None)
        if order is None:
            return False
        now = Nanoseconds(monotonic_ns())
        for device in order.devices:
            session = self._sessions.get(device)
            if session is None or session.unanswered.pop(number, None) is None:
                continue
            if not session.unanswered:
                self._timeline.rested(device, now)
        return True

    async def take_item(self, device: str, item: Item, payload: Payload) -> None:
        """Results come from a device, or what it takes for some."""
        order = self._under_way.get(item.instruction)
        route = None if order is None else self._routes.get(order.route)
        if order is None or route is None or device != order.devices[-1]:
            return
        last = len(order.devices)
        if not hmac.compare_digest(item.ticket, route.ticket(last)):
            return
        run = self._runs.get(order.job)
        if run is None or run.epoch != order.epoch:
            return
        try:
            layout = read_layout(item.layout)
            if layout.size != payload.size or len(item.compute) != last:
                raise MalformedFrame("the results are not as long as they should be")
            if item.layout not in route.checked:
                admission.check_tensors(layout.message, run.carried[last], run.specs)
                if len(route.checked) < _KNOWN_LAYOUTS:
                    route.checked.add(item.layout)
            arrays = layout.arrays(await payload.read())
        except MalformedFrame as error:
            self._fail(order, error.reason)
            return
        if not self.void(order.instruction):
            return
        at = Nanoseconds(monotonic_ns())
        compute = tuple([Nanoseconds(min(each, _LONGEST)) for each in item.compute])
        self._timeline.travelled(zip(order.devices, compute, strict=True), at)
        for each in compute:
            self._metrics.compute_seconds.observe(seconds(each))
        run.take_travelled(order.item, arrays, layout.size)
        self._answered(
            order, ev.ItemTravelled(at=at, instruction=order.instruction, compute=compute)
        )

    def _fail(self, order: ins.Travel, reason: str) -> None:
        """An item does not travel: it runs task by task, and that shows what is wrong."""
        if self.void(order.instruction):
            at = Nanoseconds(monotonic_ns())
            failure = ev.Failure(kind=ev.FailureKind.CANCELLED, message=reason)
            event = ev.InstructionFailed(at=at, instruction=order.instruction, failure=failure)
            self._answered(order, event)


def _nothing() -> None:
    """What waits for the link is bounded by what devices are given."""
