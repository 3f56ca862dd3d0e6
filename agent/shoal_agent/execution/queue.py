"""The queue of tasks on one device: which task runs next, and what each one waits for.

A task is *waiting* until every tensor that it takes is here, then *ready*; one task at a time is
*running*, or several at once of one fragment; after that it is *delivering* its outputs, while the
next one runs already, as soon as what the first one took has *settled*; when it has been answered
the queue forgets it.

    waiting --inputs here--> ready --device free--> running --> delivering --> answered
       |                       |                       |
       +------ cancelled, deadline, older epoch -------+------> answered with a reason

Rules:

- Ready tasks run in the order in which they came; a waiting one never holds up a ready one.
- With a task start those that are ready now for the same fragment, up to the `batch` of each. None
  is waited for. Where they did not run, they are put back to where they were, to run with others
  later, or *alone*.
- Inputs that later stages need too lie in the fragment's share of the budget while their task runs,
  and nothing runs after it until they have places of their own.
- At most `DELIVERING_LIMIT` tasks deliver at once: a slow link holds up the processor, not the
  memory. Those with small outputs, of which many leave as one message, have a limit of their own,
  `SMALL_LIMIT`. Outputs that found no room of their own lie in their fragment's share until they
  are delivered, and nothing runs meanwhile.
- Tensors come in two ways. *Received*: sent here for one consumer, used up by its task. *Kept*:
  made here, needed by any number of consumers, until they are released.
- Epochs: a message of a job's newer epoch voids everything of its older ones; a message of an older
  epoch is refused.
- Every submitted task is answered exactly once. A queue belongs to one session: when that breaks,
  the queue is left behind with everything in it.

Time enters as nanoseconds of any steady clock. The tensors themselves live elsewhere, under the
keys used here; the effects say which to drop.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from shoal_agent.execution.values import (
    Assignment,
    Drop,
    Effect,
    Key,
    Made,
    Need,
    Reason,
    Refused,
    Start,
    Stop,
)
from shoal_protocol.partition import MODEL
from shoal_protocol.tensors import ActivationKey
from shoal_protocol.units import Nanoseconds

DELIVERING_LIMIT: Final = 4
SMALL_LIMIT: Final = 24
UNCLAIMED_LIFETIME: Final = Nanoseconds(600_000_000_000)
"""How long received tensors wait for a task that takes them."""
UNCLAIMED_INPUTS_LIFETIME: Final = Nanoseconds(30_000_000_000)
"""The same of a model's inputs. Their task was given when they left; a session that has not brought
it for so long is over. What comes later than the end of its task would keep room from others."""
_KNOWN_JOBS: Final = 4096


@dataclass(slots=True)
class _Running:
    assignment: Assignment
    inputs: tuple[tuple[Key, frozenset[str]], ...]
    stopped: Reason | None = None


@dataclass(slots=True)
class _Held:
    """Tensors that are here under one key."""

    tensors: frozenset[str]
    expires: Nanoseconds | None = None


@dataclass(slots=True)
class TaskQueue:
    """The machine. Each method takes one event and returns the effects, to be done in order."""

    _queued: dict[int, Assignment] = field(default_factory=dict)
    _ready: set[int] = field(default_factory=set)
    _running: dict[int, _Running] = field(default_factory=dict)
    _alone: set[int] = field(default_factory=set)
    _settling: set[int] = field(default_factory=set)
    _delivering: dict[int, Made] = field(default_factory=dict)
    _small: set[int] = field(default_factory=set)
    _in_the_way: set[int] = field(default_factory=set)
    _held: dict[Key, _Held] = field(default_factory=dict)
    _consumers: dict[Made, set[int]] = field(default_factory=dict)
    _wanted: dict[tuple[str, int, int], set[int]] = field(default_factory=dict)
    _epochs: OrderedDict[str, int] = field(default_factory=OrderedDict)

    # ---- what the telemetry and the session ask ----------------------------------------------

    @property
    def queued(self) -> int:
        """Tasks that wait or are ready."""
        return len(self._queued)

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing is being delivered."""
        return not self._running and not self._delivering

    @property
    def running(self) -> tuple[int, ...]:
        """The instructions that run."""
        return tuple(self._running)

    def stale(self, job: str, epoch: int) -> bool:
        return epoch < self._epochs.get(job, 0)

    def holds(self, key: Key) -> bool:
        return key in self._held

    def next_deadline(self) -> Nanoseconds | None:
        tasks = list(self._queued.values())
        tasks += [each.assignment for each in self._running.values() if each.stopped is None]
        return min((task.deadline for task in tasks if task.deadline is not None), default=None)

    # ---- events ------------------------------------------------------------------------------

    def submit(self, assignment: Assignment) -> list[Effect]:
        task = assignment.task
        if self.stale(task.job, task.epoch):
            return [
                Refused(
                    instruction=assignment.instruction,
                    reason=Reason.CANCELLED,
                    message=self._is_over(task),
                )
            ]
        effects = self._meet(task.job, task.epoch)
        self._queued[assignment.instruction] = assignment
        self._wanted.setdefault(_item(task), set()).add(assignment.instruction)
        self._promote(assignment)
        return effects + self._next()

    def arrive(
        self, at: Nanoseconds, key: ActivationKey, tensors: Iterable[str]
    ) -> list[Effect] | None:
        """Tensors were sent here. None: they are of an older epoch, and not taken."""
        if self.stale(key.job, key.epoch):
            return None
        effects = self._meet(key.job, key.epoch)
        inputs = key.producer == MODEL
        lifetime = UNCLAIMED_INPUTS_LIFETIME if inputs else UNCLAIMED_LIFETIME
        expires = Nanoseconds(at + lifetime)
        self._held[key] = _Held(frozenset(tensors), expires)
        producer = Made(key.job, key.epoch, key.item, key.producer)
        self._consumers.setdefault(producer, set()).add(key.consumer)
        self._promote_item((key.job, key.epoch, key.item))
        return effects + self._next()

    def computed(
        self,
        instruction: int,
        kept: Iterable[str] = (),
        *,
        in_the_way: bool = False,
        small: bool = False,
    ) -> list[Effect]:
        """A running task has run, or failed; `kept` are the outputs that later stages need. What it
        took has yet to be `settled`.

        `in_the_way`: what it delivers has no room of its own, so nothing runs until it has.
        `small`: it is little.
        """
        running = self._running.pop(instruction)
        self._forget(running.assignment)
        self._settling.add(instruction)
        self._delivering[instruction] = running.assignment.task
        if in_the_way:
            self._in_the_way.add(instruction)
        if small:
            self._small.add(instruction)
        effects = self._use_up(running.assignment)
        names = frozenset(kept)
        task = running.assignment.task
        if names and not self.stale(task.job, task.epoch):
            self._held[task] = _Held(names)
            self._promote_item(_item(task))
        return effects

    def settled(self, instruction: int) -> list[Effect]:
        """What a task took that has run is gone, or has a place of its own."""
        self._settling.discard(instruction)
        return self._next()

    def delivered(self, instruction: int) -> list[Effect]:
        self._delivering.pop(instruction, None)
        self._in_the_way.discard(instruction)
        self._small.discard(instruction)
        return self._next()

    def put_back(self, instructions: Iterable[int], *, alone: bool = False) -> list[Effect]:
        """These were to run at once with others, and have not run: they wait again, before the
        others; one that was stopped meanwhile is answered. `alone`: each is to run by itself."""
        back = [self._running.pop(instruction) for instruction in instructions]
        assignments = {each.assignment.instruction: each.assignment for each in back}
        self._queued = assignments | self._queued
        if alone:
            self._alone.update(assignments)
        effects: list[Effect] = []
        for each in back:
            if each.stopped is None:
                self._promote(each.assignment)
            else:  # what it took of the time of others is not its own
                number, message = each.assignment.instruction, "stopped while it ran with others"
                effects += self._give_up(number, Reason.CANCELLED, message)
        return effects + self._next()

    def stopped_because(self, instruction: int) -> Reason | None:
        running = self._running.get(instruction)
        return None if running is None else running.stopped

    def cancel(self, instruction: int) -> list[Effect]:
        """Give up one task, wherever it is; one that has run already is still delivered."""
        return self._give_up(instruction, Reason.CANCELLED, "cancelled")

    def void(self, job: str, epoch: int) -> list[Effect]:
        """Give up everything of a job below an epoch."""
        return self._meet(job, epoch) + self._next()

    def release(self, tasks: Iterable[Made]) -> list[Effect]:
        """What these tasks made is not needed any more, nor what of it was sent here unclaimed."""
        keys: list[Key] = []
        for task in tasks:
            keys.append(task)
            claimed = {
                need.producer
                for instruction in self._wanted.get(_item(task), ())
                for need in self._assignment(instruction).needs
            }
            if task.stage not in claimed:
                consumers = self._consumers.get(task, ())
                keys += [
                    ActivationKey(*_item(task), task.stage, consumer) for consumer in consumers
                ]
        return self._drop(keys)

    def unload(self, digest: str) -> list[Effect]:
        """The fragment is about to go: tasks that wait for it are answered. (One may still run.)"""
        gone = [task.instruction for task in self._queued.values() if task.digest == digest]
        effects: list[Effect] = []
        for instruction in gone:
            effects += self._give_up(instruction, Reason.NOT_RESIDENT, "the fragment was unloaded")
        return effects

    def tick(self, at: Nanoseconds) -> list[Effect]:
        """Time has passed: deadlines, and tensors that nobody claimed."""
        if not (self._queued or self._running or self._held):
            return []
        effects: list[Effect] = []
        for task in self._tasks():
            if task.deadline is not None and at >= task.deadline:
                # A ready task is not to blame: others had the processor.
                ready = task.instruction in self._ready
                reason = Reason.CANCELLED if ready else Reason.DEADLINE
                message = f"the deadline passed {self._waits_for(task)}"
                effects += self._give_up(task.instruction, reason, message)
        old = {key for key, each in self._held.items() if each.expires and at >= each.expires}
        expired = old.difference(self._keys_in_use(), self._keys_claimed()) if old else old
        return effects + self._drop(expired) + self._next()

    # ---- inside ------------------------------------------------------------------------------

    def _meet(self, job: str, epoch: int) -> list[Effect]:
        """Note an epoch; a newer one voids what is older."""
        known = self._epochs.get(job)
        self._epochs[job] = max(epoch, known or 0)
        self._epochs.move_to_end(job)
        if len(self._epochs) > _KNOWN_JOBS:
            self._epochs.popitem(last=False)
        if known is None or epoch <= known:
            return []
        effects: list[Effect] = []
        for task in self._tasks():
            if task.task.job == job and task.task.epoch < epoch:
                message = self._is_over(task.task)
                effects += self._give_up(task.instruction, Reason.CANCELLED, message)
        in_use = set(self._keys_in_use())
        old = [
            key for key in self._held if key.job == job and key.epoch < epoch and key not in in_use
        ]
        return effects + self._drop(old)

    def _tasks(self) -> list[Assignment]:
        return [*self._queued.values(), *(each.assignment for each in self._running.values())]

    def _assignment(self, instruction: int) -> Assignment:
        if instruction in self._queued:
            return self._queued[instruction]
        return self._running[instruction].assignment

    def _source(self, task: Made, need: Need) -> Key | None:
        """The key under which it is here: what was made here, else what was sent."""
        item = _item(task)
        for key in (Made(*item, need.producer), ActivationKey(*item, need.producer, task.stage)):
            held = self._held.get(key)
            if held is not None and need.tensors <= held.tensors:
                return key
        return None

    def _waits_for(self, assignment: Assignment) -> str:
        missing = [n for n in assignment.needs if self._source(assignment.task, n) is None]
        if not missing:
            return "in the queue"
        names = ", ".join(f"stage {need.producer}" for need in missing).replace(
            "stage -1", "the model's inputs"
        )
        return f"while waiting for activations of {names}"

    def _promote(self, assignment: Assignment) -> None:
        for need in assignment.needs:
            if self._source(assignment.task, need) is None:
                return
        self._ready.add(assignment.instruction)

    def _promote_item(self, item: tuple[str, int, int]) -> None:
        for instruction in sorted(self._wanted.get(item, ())):
            if instruction in self._queued and instruction not in self._ready:
                self._promote(self._queued[instruction])

    def _next(self) -> list[Effect]:
        if self._running or self._settling or self._in_the_way:
            return []
        small = len(self._small)
        if len(self._delivering) - small >= DELIVERING_LIMIT or small >= SMALL_LIMIT:
            return []
        while self._ready:
            first = next(each for each in self._queued if each in self._ready)
            if (start := self._begin(self._queued[first])) is not None:
                joined = tuple(self._begin_with(start.assignment))
                return [replace(start, joined=joined) if joined else start]
        return []

    def _begin(self, assignment: Assignment) -> Start | None:
        """Have a ready task run; None: what it takes was released under it, and it waits again."""
        self._ready.discard(assignment.instruction)
        task = assignment.task
        sources = [(self._source(task, need), need.tensors) for need in assignment.needs]
        inputs = tuple((key, names) for key, names in sources if key is not None)
        if len(inputs) < len(sources):
            return None
        del self._queued[assignment.instruction]
        self._running[assignment.instruction] = _Running(assignment, inputs)
        return Start(assignment=assignment, inputs=inputs)

    def _begin_with(self, first: Assignment) -> Iterator[Start]:
        """What is ready for the same fragment."""
        most = 1 if first.instruction in self._alone else first.batch
        if most < 2:
            return
        ready = self._ready - self._alone
        others = [self._queued[each] for each in self._queued if each in ready]
        for other in others:
            most = min(most, other.batch) if other.digest == first.digest else most
            if len(self._running) >= most:
                return
            if other.digest == first.digest and (start := self._begin(other)) is not None:
                yield start

    def _give_up(self, instruction: int, reason: Reason, message: str) -> list[Effect]:
        running = self._running.get(instruction)
        if running is not None:
            if running.stopped is not None:
                return []
            running.stopped = reason
            return [Stop(instruction=instruction)]
        if (assignment := self._queued.pop(instruction, None)) is None:
            return []
        self._ready.discard(instruction)
        self._forget(assignment)
        refusal = Refused(instruction=instruction, reason=reason, message=message)
        return [refusal, *self._use_up(assignment)]

    def _use_up(self, assignment: Assignment) -> list[Effect]:
        """Drop what was sent for this task, unless another try of it waits here as well."""
        task = assignment.task
        if any(self._assignment(other).task == task for other in self._wanted.get(_item(task), ())):
            return []
        return self._drop(
            ActivationKey(task.job, task.epoch, task.item, need.producer, task.stage)
            for need in assignment.needs
        )

    def _forget(self, assignment: Assignment) -> None:
        self._alone.discard(assignment.instruction)
        item = _item(assignment.task)
        if (wanted := self._wanted.get(item)) is not None:
            wanted.discard(assignment.instruction)
            if not wanted:
                del self._wanted[item]

    def _keys_in_use(self) -> Iterator[Key]:
        for running in self._running.values():
            yield from (key for key, _ in running.inputs)

    def _keys_claimed(self) -> Iterator[Key]:
        """What is here for tasks that wait for more."""
        for assignment in self._queued.values():
            sources = (self._source(assignment.task, need) for need in assignment.needs)
            yield from (key for key in sources if key is not None)

    def _drop(self, keys: Iterable[Key]) -> list[Effect]:
        gone = tuple([key for key in keys if self._held.pop(key, None) is not None])
        for key in gone:
            if isinstance(key, ActivationKey):
                producer = Made(key.job, key.epoch, key.item, key.producer)
                consumers = self._consumers[producer]
                consumers.discard(key.consumer)
                if not consumers:
                    del self._consumers[producer]
        return [Drop(keys=gone)] if gone else []

    def _is_over(self, task: Made) -> str:
        known = self._epochs[task.job]
        return f"epoch {task.epoch} of job {task.job} is over; it is {known} now"


def _item(task: Made) -> tuple[str, int, int]:
    return task.job, task.epoch, task.item
