"""Devices of the simulation whose activations take memory, or a place on disk.

What they keep is in the agent's own store, under its ledger, beside the fragments; what has no room
is spilled, refused or given up as the agent does it. Time passes while it is received, sent and
written. Checked at every step: that all in memory is granted, that the ledger and the store agree,
and that what is taken out is what was put in.
"""

import asyncio
import random
import shutil
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np

from coordinator.dispatch.simulated_agent import Agent
from coordinator.dispatch.simulated_link import MILLISECOND, SECOND, TENSOR, Model
from coordinator.dispatch.simulated_world import Trouble, World
from shoal_agent.execution import values as execution
from shoal_agent.memory import residency
from shoal_agent.memory.demands import Demand, MakeRoom, Spill
from shoal_agent.runtime.spilling import Spilling
from shoal_agent.transport.activations import ActivationStore, SpillFull
from shoal_agent.transport.buffers import Buffers
from shoal_coordinator.dispatch import instructions as give
from shoal_coordinator.dispatch.events import (
    ActivationForwarded,
    Failure,
    FailureKind,
    InstructionFailed,
)
from shoal_protocol.bulk.link import ROOM_SECONDS
from shoal_protocol.frame_sizes import frame_bytes
from shoal_protocol.frames import TransferError
from shoal_protocol.tensors import ActivationKey, Array
from shoal_protocol.units import Nanoseconds
from virtual_loop import VirtualLoop

_LEASED_FROM = 1 << 17
_ITEM_BYTES = 4
Meet = Callable[[Sequence[Demand]], None]


class StoringWorld(World):
    """A scenario in which activations have sizes."""

    def __init__(self, seed: int, models: list[Model], trouble: Trouble, folder: Path) -> None:
        self.folder = folder
        self.sizes = random.Random(f"{seed} sizes")  # noqa: S311 (not for secrets)
        self.disk_bytes = self.sizes.choice((16, 64, 1000))
        self.loop = VirtualLoop(
            lambda delay, action: self.later(delay * SECOND, action),
            lambda: self.now / SECOND,
            lambda: self.sizes.uniform(0.1, 30) * MILLISECOND / SECOND,
        )
        self.refusals = self.spills = 0
        self.refused: set[tuple[str, execution.Key]] = set()
        """Devices, and what they had no room for."""
        super().__init__(seed, models, trouble)
        for model in models if self.sizes.random() < 0.5 else ():
            for _ in range(self.sizes.choice((1, 3, 9))):
                at = self.sizes.uniform(0.3, 8) * SECOND
                self.later(at, partial(self._lose_disk, model.name))

    def _lose_disk(self, device: str) -> None:
        """For a while nothing can be written, and then again."""
        if self.calm:
            return
        folder, away = self.folder / device / "activations", self.folder / device / "away"
        if not away.exists():
            self.note(f"-- {device} cannot write")
            folder.rename(away)
            self.later(self.sizes.uniform(0.01, 1) * SECOND, partial(_come_back, folder, away))

    def agent(self, model: Model) -> Agent:
        return StoringAgent(self, model)

    def run(self, until: int, done: Callable[[], bool]) -> None:
        with self.loop.running():
            super().run(until, done)

    def act(self) -> None:
        super().act()
        self.loop.check()

    def check_invariants(self) -> None:
        super().check_invariants()
        for agent in self.agents.values():
            assert isinstance(agent, StoringAgent)
            if broken := list(agent.violations()):
                raise self.wrong(f"{agent.name}: {'; '.join(broken)}")


def _come_back(folder: Path, away: Path) -> None:
    if folder.exists():  # a new session has begun
        shutil.rmtree(away)
    else:
        away.rename(folder)


def content(key: execution.Key) -> Array:
    """What a stage makes of an item; its size is the job's."""
    producer = key.producer if isinstance(key, ActivationKey) else key.stage
    size = 1 + zlib.crc32(key.job.encode()) % 7
    return np.full(size, zlib.crc32(f"{key.job} {key.item} {producer}".encode()) % 251, np.uint8)


class Share:
    """The ledger's share for activations, as `Fragments` has it (a `Space`)."""

    def __init__(self, ledger: residency.Ledger, buffers: Buffers, meet: Meet) -> None:
        self._ledger, self._buffers, self._meet = ledger, buffers, meet
        self.request_space = buffers.request_space
        self.request_move = buffers.request_move
        self.return_space = ledger.return_space
        self.begin_move = ledger.begin_move
        self.changed = asyncio.Event()

    def end_move(self, size: int) -> None:
        self._buffers.end_move(size)
        self.changed.set()

    def arrive(self, size: int) -> None:
        self._meet(self._ledger.arrive(size))
        self.changed.set()


class StoringAgent(Agent):
    """What the device does with memory."""

    world: StoringWorld

    def start_memory(self) -> None:
        self.buffers = Buffers(self.ledger, _LEASED_FROM, lambda: None)
        self.spilling = Spilling(self.ledger, self.buffers, self.meet)
        self.share = Share(self.ledger, self.buffers, self.meet)
        self._one_by_one = asyncio.Lock()
        self._items_here = 0
        self._shrunk = False
        """Its budget has, and what moved has not ended since."""
        self._work: dict[asyncio.Task[None], None] = {}
        self._begin_store()

    def reset_items(self) -> None:
        self._leave_item_room(self._items_here)
        super().reset_items()
        for task in tuple(self._work):
            task.cancel()
        self.store.clear()
        self._begin_store()

    def _begin_store(self) -> None:
        folder = self.world.folder / self.name
        self.store = ActivationStore(folder, self.world.disk_bytes, self.share, self.buffers)
        self.spilling.spill = self.store.spill
        self._taken: dict[int, tuple[execution.Key, ...]] = {}
        """What runs now takes these."""
        self._covered: set[execution.Key] = set()
        self._uncovering: set[execution.Key] = set()
        """What has run took these: they are in its fragment's share until they have a place."""

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        """Do it beside what goes on, until the session ends."""
        task = self.world.loop.create_task(work)
        self._work[task] = None
        task.add_done_callback(lambda ended: self._work.pop(ended, None))

    def meet(self, demands: Sequence[Demand]) -> None:
        for each in demands:
            if isinstance(each, Spill):
                self.world.spills += 1
                self.spilling.begin(each.digest)
        super().meet(demands)

    def change_budget(self, budget: int) -> None:
        self._shrunk |= budget < self.ledger.budget
        super().change_budget(budget)

    def violations(self) -> Iterator[str]:
        """What of the memory is not as the ledger has it."""
        ledger, store = self.ledger, self.store
        over = ledger.fragments + ledger.moving + ledger.reserved - ledger.budget
        self._shrunk = self._shrunk and over > 0
        if over > 0 and not (self.spilling.tasks or self._shrunk):
            yield f"{over} bytes over the budget, and nothing is done about it"
        if not 0 <= store.spilled_bytes <= self.world.disk_bytes:
            yield f"{store.spilled_bytes} bytes on disk"
        granted = 0
        for key, stored in store._stored.items():
            granted += 0 if stored.lent else stored.granted
            counted = stored.granted == stored.size or stored.file is not None
            if not (counted or stored.writing or key in self._covered):
                yield f"{key} is in memory without leave: {stored}"
            if key in self._uncovering and not counted and self.queue.running:
                yield f"{key} has no place yet, and the next task has the memory where it is"
        waiting = self.buffers.waiting_bytes + self.buffers.holes_bytes
        if ledger.reserved != granted + waiting:
            yield f"{ledger.reserved} bytes reserved, for {granted} stored and {waiting} waiting"

    def left(self) -> str:
        """What is there once nothing goes on."""
        store = self.store
        here = [store._stored, store.held_bytes, store.spilled_bytes, self.ledger.moving]
        return str(here) if any(here) else ""

    # ---- loads -------------------------------------------------------------------------------

    def _wait_to_load(self, session: int, load: give.Load, answer: object) -> None:
        self._begin(self._make_room(session, load, answer))

    async def _make_room(self, session: int, load: give.Load, answer: object) -> None:
        try:
            if isinstance(answer, MakeRoom):
                self.world.spills += 1
                await self.spilling.make_room(answer.size)
            else:
                self.share.changed.clear()
                await self.share.changed.wait()
        except SpillFull as error:
            self.world.note(f"-- {self.name} cannot load: {error}")
            self._fail(session, load.instruction, FailureKind.DISK_FULL, str(error))
        else:
            self._load(session, load)

    def _load(self, session: int, load: give.Load) -> None:
        self.buffers.give_back()
        super()._load(session, load)

    # ---- what comes in -----------------------------------------------------------------------

    def accept(self, session: int, key: ActivationKey, then: Callable[[bool], None]) -> None:
        self.world.loop.create_task(self._receive(session, key, then))

    async def _receive(
        self, session: int, key: ActivationKey, then: Callable[[bool], None]
    ) -> None:
        size, store, waited = content(key).nbytes, self.store, 0.0
        buffer = None
        while buffer is None and self._takes(session, key) and waited < ROOM_SECONDS:
            with suppress(SpillFull):
                buffer = store.open_buffer(size, 0) if store.has_room(size) else None
            if buffer is None:
                self.world.refusals += 1
                await asyncio.sleep(min(1, 0.02 + waited))
                waited += min(1, 0.02 + waited)
        if buffer is None:
            self.world.note(f"-- {self.name} takes no {key}")
            self.world.refused.add((self.name, key))
            then(False)
            return
        try:
            array = buffer.allocate(size)
        except TransferError:
            buffer.abandon()
            then(False)
            return
        await asyncio.sleep(self.world.sizes.uniform(0.1, 20) / 1000)
        if not self._takes(session, key):
            buffer.abandon()
            then(False)
            return
        array[:] = content(key)
        store.receive(key, {"tensor": array}, buffer)
        then(self.arrive(session, key))

    def _takes(self, session: int, key: ActivationKey) -> bool:
        stale = self.queue.stale(key.job, key.epoch)
        return self._is_in(session) and not self.hung and not stale

    def _inputs_came(self, execute: give.Execute, taken: bool) -> None:
        """The coordinator has the task forgotten before it says that it failed (`Deliveries`)."""
        if not taken and execute.instruction in self._executes:
            failure = Failure(kind=FailureKind.DISK_FULL, message="not taken")
            number = execute.instruction
            self.receive(give.Cancel(device=self.name, cancelled=number))
            self.world.feed(
                InstructionFailed(at=Nanoseconds(0), instruction=number, failure=failure)
            )

    def _take_item_room(self) -> bool:
        there = self.share.request_move(_ITEM_BYTES)
        self._items_here += there
        self.world.refusals += not there
        self.world.faults += not there  # it begins anew
        return there

    def _leave_item_room(self, count: int) -> None:
        self._items_here -= count
        self.share.end_move(count * _ITEM_BYTES)

    # ---- tasks -------------------------------------------------------------------------------

    def _drop(self, keys: Sequence[execution.Key]) -> None:
        self.store.drop(keys)

    def _begin_run(self, starts: Sequence[execution.Start]) -> None:
        for start in starts:
            keys = tuple(key for key, _ in start.inputs)
            self._taken[start.assignment.instruction] = keys
            if len(starts) == 1:
                for key in keys:
                    self.store.cover(key)
                self._covered.update(keys)

    def _what_failed(self, execute: give.Execute) -> FailureKind | None:
        for key in self._taken[execute.instruction]:
            found = self.store.get(key)
            if found is None:
                return FailureKind.MISSING_ACTIVATION
            if not np.array_equal(found["tensor"], content(key)):
                raise self.world.wrong(f"{self.name}: {key} is {found}")
        return super()._what_failed(execute)

    def _end_task(self, session: int, execute: give.Execute, compute: int) -> None:
        self.world.note_run(execute.job, execute.item, execute.stage)
        self._begin(self._finish(session, execute, compute))

    async def _finish(self, session: int, execute: give.Execute, compute: int) -> None:
        """Store and send what a task made, and answer it (`Tasks`)."""
        number, stages = execute.instruction, self.world.specs[execute.job].stages
        made = execution.Made(execute.job, execute.epoch, execute.item, execute.stage)
        failure, demand = self._what_failed(execute), None
        kept = any(execute.stage in other.predecessors for other in stages)
        if failure is None and (demand := self._measure_run(execute.digest)) is not None:
            self._evict(execute.digest)
        elif failure is None and kept:
            try:
                await self.store.put(made, {"tensor": content(made)})
            except (SpillFull, OSError) as error:
                self.world.note(f"-- {self.name} keeps no {made}: {error}")
                failure = FailureKind.DISK_FULL
        if failure is not None or demand is not None:
            await self._computed(number, ())
            del self._executes[number]
            if demand is not None:
                self._refuse(session, number, demand)
            else:
                assert failure is not None
                self._fail(session, number, failure, "it went wrong")
            self._carry_out(self.queue.delivered(number))
            return
        async with self._leaving(execute, made) as room:
            await self._computed(number, TENSOR if kept else (), in_the_way=not room)
            if not self.queue.holds(made):
                self.store.drop([made])
            del self._executes[number]
            answered = asyncio.Event()
            self._deliver(session, execute, compute, answered.set)
            await answered.wait()

    @asynccontextmanager
    async def _leaving(self, execute: give.Execute, made: execution.Made) -> AsyncIterator[bool]:
        """Room for what a task sends, if there is any, until it has left."""
        size = content(made).nbytes
        sent = frame_bytes(size) * len(execute.routes)
        if execute.routes and not self.store.in_memory(made):
            sent += size
        room = self.share.request_move(sent)
        try:
            with self.store.lend(made):
                yield room
        finally:
            if room:
                self.share.end_move(sent)

    async def _computed(
        self, number: int, kept: frozenset[str] | tuple[()], *, in_the_way: bool = False
    ) -> None:
        self._carry_out(self.queue.computed(number, kept, in_the_way=in_the_way))
        for key in self._taken.pop(number):
            self._covered.discard(key)
            self._uncovering.add(key)
            try:
                await self.store.uncover(key)
            except (SpillFull, OSError) as error:
                self.world.note(f"-- {self.name} drops {key}: {error}")
            finally:
                self._uncovering.discard(key)
        self._carry_out(self.queue.settled(number))

    def _forward(self, session: int, forward: give.Forward) -> None:
        self._begin(self._forward_kept(session, forward))

    async def _forward_kept(self, session: int, forward: give.Forward) -> None:
        made = execution.Made(forward.job, forward.epoch, forward.item, forward.producer)
        key = ActivationKey(*made[:3], forward.producer, forward.consumer)
        ended = asyncio.get_running_loop().create_future()
        with self.store.lend(made) as held:
            if held is None:
                kind = FailureKind.MISSING_ACTIVATION
                self._fail(session, forward.instruction, kind, f"of stage {forward.producer}")
                return
            if not np.array_equal(held["tensor"], content(made)):
                raise self.world.wrong(f"{self.name}: {made} is {held}")
            async with self._room_to_send(frame_bytes(content(made).nbytes)):
                self._push(forward.instruction, key, forward.target, ended.set_result)
                delivered = await ended
        if delivered:
            event = ActivationForwarded(at=Nanoseconds(0), instruction=forward.instruction)
            self._answer(session, event)
        else:
            full = (forward.target, key) in self.world.refused
            kind = FailureKind.DISK_FULL if full else FailureKind.UNREACHABLE
            self._fail(session, forward.instruction, kind, f"{forward.target} takes nothing")

    @asynccontextmanager
    async def _room_to_send(self, size: int) -> AsyncIterator[None]:
        if self.share.request_move(size):
            try:
                yield
            finally:
                self.share.end_move(size)
        else:
            async with self._one_by_one:
                yield
