"""A simulated device's sessions and wire: how it dies, hangs, drains and returns, and what gets
through.

What the device does with what it hears is its own affair (`simulated_agent`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal_agent.execution import values as execution
from shoal_agent.execution.queue import TaskQueue
from shoal_agent.memory import residency
from shoal_agent.memory.demands import Demand, Evict
from shoal_coordinator.dispatch import instructions as give
from shoal_coordinator.dispatch.events import (
    BudgetChanged,
    DeviceDraining,
    DeviceJoined,
    DeviceLost,
    DeviceTelemetry,
    Event,
    Failure,
    FailureKind,
    FragmentEvicted,
    InstructionFailed,
    Telemetry,
)
from shoal_protocol.digests import Digest
from shoal_protocol.tensors import ActivationKey
from shoal_protocol.units import Bytes, Nanoseconds

if TYPE_CHECKING:
    from coordinator.dispatch.simulated_world import World

MILLISECOND = 1_000_000
SECOND = 1000 * MILLISECOND
TENSOR = frozenset({"tensor"})
STANDSTILL = 30 * SECOND
"""How long an agent waits for a peer that says nothing."""


@dataclass(slots=True, kw_only=True)
class Model:
    """What a device is: fixed for a scenario. Its budget may become smaller for a while, down to
    the `smallest`. `excess` is what fragments take there beyond what they are granted, whole or in
    blocks."""

    name: str
    budget: int
    smallest: int
    single: bool
    slowness: float
    excess: dict[str, int] = field(default_factory=dict)

    def empty_ledger(self) -> residency.Ledger:
        """The ledger of a device that has just started."""
        return residency.Ledger(budget=Bytes(self.budget), single=self.single)


class Link:
    """One device, over all its sessions: how it comes and goes, and what reaches it."""

    def __init__(self, world: "World", model: Model) -> None:
        self.world = world
        self.model = model
        self.name = model.name
        self.ledger = model.empty_ledger()
        self.cached: set[str] = set()
        self.queue = TaskQueue()
        self.start_memory()
        self.reset_items()
        self.session = 0
        self.incarnation = 1
        self.connected = False
        self.alive = True
        self.hung = False
        self._sent_until = self._received_until = 0
        self._executes: dict[int, give.Execute] = {}
        self._moves: dict[int, Digest] = {}
        """Of loads and prefetches that are under way, by instruction: the fragment."""
        self._tickets: dict[int, dict[str, int]] = {}
        """By instruction: the sessions that other devices had when it was given. They take nothing
        in another."""
        self._given_up: set[str] = set()
        self._unmeasured: set[str] = set()
        self._stuck: dict[str, list[Callable[[], None]]] = {}
        self._gone: dict[str, int] = {}
        """Of each peer that was lost, the newest instruction of before that."""

    # ---- sessions ----------------------------------------------------------------------------

    def connect(self) -> None:
        """The agent dials."""
        if self.connected or not self.alive:
            return
        if self.world.down:
            self.world.later(self.world.chance.uniform(0.05, 2) * SECOND, self.connect)
            return
        self.session = self.world.next_session()
        self.connected, self.hung = True, False
        self._sent_until = self._received_until = self.world.now
        self.queue = TaskQueue()
        self.reset_items()
        self._executes.clear()
        self._moves.clear()
        self._measure(self.session)
        self.world.feed(
            DeviceJoined(
                at=Nanoseconds(self.world.now),
                device=self.name,
                session=self.session,
                incarnation=self.incarnation,
                budget=self.ledger.budget,
                single=self.model.single,
                resident={Digest(key): size for key, size in self.ledger.resident.items()},
                cached=frozenset(Digest(key) for key in self.cached),
            )
        )

    def break_session(self, *, report: bool = True) -> None:
        """The stream breaks; the agent drops its queue, keeps its fragments, dials again."""
        if not self.connected:
            return
        lost = DeviceLost(at=Nanoseconds(0), device=self.name, session=self.session)
        self.world.note(f"-- {self.name} loses its session")
        self.connected = False
        self.queue = TaskQueue()
        self.reset_items()
        self._executes.clear()
        for digest in list(self.ledger.in_flight):
            self.ledger.fail_load(digest)
        if report:
            self.world.feed_later(self.world.delay(), lost)
        if self.alive:
            self.world.later(self.world.chance.uniform(0.05, 2) * SECOND, self.connect)

    def lose_coordinator(self) -> None:
        """It died: the stream breaks, and what it said of instructions says nothing of later ones,
        whose numbers begin again."""
        self.break_session(report=False)
        self._tickets.clear()
        self._gone.clear()

    def kill(self, away: float) -> None:
        """kill -9; a supervisor starts it again after a while. The disk stays."""
        if not self.alive:
            return
        self.world.note(f"-- {self.name} is killed")
        self.alive = False
        self.break_session(report=not self.hung)
        self.ledger = self.model.empty_ledger()
        self.start_memory()
        self.incarnation += 1
        self.world.later(away, self._start)

    def _start(self) -> None:
        self.alive = True
        self.connect()

    def hang(self, away: float) -> None:
        """Nothing comes from it any more; the stream does not break, until much later."""
        if not self.connected or self.hung:
            return
        self.world.note(f"-- {self.name} hangs")
        self.hung = True
        session = self.session

        def wake() -> None:
            if self._is_in(session):
                self.break_session()

        self.world.later(away, wake)

    def drain(self) -> None:
        """SIGTERM: it finishes what runs, then goes, and comes back later."""
        if not self.connected or self.hung:
            return
        self.world.note(f"-- {self.name} drains")
        self._send_up(DeviceDraining(at=Nanoseconds(0), device=self.name, session=self.session))
        self.world.later(3 * SECOND, lambda: self.kill(SECOND))

    def change_budget(self, budget: int) -> None:
        """The agent has more or less memory; it says so, and then what it gives up for that."""
        if not self.alive or self.hung:
            return
        self.world.note(f"-- {self.name} has a budget of {budget}")
        demands = self.ledger.change_budget(Bytes(budget))
        self._send_up(
            BudgetChanged(
                at=Nanoseconds(0),
                device=self.name,
                session=self.session,
                budget=Bytes(budget),
                resident={Digest(key): size for key, size in self.ledger.resident.items()},
            )
        )
        self.meet(demands)

    def meet(self, demands: Sequence[Demand]) -> None:
        """Do what the ledger wants done. Nothing is in memory but fragments, so nothing spills."""
        for each in demands:
            if isinstance(each, Evict) and self.connected:
                self._evict(each.digest)

    def give_up_fragment(self) -> None:
        """The agent evicts a fragment by itself."""
        if not self.connected or self.hung or not self.ledger.resident:
            return
        self._evict(next(iter(self.ledger.resident)))

    def _evict(self, digest: str) -> None:
        self.world.note(f"-- {self.name} gives up {digest[7:9]}")
        self.ledger.unload(digest)
        self._given_up.add(digest)
        self._carry_out(self.queue.unload(digest))
        self._send_up(
            FragmentEvicted(
                at=Nanoseconds(0), device=self.name, session=self.session, digest=Digest(digest)
            )
        )

    def _measure(self, session: int) -> None:
        if not self._is_in(session) or self.hung:
            return
        chance = self.world.chance
        telemetry = Telemetry(
            cpu_fraction=chance.random(),
            memory_available=Bytes(chance.randrange(1 << 30)) if chance.random() < 0.7 else None,
            battery_fraction=chance.random() if chance.random() < 0.3 else None,
        )
        self._send_up(
            DeviceTelemetry(
                at=Nanoseconds(0), device=self.name, session=session, telemetry=telemetry
            )
        )
        self.world.later(2 * SECOND, lambda: self._measure(session), routine=True)

    # ---- the wire ----------------------------------------------------------------------------

    def receive(self, instruction: give.Instruction) -> None:
        """Something is sent to the device, on its session's stream: in order."""
        if not self.connected:
            return
        if isinstance(instruction, give.Execute | give.Forward):
            there = {name: agent.session for name, agent in self.world.agents.items()}
            self._tickets[instruction.instruction] = there
        session, now = self.session, self.world.now
        self._received_until = max(self._received_until, now + self.world.delay()) + 1

        def arrive() -> None:
            if self._is_in(session) and not self.hung:
                self._obey(instruction, session)

        self.world.later(self._received_until - now, arrive)

    def _send_up(self, event: Event) -> None:
        """To the coordinator, on the session's stream: in order. It may outlive the stream."""
        if not self.connected or self.hung:
            return
        session, now = self.session, self.world.now
        self._sent_until = max(self._sent_until, now + self.world.delay()) + 1

        def arrive() -> None:
            if self._is_in(session) or self.world.chance.random() < 0.5:
                self.world.feed(event)

        self.world.later(self._sent_until - now, self.world.in_life(arrive))

    def _is_in(self, session: int) -> bool:
        return self.connected and self.session == session

    def _answer(self, session: int, event: Event) -> None:
        if self._is_in(session):
            self._send_up(event)

    def _fail(self, session: int, number: int, kind: FailureKind, message: str) -> None:
        failure = Failure(kind=kind, message=message)
        event = InstructionFailed(at=Nanoseconds(0), instruction=number, failure=failure)
        self._answer(session, event)

    def arrive(self, session: int, key: ActivationKey) -> bool:
        """Tensors come in; whether they are acknowledged."""
        if not self._is_in(session) or self.hung:
            return False
        effects = self.queue.arrive(Nanoseconds(self.world.now), key, TENSOR)
        if effects is None:
            return False
        self._carry_out(effects)
        return True

    def accept(self, session: int, key: ActivationKey, then: Callable[[bool], None]) -> None:
        """Tensors begin to come in; whether they were taken."""
        then(self.arrive(session, key))

    def _push(
        self, number: int, key: ActivationKey, target: str, then: Callable[[bool], None]
    ) -> None:
        """Send an activation to another device, as an instruction says; it may be lost, or come
        twice."""
        world, session, other = self.world, self.session, self.world.agents[target]
        there = self._tickets[number][target]
        lost = world.unlucky(world.trouble.push)

        def arrived() -> None:
            if other.hung:
                self._stand_still(number, target, end)
            elif lost:
                end(False)
            else:
                other.accept(there, key, end)

        def end(delivered: bool) -> None:
            if self._is_in(session):
                then(delivered)

        if world.unlucky(world.trouble.repeat):
            world.later(0, lambda: other.accept(there, key, lambda _: None))
        world.later(world.delay(), arrived)

    def _stand_still(self, number: int, target: str, end: Callable[[bool], None]) -> None:
        """Nothing comes back: until somebody says that nothing will, or for long."""
        if number <= self._gone.get(target, -1):
            end(False)
            return
        given_up = False

        def give_up() -> None:
            nonlocal given_up
            if not given_up:
                given_up = True
                end(False)

        self._stuck.setdefault(target, []).append(give_up)
        self.world.later(STANDSTILL, give_up)

    # ---- what the device does ----------------------------------------------------------------

    def start_memory(self) -> None:
        """The process has just started, with an empty ledger."""

    def reset_items(self) -> None:
        raise NotImplementedError

    def _obey(self, instruction: give.Instruction, session: int) -> None:
        raise NotImplementedError

    def _carry_out(self, effects: list[execution.Effect]) -> None:
        raise NotImplementedError
