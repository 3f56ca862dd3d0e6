"""How many tasks a second the dispatcher's core takes, with devices that answer at once.

A task is everything that it costs the core: the events that admit, answer and store it, and the
instructions that they bring; and its share of ticks and readings, which come as often as they
would if the core were what bounds the pool: time passes as the core works. The cost is to be the
same for ten devices and for a thousand. The process is set up as a coordinator's is.

    python bench/dispatch_load.py [--devices N ...] [--tasks N] [--policy NAME ...]
"""

import argparse
import gc
import hashlib
import time
from collections import deque
from dataclasses import dataclass

from shoal_coordinator.dispatch.events import (
    ActivationForwarded,
    DeviceJoined,
    DeviceTelemetry,
    Event,
    FragmentCached,
    FragmentResident,
    FragmentUnloaded,
    ItemsStored,
    JobSpec,
    JobSubmitted,
    Policy,
    Stage,
    TaskFinished,
    Telemetry,
    Tick,
)
from shoal_coordinator.dispatch.instructions import (
    Execute,
    FinishItem,
    FinishJob,
    Forward,
    Instruction,
    Load,
    Prefetch,
    Unload,
)
from shoal_coordinator.dispatch.machine import new_state, step
from shoal_coordinator.server.server import collect_rarely
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes, Nanoseconds

_TICK_NS = 250_000_000
_TICKS_A_READING = 8
"""A device tells its readings every two seconds."""
_TASK_NS = 10_000_000


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run took."""

    devices: int
    tasks: int
    steps: int
    seconds: float

    @property
    def tasks_per_second(self) -> float:
        """Tasks by the core's own time."""
        return self.tasks / self.seconds

    @property
    def steps_per_second(self) -> float:
        """Events by the core's own time."""
        return self.steps / self.seconds


def measure(
    devices: int,
    tasks: int,
    *,
    stages: int = 4,
    policy: Policy = Policy.FIFO,
    homes: bool = True,
) -> Measurement:
    """Run one job of `tasks` tasks (items times stages) on as many devices, and time the core.

    With `homes`, each device is the home of one stage; without, every device may serve every stage.
    """
    state = new_state()
    clock = 0
    for index in range(devices):
        step(state, _joined(index, Nanoseconds(clock)))
    names = [f"device-{index}" for index in range(devices)] if homes else []
    spec = _job(stages, names, tasks // stages, policy)
    for index in range(devices):
        step(state, _telemetry(index, Nanoseconds(clock)))
    queue: deque[Event] = deque([JobSubmitted(at=Nanoseconds(clock), job=spec)])
    ticked = ticks = spent = steps = 0
    collect_rarely()
    gc.collect()
    while queue:
        clock = spent
        if clock - ticked >= _TICK_NS:
            ticked = clock
            queue.append(Tick(at=Nanoseconds(clock)))
            some = range(ticks % _TICKS_A_READING, devices, _TICKS_A_READING)
            queue.extend(_telemetry(index, Nanoseconds(clock)) for index in some)
            ticks += 1
        batch = list(queue)
        queue.clear()
        start = time.thread_time_ns()
        given = [step(state, event) for event in batch]
        spent += time.thread_time_ns() - start
        steps += len(batch)
        done = False
        for instructions in given:
            for instruction in instructions:
                done = done or isinstance(instruction, FinishJob)
                answer = _answer(instruction, Nanoseconds(clock))
                if answer is not None:
                    queue.append(answer)
        if done:
            break
    job = state.ended["load"]
    assert job.succeeded == spec.items, f"{job.succeeded} of {spec.items} items: {job.failure}"
    return Measurement(devices, spec.items * stages, steps, spent / 1e9)


def _job(stages: int, names: list[str], items: int, policy: Policy) -> JobSpec:
    """A chain; each of the devices named is the home of one stage."""
    return JobSpec(
        name="load",
        stages=tuple(
            Stage(
                digest=_digest(index),
                resident_bytes=Bytes(1 << 20),
                least_bytes=Bytes(1 << 20),
                predecessors=(index - 1,) if index else (),
                takes_model_inputs=not index,
                gives_results=index == stages - 1,
                homes=tuple(names[index::stages]),
            )
            for index in range(stages)
        ),
        items=items,
        epoch=1,
        policy=policy,
    )


def _digest(index: int) -> Digest:
    return Digest("sha256:" + hashlib.sha256(str(index).encode()).hexdigest())


def _joined(index: int, at: Nanoseconds) -> DeviceJoined:
    return DeviceJoined(at=at, device=f"device-{index}", session=index + 1, budget=Bytes(16 << 20))


def _telemetry(index: int, at: Nanoseconds) -> DeviceTelemetry:
    salt = (index * 7919 + at) % 97
    return DeviceTelemetry(
        at=at,
        device=f"device-{index}",
        session=index + 1,
        telemetry=Telemetry(
            cpu_fraction=salt / 97,
            memory_available=Bytes((1 + salt) << 20),
            round_trip=Nanoseconds(1_000_000 + salt),
        ),
    )


def _answer(instruction: Instruction, at: Nanoseconds) -> Event | None:
    answer: Event | None = None
    match instruction:
        case Execute(instruction=number, routes=routes):
            delivered = tuple([consumer for consumer, _ in routes])
            compute = Nanoseconds(_TASK_NS)
            answer = TaskFinished(at=at, instruction=number, compute=compute, delivered=delivered)
        case FinishItem(job=job, item=item):
            answer = ItemsStored(at=at, job=job, items=(item,))
        case Forward(instruction=number):
            answer = ActivationForwarded(at=at, instruction=number)
        case Load(instruction=number, granted=granted):
            answer = FragmentResident(at=at, instruction=number, resident=granted)
        case Unload(instruction=number):
            answer = FragmentUnloaded(at=at, instruction=number)
        case Prefetch(instruction=number):
            answer = FragmentCached(at=at, instruction=number)
        case _:
            pass  # the others have no answer
    return answer


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--devices", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--policy", nargs="*", default=[policy.value for policy in Policy])
    parser.add_argument("--anywhere", action="store_true", help="no homes: any device, any stage")
    options = parser.parse_args()
    print(f"{'policy':12} {'devices':>8} {'tasks':>8} {'tasks/s':>10} {'steps/s':>10}")
    for name in options.policy:
        for devices in options.devices:
            result = measure(
                devices, options.tasks, policy=Policy(name), homes=not options.anywhere
            )
            print(
                f"{name:12} {devices:8} {result.tasks:8} {result.tasks_per_second:10.0f}"
                f" {result.steps_per_second:10.0f}"
            )


if __name__ == "__main__":
    main()
