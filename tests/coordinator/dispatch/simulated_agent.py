"""A device of the simulation: the agent's real pure cores, on a wire that misbehaves.

The memory ledger (`shoal_agent.memory`) and the queue of tasks (`shoal_agent.execution`) are
those of the agent itself, so a load over the budget, or a task for a fragment that is not
resident, is found by the other side. Disk and resident fragments survive a session; a killed agent
keeps its disk only.
"""

from collections.abc import Callable, Sequence
from functools import partial

from coordinator.dispatch.simulated_items import ItemLink
from coordinator.dispatch.simulated_link import MILLISECOND, SECOND, TENSOR
from shoal_agent.execution import values as execution
from shoal_agent.memory.demands import Evict, Load, Refusal
from shoal_coordinator.dispatch import instructions as give
from shoal_coordinator.dispatch.events import (
    ActivationForwarded,
    Failure,
    FailureKind,
    FragmentCached,
    FragmentResident,
    FragmentUnloaded,
    InputUnreadable,
    InstructionFailed,
    ProbeAnswered,
    TaskFinished,
)
from shoal_protocol.tensors import ActivationKey
from shoal_protocol.units import Bytes, Nanoseconds


class Agent(ItemLink):
    """What the device does with its instructions."""

    def _obey(self, instruction: give.Instruction, session: int) -> None:  # noqa: C901, PLR0912
        match instruction:
            case give.Load():
                self._load(session, instruction)
            case give.Unload():
                self._unload(session, instruction)
            case give.Prefetch():
                self._prefetch(session, instruction)
            case give.Execute():
                self._execute(session, instruction)
            case give.Forward():
                self._forward(session, instruction)
            case give.Release(job=job, epoch=epoch, item=item, stage=stage):
                self._carry_out(self.queue.release([execution.Made(job, epoch, item, stage)]))
            case give.Cancel(cancelled=number):
                self._cancel(session, number)
            case give.Plan():
                self._plan(session, instruction)
            case give.ForgetJob(job=job, epoch=epoch):
                self._void(job, epoch + 1)
            case give.PeerLost(peer=peer):
                self._gone[peer] = max(self._tickets, default=-1)
                for give_up in self._stuck.pop(peer, ()):
                    give_up()
            case give.Probe():
                self._send_up(ProbeAnswered(at=Nanoseconds(0), device=self.name, session=session))
            case _:
                raise self.world.wrong(f"{instruction} is not for a device")

    def tick(self) -> None:
        """Its clock: what nobody claims expires."""
        if not self.hung:
            self._carry_out(self.queue.tick(Nanoseconds(self.world.now)))

    def _cancel(self, session: int, number: int) -> None:
        digest = self._moves.pop(number, None)
        if digest is None:
            self._carry_out(self.queue.cancel(number))
            return
        if digest not in self.ledger.resident:
            self.ledger.fail_load(digest)
        self._fail(session, number, FailureKind.CANCELLED, "cancelled")

    def _load(self, session: int, load: give.Load) -> None:
        world, digest = self.world, load.digest
        self._check_grant(load)
        answer = self.ledger.request_load(digest, load.granted)
        is_small = self.ledger.budget < self.model.budget  # which may be news
        if isinstance(answer, Refusal) and (self._has_grown or is_small):
            self._refuse(session, load.instruction, answer)
            return
        if answer is not Load.ADMITTED:
            self._wait_to_load(session, load, answer)
            return
        took = world.chance.uniform(5, 60) * MILLISECOND
        if digest not in self.cached:
            took += world.chance.uniform(20, 300) * MILLISECOND
        kinds = (FailureKind.UNAVAILABLE, FailureKind.CORRUPT, FailureKind.DISK_FULL)
        kind = world.chance.choice(kinds) if world.unlucky(world.trouble.load) else None

        self._moves[load.instruction] = digest

        def loaded() -> None:
            if not self._is_in(session) or self._moves.pop(load.instruction, None) is None:
                return
            if kind is None:
                self.cached.add(digest)
            if digest in world.trouble.crashing:
                self.kill(SECOND)
            elif kind is None:
                self._loaded(session, load)
            else:
                self.ledger.fail_load(digest)
                self._fail(session, load.instruction, kind, "it went wrong")

        world.later(took, loaded)

    def _wait_to_load(self, session: int, load: give.Load, answer: object) -> None:
        raise self.world.wrong(f"{self.name} cannot load {load.digest[7:9]}: {answer}")

    def _loaded(self, session: int, load: give.Load) -> None:
        if not self.ledger.finish_load(load.digest):
            have, reason = self.ledger.free_for_fragments, "given up while it was loaded"
            refusal = Refusal(need=load.granted, have=have, reason=reason)
            self._refuse(session, load.instruction, refusal)
            return
        self._unmeasured.add(load.digest)
        if self.world.chance.random() < 0.5 and (demand := self._measure_run(load.digest)):
            self._refuse(session, load.instruction, demand)
            return
        self._given_up.discard(load.digest)
        resident = self.ledger.resident[load.digest]
        event = FragmentResident(at=Nanoseconds(0), instruction=load.instruction, resident=resident)
        self._answer(session, event)

    def _check_grant(self, load: give.Load) -> None:
        """A fragment gets no less than it runs in, and no more than it can use."""
        stages = [stage for spec in self.world.specs.values() for stage in spec.stages]
        (sizes,) = {(s.least_bytes, s.resident_bytes) for s in stages if s.digest == load.digest}
        if not sizes[0] <= load.granted <= sizes[1]:
            raise self.world.wrong(f"{load.digest[7:9]} gets {load.granted}, not of {sizes}")

    @property
    def _has_grown(self) -> bool:
        """Whether fragments took more when they ran than the coordinator was told."""
        return any(digest in self.model.excess for digest in self.ledger.resident)

    def _measure_run(self, digest: str) -> Evict | None:
        """The first run shows what a fragment takes; it goes if there is no room for that."""
        if digest not in self._unmeasured & self.ledger.resident.keys():
            return None
        self._unmeasured.remove(digest)
        taken = Bytes(self.ledger.resident[digest] + self.model.excess.get(digest, 0))
        demands = self.ledger.measure(digest, taken)
        self.meet([each for each in demands if not isinstance(each, Evict)])
        return next((each for each in demands if isinstance(each, Evict)), None)

    def _refuse(self, session: int, number: int, refused: Evict | Refusal) -> None:
        failure = Failure(
            kind=FailureKind.BUDGET, message=refused.reason, need=refused.need, have=refused.have
        )
        event = InstructionFailed(at=Nanoseconds(0), instruction=number, failure=failure)
        self._answer(session, event)

    def _unload(self, session: int, unload: give.Unload) -> None:
        running = [self._executes[each].digest for each in self.queue.running]
        if self.queue.unload(unload.digest) or unload.digest in running:
            raise self.world.wrong(f"{self.name}: unloaded under its tasks")

        def unloaded() -> None:
            if self._is_in(session):
                self.ledger.unload(unload.digest)
                event = FragmentUnloaded(at=Nanoseconds(0), instruction=unload.instruction)
                self._answer(session, event)

        self.world.later(self.world.delay(), unloaded)

    def _prefetch(self, session: int, prefetch: give.Prefetch) -> None:
        failed = self.world.unlucky(self.world.trouble.load)

        self._moves[prefetch.instruction] = prefetch.digest

        def fetched() -> None:
            if not self._is_in(session) or self._moves.pop(prefetch.instruction, None) is None:
                return
            if failed:
                kind = FailureKind.UNAVAILABLE
                self._fail(session, prefetch.instruction, kind, "not to be had")
                return
            self.cached.add(prefetch.digest)
            event = FragmentCached(at=Nanoseconds(0), instruction=prefetch.instruction)
            self._answer(session, event)

        self.world.later(self.world.chance.uniform(20, 300) * MILLISECOND, fetched)

    def _forward(self, session: int, forward: give.Forward) -> None:
        job, epoch, item = forward.job, forward.epoch, forward.item
        if not self.queue.holds(execution.Made(job, epoch, item, forward.producer)):
            kind = FailureKind.MISSING_ACTIVATION
            self._fail(session, forward.instruction, kind, f"of stage {forward.producer}")
            return

        def pushed(delivered: bool) -> None:
            if delivered:
                event = ActivationForwarded(at=Nanoseconds(0), instruction=forward.instruction)
                self._answer(session, event)
            else:
                kind = FailureKind.UNREACHABLE
                self._fail(session, forward.instruction, kind, f"{forward.target} is not there")

        key = ActivationKey(job, epoch, item, forward.producer, forward.consumer)
        self._push(forward.instruction, key, forward.target, pushed)

    # ---- tasks -------------------------------------------------------------------------------

    def _execute(self, session: int, execute: give.Execute) -> None:
        number, digest = execute.instruction, execute.digest
        if digest not in self.ledger.resident:
            if digest not in self._given_up:
                raise self.world.wrong(f"{self.name}: {digest[7:9]} is not resident")
            self._fail(session, number, FailureKind.NOT_RESIDENT, "given up")
            return
        stage = self.world.specs[execute.job].stages[execute.stage]
        producers = [*stage.predecessors, *([-1] if stage.takes_model_inputs else [])]
        assignment = execution.Assignment(
            instruction=number,
            task=execution.Made(execute.job, execute.epoch, execute.item, execute.stage),
            digest=digest,
            needs=tuple(execution.Need(producer=other, tensors=TENSOR) for other in producers),
            batch=stage.batch,
        )
        self._executes[number] = execute
        if stage.takes_model_inputs:
            self._await_inputs(session, execute)
        self._carry_out(self.queue.submit(assignment))

    def _await_inputs(self, session: int, execute: give.Execute) -> None:
        world, job, item = self.world, execute.job, execute.item
        if (job, item) in world.trouble.unreadable:
            failure = Failure(kind=FailureKind.INVALID_INPUT, message="not an array")
            event = InputUnreadable(at=Nanoseconds(0), job=job, item=item, failure=failure)
            world.feed_later(world.delay(), event)
            return
        key = ActivationKey(job, execute.epoch, item, -1, execute.stage)
        world.later(
            world.delay(), lambda: self.accept(session, key, partial(self._inputs_came, execute))
        )

    def _inputs_came(self, execute: give.Execute, taken: bool) -> None:
        """The coordinator hears whether a task has its inputs."""

    def _carry_out(self, effects: list[execution.Effect]) -> None:
        for effect in effects:
            match effect:
                case execution.Start():
                    self._start_tasks(self.session, effect)
                case execution.Refused(instruction=number, reason=reason, message=message):
                    del self._executes[number]
                    self._fail(self.session, number, FailureKind[reason.name], message)
                case execution.Drop(keys=keys):
                    self._drop(keys)
                case execution.Stop():
                    pass

    def _drop(self, keys: Sequence[execution.Key]) -> None:
        """Nobody needs these tensors any more."""

    def _begin_run(self, starts: Sequence[execution.Start]) -> None:
        """Tasks run now, at once."""

    def _start_tasks(self, session: int, start: execution.Start) -> None:
        """One task, or several at once: some of them do not suit, and some runs fail."""
        world, queue = self.world, self.queue
        others = [each.assignment.instruction for each in start.joined]
        back = [number for number in others if world.chance.random() < 0.2]
        self._carry_out(queue.put_back(back))
        numbers = [start.assignment.instruction, *(each for each in others if each not in back)]
        executes = [self._executes[number] for number in numbers]
        starts = (start, *start.joined)
        self._begin_run([each for each in starts if each.assignment.instruction in numbers])
        compute = int(world.chance.uniform(5, 50) * MILLISECOND * self.model.slowness)
        items = {(each.job, each.item) for each in executes}
        if not items.isdisjoint(world.trouble.poison) and not world.calm:
            world.later(compute, lambda: self.kill(SECOND))

        def ended() -> None:
            if self.queue is not queue or not set(numbers) <= set(queue.running):
                return
            world.together += len(numbers) > 1
            if len(numbers) > 1 and world.chance.random() < 0.2:
                self._carry_out(queue.put_back(numbers, alone=True))
                return
            for execute in executes:
                self._end_task(session, execute, compute)

        world.later(compute, ended)

    def _end_task(self, session: int, execute: give.Execute, compute: int) -> None:
        number = execute.instruction
        self.world.note_run(execute.job, execute.item, execute.stage)
        failure = self._what_failed(execute)
        if failure is None and (demand := self._measure_run(execute.digest)):
            del self._executes[number]
            self._evict(execute.digest)
            self._refuse(session, number, demand)
            effects = self.queue.computed(number, ()) + self.queue.settled(number)
            self._carry_out(effects + self.queue.delivered(number))
            return
        stages = self.world.specs[execute.job].stages
        needed = any(execute.stage in other.predecessors for other in stages)
        del self._executes[number]
        effects = self.queue.computed(number, TENSOR if needed and failure is None else ())
        effects += self.queue.settled(number)
        if failure is None:
            self._deliver(session, execute, compute, lambda: None)
        else:
            self._fail(session, number, failure, "it went wrong")
            effects += self.queue.delivered(number)
        self._carry_out(effects)

    def _what_failed(self, execute: give.Execute) -> FailureKind | None:
        world = self.world
        reason = self.queue.stopped_because(execute.instruction)
        if reason is not None and world.chance.random() < 0.7:
            return FailureKind[reason.name]
        if (execute.job, execute.item) in world.trouble.invalid:
            return FailureKind.INVALID_INPUT
        if world.unlucky(world.trouble.task):
            kinds = (FailureKind.RUNTIME, FailureKind.MISSING_ACTIVATION, FailureKind.DEADLINE)
            return world.chance.choice(kinds)
        return None

    def _deliver(
        self, session: int, execute: give.Execute, compute: int, then: Callable[[], None]
    ) -> None:
        delivered: list[int] = []
        left = [consumer for consumer, _ in execute.routes]

        def answer() -> None:
            if not self._is_in(session) or self.hung:
                return
            self.world.note_result(execute)
            self._answer(
                session,
                TaskFinished(
                    at=Nanoseconds(0),
                    instruction=execute.instruction,
                    compute=Nanoseconds(compute),
                    delivered=tuple(delivered),
                ),
            )
            then()
            self._carry_out(self.queue.delivered(execute.instruction))

        def pushed(consumer: int, came: bool) -> None:
            left.remove(consumer)
            if came:
                delivered.append(consumer)
            if not left:
                answer()

        if not left:
            answer()
        job, epoch, item = execute.job, execute.epoch, execute.item
        for consumer, target in execute.routes:
            key = ActivationKey(job, epoch, item, execute.stage, consumer)
            self._push(execute.instruction, key, target, partial(pushed, consumer))
