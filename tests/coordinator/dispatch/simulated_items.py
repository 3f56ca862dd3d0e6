"""Items that travel through a simulated device: the agent's own rules on which items it takes, with
links that lose, repeat and delay them."""

from dataclasses import dataclass

from coordinator.dispatch.simulated_link import MILLISECOND, SECOND, Link
from shoal_agent.execution.legs import Arrived, Leg, Legs, Step
from shoal_coordinator.dispatch import instructions as give
from shoal_coordinator.dispatch.events import FailureKind, ItemsTravelled, LegPlanned
from shoal_protocol.units import Nanoseconds


@dataclass(frozen=True, slots=True)
class Luggage:
    """What an item has with it: where it goes, and what its stages took."""

    travel: give.Travel
    first: int
    compute: tuple[int, ...]


def ticket(life: int, route: int, first: int) -> bytes:
    """What items bring to the leg that begins with a stage."""
    return f"{life} {route} {first}".encode()


class ItemLink(Link):
    """What a device does with items."""

    def reset_items(self) -> None:
        """A session begins, or ends: nothing of an older one counts."""
        self.legs: Legs[Luggage] = Legs()
        self._item_runs = False

    def _plan(self, session: int, plan: give.Plan) -> None:
        stages = self.world.specs[plan.job].stages
        first, last = plan.stages
        missing = [each.digest for each in stages[first:last] if each.digest not in self._resident]
        self._void(plan.job, plan.epoch)
        if missing or self.world.unlucky(self.world.trouble.load):
            self._fail(session, plan.instruction, FailureKind.NOT_RESIDENT, "no leg of mine")
            return
        leg = Leg(
            job=plan.job,
            epoch=plan.epoch,
            steps=tuple(Step(digest=each.digest, inputs=()) for each in stages[first:last]),
            sends=(),
            device=plan.devices[last] if last < len(plan.devices) else "",
            address="",
            next_ticket=ticket(self.world.life, plan.route, last),
        )
        self.legs.plan(ticket(self.world.life, plan.route, first), leg)
        self._answer(session, LegPlanned(at=Nanoseconds(0), instruction=plan.instruction))

    def _void(self, job: str, epoch: int) -> None:
        self.legs.void(job, epoch)
        self._carry_out(self.queue.void(job, epoch))

    @property
    def _resident(self) -> dict[str, int]:
        return dict(self.ledger.resident)

    def arrive_item(self, by: bytes, luggage: Luggage) -> None:
        """An item comes, with a ticket."""
        leg = self.legs.find(by)
        if not self.connected or self.hung or leg is None or self.queue.stale(leg.job, leg.epoch):
            return
        number = luggage.travel.instruction
        if not self.legs.room_for(leg, 1):
            raise self.world.wrong(f"too many items wait on {self.name}")
        if self.world.unlucky(self.world.trouble.load / 4) or not self._take_item_room():
            self._fail(self.session, number, FailureKind.CANCELLED, "there is no room")
            return
        self.legs.arrive([Arrived(leg, number, b"", luggage)])
        self._run_next()

    def _take_item_room(self) -> bool:
        """Whether there is memory for an item, until it has left."""
        return True

    def _leave_item_room(self, count: int) -> None:
        """So many items have left."""

    def _run_next(self) -> None:
        world, legs = self.world, self.legs
        if self._item_runs or not (together := legs.next(world.chance.choice((1, 3, 8)))):
            return
        self._item_runs = True
        leg = together[0].leg
        took = tuple(
            int(world.chance.uniform(1, 15) * MILLISECOND * self.model.slowness) for _ in leg.steps
        )
        travels = [arrived.content.travel for arrived in together]
        poison = any((each.job, each.item) in world.trouble.poison for each in travels)
        if poison and not world.calm:
            world.later(took[0], lambda: self.kill(SECOND))

        def ended() -> None:
            if self.legs is legs:
                self._item_runs = False
                results = [self._leave(arrived, took) for arrived in together]
                self._leave_item_room(len(together))
                self._return([each for each in results if each is not None])
                self._run_next()

        world.later(sum(took), ended)

    def _return(self, results: list[Luggage]) -> None:
        """What has come through all stages goes to the coordinator, together."""
        if results:
            world = self.world
            arrive = world.in_life(lambda: world.take_results(self, results))
            world.later(world.delay(), arrive)

    def _leave(self, arrived: Arrived[Luggage], took: tuple[int, ...]) -> Luggage | None:
        """An item has run and goes on; what it has with it if that was the last stage."""
        world, luggage, leg = self.world, arrived.content, arrived.leg
        number, travel = arrived.instruction, luggage.travel
        if any(step.digest not in self._resident for step in leg.steps):
            self._fail(self.session, number, FailureKind.NOT_RESIDENT, "given up")
            return None
        if (travel.job, travel.item) in world.trouble.invalid:
            self._fail(self.session, number, FailureKind.INVALID_INPUT, "of another shape")
            return None
        if world.unlucky(world.trouble.task):
            self._fail(self.session, number, FailureKind.RUNTIME, "it went wrong")
            return None
        for stage in range(luggage.first, luggage.first + len(leg.steps)):
            world.note_run(travel.job, travel.item, stage)
        carried = Luggage(travel, luggage.first + len(leg.steps), luggage.compute + took)
        if not leg.device:
            return carried
        if world.unlucky(world.trouble.push):
            if world.chance.random() < 0.5:  # else nobody says that it is lost
                self._fail(self.session, number, FailureKind.UNREACHABLE, "the link broke")
            return None
        other = world.agents[leg.device]
        for _ in range(2 if world.unlucky(world.trouble.repeat) else 1):
            world.later(world.delay(), lambda: other.arrive_item(leg.next_ticket, carried))
        return None

    def finish_items(self, arrived: list[Luggage]) -> None:
        """The coordinator has the results."""
        self.world.feed(
            ItemsTravelled(
                at=Nanoseconds(0),
                instructions=tuple(each.travel.instruction for each in arrived),
                compute=tuple(map(Nanoseconds, arrived[0].compute)),
            )
        )
