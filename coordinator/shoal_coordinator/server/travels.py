"""Items that travel: their routes as devices learn them, their way in, and their results.

The dispatcher says when a route is planned and which item travels on it (`dispatch.itineraries`).
Tickets are made here: each leg of a route has one, and the results have one as well, so that only
the device that was named sends an item on, and only while the route is in use.

Items that enter in one turn leave in frames of several, and so do their results when they come
back: what an item costs here is mostly what is done for each message and each event.
"""

import hmac
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic_ns
from typing import Final

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.server import admission
from shoal_coordinator.server.deliveries import Deliveries
from shoal_coordinator.server.device_session import DeviceSession
from shoal_coordinator.server.metrics import CoordinatorMetrics
from shoal_coordinator.server.routes import Routes
from shoal_coordinator.server.task_results import Result, Run
from shoal_coordinator.server.timeline import Timeline
from shoal_protocol.bulk.link import Undelivered
from shoal_protocol.bulk.transport import Payload
from shoal_protocol.frames import MalformedFrame
from shoal_protocol.items import TICKET_BYTES, Numbered, alike, items_frame, layout_of, to_forget
from shoal_protocol.tensors import Array, UnsupportedTensor
from shoal_protocol.units import Nanoseconds, seconds
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Items

_KNOWN_ROUTES: Final = 8192
"""More than all jobs have at once."""
_KNOWN_LAYOUTS: Final = 64
_LONGEST: Final = 1 << 62

Answered = Callable[[Sequence[ins.Travel], ev.Event], None]


@dataclass(slots=True)
class _Route:
    """Tickets by the stage that an item enters with them, that of the results behind the last; and
    layouts of results that were checked."""

    job: str
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
        """`answered` receives what has become of items of one route, but of those that are void
        before."""
        self._sessions = sessions
        self._runs = runs
        self._deliveries = deliveries
        self._timeline = timeline
        self._metrics = metrics
        self._answered = answered
        self._routes: dict[int, _Route] = {}
        self._under_way: dict[int, ins.Travel] = {}
        self._entered: dict[int, list[ins.Travel]] = {}

    def leg(
        self, order: ins.Plan, routes: Routes, now: Nanoseconds
    ) -> pb.CoordinatorMessage | None:
        """The message of a Plan; None: the next device cannot be reached directly."""
        if (run := self._runs.get(order.job)) is None:
            return None
        run.look_ahead()
        route = self._routes.setdefault(order.route, _Route(order.job))
        if len(self._routes) > _KNOWN_ROUTES:
            del self._routes[to_forget(self._routes)]
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

    def end(self, order: ins.ForgetJob) -> pb.CoordinatorMessage:
        """A job has ended, and with it its routes; what a device is told."""
        for number in [number for number, each in self._routes.items() if each.job == order.job]:
            del self._routes[number]
        return pb.CoordinatorMessage(cancel={"job": order.job, "epoch": order.epoch + 1})

    def enter(self, order: ins.Travel) -> None:
        """An item is to travel. It leaves with the others that enter before `depart`."""
        self._under_way[order.instruction] = order
        self._entered.setdefault(order.route, []).append(order)

    def entered(self) -> Iterable[Sequence[ins.Travel]]:
        """Those that have entered since this was last asked, by route."""
        entered, self._entered = self._entered, {}
        return entered.values()

    def depart(self, orders: Sequence[ins.Travel]) -> None:
        """Send items of one route to its first device."""
        first = orders[0]
        run, route = self._runs.get(first.job), self._routes.get(first.route)
        leaving = {each.instruction: each for each in orders if each.instruction in self._under_way}
        if run is None or route is None or not leaving:
            return
        names = run.carried[0]
        ready: list[Numbered] = []
        for number, order in leaving.items():
            arrays = None
            with suppress(Exception):  # reading them meets it again
                arrays = run.cached(order.item, names)
            if arrays is None:
                self._deliveries.read(order, run, names, partial(self._read, route), self._fail)
            else:
                ready.append((number, arrays))
        self._push(first.device, route, ready)
        self._expect(first.devices, leaving)

    def _expect(self, devices: Sequence[str], leaving: Mapping[int, ins.Travel]) -> None:
        """These have left for a route over these devices, but for those that have failed."""
        expected = {number: leaving[number] for number in leaving if number in self._under_way}
        now = Nanoseconds(monotonic_ns())
        for device in dict.fromkeys(devices) if expected else ():
            if (session := self._sessions.get(device)) is not None:
                session.unanswered.update(expected)
                self._timeline.instructed(device, now)
        self._metrics.count_travels(len(expected) * len(devices))

    def _read(self, route: _Route, order: ins.Travel, arrays: Mapping[str, Array]) -> None:
        self._push(order.device, route, ((order.instruction, arrays),))

    def _push(self, device: str, route: _Route, items: Sequence[Numbered]) -> None:
        session = self._sessions.get(device)
        for together in alike(items):
            try:
                if session is None or session.link is None:
                    raise Undelivered(f"{device} has no bulk stream")
                session.link.bulk.push(items_frame(route.ticket(0), (), together), _nothing)
            except (Undelivered, UnsupportedTensor) as error:
                for number, _ in together:
                    if (order := self._under_way.get(number)) is not None:
                        self._fail(order, str(error))

    def void(self, number: int) -> bool:
        """What comes of an item is ignored from now on; whether it travelled."""
        order = self._under_way.pop(number, None)
        if order is not None:
            self._end(order.devices, (number,))
        return order is not None

    def _end(self, devices: Iterable[str], numbers: Iterable[int]) -> None:
        """Items on a route over these devices need no answer any more."""
        now = Nanoseconds(monotonic_ns())
        for device in dict.fromkeys(devices):
            if (session := self._sessions.get(device)) is None:
                continue
            unanswered = session.unanswered
            known = len(unanswered)
            for number in numbers:
                unanswered.pop(number, None)
            if known and not unanswered:
                self._timeline.rested(device, now)

    async def take_items(self, device: str, items: Items, payload: Payload) -> None:
        """Results come from a device, or what it takes for some."""
        numbers = items.instructions[:]
        order = next(filter(None, map(self._under_way.get, numbers)), None)
        route = None if order is None else self._routes.get(order.route)
        if order is None or route is None or device != order.devices[-1]:
            return
        last = len(order.devices)
        if not hmac.compare_digest(items.ticket, route.ticket(last)):
            return
        run = self._runs.get(order.job)
        if run is None or run.epoch != order.epoch:
            return
        try:
            arrays = await self._arrays(run, route, items, payload, last)
        except MalformedFrame as error:
            for number in numbers:
                if (
                    wrong := self._under_way.get(number)
                ) is not None and wrong.route == order.route:
                    self._fail(wrong, error.reason)
            return
        orders: list[ins.Travel] = []
        results: list[Result] = []
        for number, each in zip(numbers, arrays, strict=True):
            found = self._under_way.get(number)
            if found is not None and found.route == order.route:
                del self._under_way[number]
                orders.append(found)
                results.append((found.item, each))
        if orders:
            self._arrive(run, orders, results, items.compute[:])

    async def _arrays(
        self, run: Run, route: _Route, items: Items, payload: Payload, stages: int
    ) -> list[dict[str, Array]]:
        """The results that a frame holds, checked. Raises `MalformedFrame`."""
        layout = layout_of(items, payload.size)
        if len(items.compute) != stages:
            raise MalformedFrame(f"results of {len(items.compute)} stages, not {stages}")
        if items.layout not in route.checked:
            admission.check_tensors(layout.message, run.carried[stages], run.specs)
            if len(route.checked) < _KNOWN_LAYOUTS:
                route.checked.add(items.layout)
        return layout.items(await payload.read(), len(items.instructions))

    def _arrive(
        self,
        run: Run,
        orders: Sequence[ins.Travel],
        results: Sequence[Result],
        took: Iterable[int],
    ) -> None:
        """Items have come through; `took` is what each stage took for one of them. Who waits for
        results has them first."""
        run.take_travelled(results)
        numbers, devices = tuple([each.instruction for each in orders]), orders[0].devices
        at = Nanoseconds(monotonic_ns())
        compute = tuple([Nanoseconds(min(each, _LONGEST)) for each in took])
        self._end(devices, numbers)
        self._timeline.travelled(zip(devices, compute, strict=True), len(orders), at)
        for each in compute:
            self._metrics.compute_seconds.observe(seconds(each), len(orders))
        event = ev.ItemsTravelled(at=at, instructions=numbers, compute=compute)
        self._answered(orders, event)

    def _fail(self, order: ins.Travel, reason: str) -> None:
        """An item does not travel: it runs task by task, and that shows what is wrong."""
        if self.void(order.instruction):
            at = Nanoseconds(monotonic_ns())
            failure = ev.Failure(kind=ev.FailureKind.CANCELLED, message=reason)
            event = ev.InstructionFailed(at=at, instruction=order.instruction, failure=failure)
            self._answered((order,), event)


def _nothing() -> None:
    """What waits for the link is bounded by what devices are given."""
