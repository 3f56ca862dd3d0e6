"""A world whose coordinator dies, and goes on with what its disk has.

Its dispatcher begins anew, as the real one does: of each job that has not ended, in a new epoch,
with the items whose results are found. Checked besides: that what once counted as stored is found
after every crash, never runs again, and is in the end in its file, once and as it should be.
"""

import random
from dataclasses import replace

from coordinator.dispatch.simulated_link import SECOND, Model
from coordinator.dispatch.simulated_results import Outputs
from coordinator.dispatch.simulated_world import Trouble, World
from lost_power import PowerLost
from shoal_coordinator.dispatch import instructions as give
from shoal_coordinator.dispatch.events import Failure, FailureKind, ItemsStored, JobSpec
from shoal_coordinator.dispatch.machine import new_state
from shoal_protocol.units import Nanoseconds

_CRASHES = (1, 1, 2, 3)
_BATCH = 16


class RestartingWorld(World):
    """A scenario in which the coordinator is killed, or its machine loses power."""

    def __init__(self, seed: int, models: list[Model], trouble: Trouble, outputs: Outputs) -> None:
        super().__init__(seed, models, trouble)
        self._outputs = outputs
        self._finishing: dict[str, list[int]] = {}
        self._failing: dict[str, list[int]] = {}
        self._stored: dict[str, set[int]] = {}
        self.crashes = 0
        self.saved = 0
        """Items that had their results when a coordinator died."""
        chance = random.Random(f"{seed} crashes")  # noqa: S311 (not for secrets)
        for _ in range(chance.choice(_CRASHES)):
            at = chance.uniform(0.3, 6) * SECOND
            self.later(at, outputs.fail_soon)
            self.later(at + chance.uniform(0, 0.5) * SECOND, self._crash)

    # ---- the coordinator's death -------------------------------------------------------------

    def act(self) -> None:
        try:
            super().act()
        except PowerLost:
            self._crash()

    def _crash(self) -> None:
        if self.down or self.calm:
            return
        self.note("-- the coordinator dies")
        self.down, self.crashes = True, self.crashes + 1
        self.life += 1
        self._outputs.lose_power()
        self.state = new_state(self.state.limits)
        self.travels.clear()
        self._results.clear()
        self._finishing.clear()
        self._failing.clear()
        for agent in self.agents.values():
            agent.lose_coordinator()
        self.later(self.chance.uniform(0.1, 3) * SECOND, self._return)

    def _return(self) -> None:
        """The next coordinator begins."""
        self.down = False
        self.note("-- the coordinator is there again")
        for name, spec in list(self.specs.items()):
            if name in self.finished:
                continue
            for key in [key for key in self._ends if key[0] == name]:
                del self._ends[key]
            found = frozenset[int]() if spec.holds else self._open(spec)
            self._completed[name] = found
            super().submit(replace(spec, epoch=spec.epoch + 1), found)

    def _open(self, spec: JobSpec) -> frozenset[int]:
        found, stored = self._outputs.open(spec), self._stored.setdefault(spec.name, set())
        if lost := stored - found:
            raise self.wrong(f"{spec.name}: the results of {sorted(lost)} are lost")
        self.saved += len(found)
        stored |= found  # the crash came between the disk and the event
        return found

    # ---- jobs --------------------------------------------------------------------------------

    def submit(self, spec: JobSpec, completed: frozenset[int] = frozenset()) -> None:
        if self.down:  # who submits tries again
            self.specs.setdefault(spec.name, spec)
            return
        known = self.specs.get(spec.name)
        if known is not None and not spec.holds:
            if spec.name not in self.state.jobs:
                return  # its last item has ended: it is not planned anew
            spec = replace(spec, epoch=max(spec.epoch, known.epoch + 1))
        elif not spec.holds:
            self.specs[spec.name] = spec
            self._open(spec)
            self._outputs.store(spec.name, completed)
            self._stored[spec.name] = set(completed)
        super().submit(spec, completed)

    def stream(self, spec: JobSpec, pauses: object) -> None:
        """Who sends items one after another leaves when the coordinator dies: no case for this."""
        self.submit(spec)

    def carry_out(self, instruction: give.Instruction) -> None:
        if isinstance(instruction, give.Execute | give.Travel):
            name, item = instruction.job, instruction.item
            if item in self._stored[name]:
                raise self.wrong(f"{name}/{item} has its result, and runs again")
        if isinstance(instruction, give.FailItem):
            self._failing.setdefault(instruction.job, []).append(instruction.item)
        super().carry_out(instruction)

    # ---- results -----------------------------------------------------------------------------

    def store(self, job: str, item: int) -> None:
        finishing = self._finishing.setdefault(job, [])
        finishing.append(item)
        if len(finishing) == 1:
            self.later(self.delay(), self.in_life(lambda: self._write(job)))

    def _write(self, job: str) -> None:
        """What a run does with the items that have ended (`JobRun`)."""
        finishing = self._finishing[job]
        items, self._finishing[job] = finishing[:_BATCH], finishing[_BATCH:]
        if self._finishing[job]:
            self.later(self.delay(), self.in_life(lambda: self._write(job)))
        if job in self.finished:
            return
        failing = [item for item in items if self.unlucky(self.trouble.store)]
        items = [item for item in items if item not in failing]
        if problems := self._outputs.store(job, items, self._failing.pop(job, ())):
            raise self.wrong(f"{job}: {problems}")
        self._stored[job].update(items)
        for item in items:
            self._ends[job, item] = "stored"
        at = Nanoseconds(0)
        self.feed(ItemsStored(at=at, job=job, items=tuple(items)))
        failure = Failure(kind=FailureKind.OUTPUT, message="not writable")
        for item in failing:
            self.feed(ItemsStored(at=at, job=job, items=(item,), failure=failure))

    def finish_job(self, job: str, failure: Failure | None) -> None:
        if failure is None and not self.specs[job].holds:
            self.later(self.delay(), self.in_life(lambda: self._complete(job)))
        else:
            super().finish_job(job, failure)

    def _complete(self, job: str) -> None:
        self._outputs.store(job, (), self._failing.pop(job, ()))
        if (problem := self._outputs.complete(job)) is not None:
            raise self.wrong(f"{job} cannot be completed: {problem}")
        super().finish_job(job, None)
        found = self._outputs.found(job)
        if found.keys() != self._stored[job]:
            raise self.wrong(f"{job}: {sorted(found)} are in files, not {self._stored[job]}")
        for item, values in found.items():
            if set(values) != {item}:
                raise self.wrong(f"{job}/{item}: its result is {values}")
