"""What Shoal itself costs: a hop between two agents, and the dispatcher's work for a task.

python bench/overhead.py [--part hop|dispatch] [--quick] [--json FILE]
"""

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median

from dispatch_load import measure
from hop import hops
from measurement import (
    RATIO,
    VALUE,
    Measurement,
    Report,
    alternate,
    argument_parser,
    compared,
    shared,
)

from shoal_coordinator.dispatch.events import Policy

FEW_DEVICES = 10


def dispatch(*, quick: bool) -> Iterator[Measurement]:
    """Tasks a second that the dispatcher's core takes; the cost must not grow with the devices."""
    yield from _dispatch(Policy.FIFO, (FEW_DEVICES, 100, 1000), quick=quick)
    yield from _dispatch(Policy.MABAC, (FEW_DEVICES, 1000), quick=quick)


def _dispatch(policy: Policy, pools: Sequence[int], *, quick: bool) -> Iterator[Measurement]:
    tasks = 20_000 if quick else 100_000
    steps_per_task: dict[int, float] = {}

    def seconds_per_task(devices: int) -> float:
        run = measure(devices, tasks, policy=policy)
        steps_per_task[devices] = run.steps / run.tasks
        return run.seconds / run.tasks

    subjects = {str(devices): partial(seconds_per_task, devices) for devices in pools}
    costs = alternate(subjects, turns=3)
    for devices, steps in steps_per_task.items():
        cost = median(costs[str(devices)])
        name = f"dispatch of {tasks:,} tasks to {devices:,} devices, {policy.value}"
        yield Measurement(name=name, value=1 / cost, unit="tasks/s", goal=VALUE >= 20_000)
        yield Measurement(name=f"{name}: steps", value=steps / cost, unit="steps/s")
        if devices != FEW_DEVICES:
            yield compared(
                f"{name}: a task, against {FEW_DEVICES} devices",
                costs[str(devices)],
                costs[str(FEW_DEVICES)],
                unit="s",
                goal=RATIO <= 1.2,
            )


PARTS = {"hop": hops, "dispatch": dispatch}


def main() -> None:
    """Run the parts that were asked for."""
    parser = argument_parser(__doc__)
    parser.add_argument("--part", choices=sorted(PARTS), help="one part only")
    options = parser.parse_args()
    report = Report(shared(options))
    for name, part in PARTS.items():
        if options.part in (None, name):
            for measurement in part(quick=report.quick):
                report.add(measurement)
    report.finish()


if __name__ == "__main__":
    main()
