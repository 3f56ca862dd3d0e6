"""The first fragment on every device that has room, against the plan's devices alone.

CROWDio ("JIT Loading") sends the smallest, first fragment to all workers at the start, since it
has no plan. Here the real planner places random chains on random pools, and the real dispatcher
runs them in virtual time (`virtual_runs.py`). Compared are the makespans of a job that is submitted
with

- the plan's devices (the reference),
- those, and every device that the plan leaves idle and that has room, for the first fragment,
- those, and every device that has room beside what it serves, for the first fragment,
- no devices at all: the first fragment everywhere, the others just in time.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from statistics import geometric_mean, median

from measurement import Measurement, Report, parse_arguments
from virtual_runs import Homes, Shelf, VirtualRun, random_shelf

from shoal_planner.device_costs import Holding
from shoal_planner.outcome import Plan
from shoal_planner.placement import plan
from shoal_protocol.choices import Objective


def with_first(shelf: Shelf, homes: Homes, *, idle_only: bool) -> Homes:
    """The plan's homes, and for the first fragment whoever has room beside what it serves."""
    fragments = shelf.document.fragments
    serves = {
        device.name: sum(
            each.resident_bytes
            for each, names in zip(fragments, homes, strict=True)
            if device.name in names
        )
        for device in shelf.pool
    }
    more = tuple(
        device.name
        for device in shelf.pool
        if device.name not in homes[0]
        and serves[device.name] + fragments[0].resident_bytes <= device.budget_bytes
        and not (idle_only and serves[device.name])
    )
    return (homes[0] + more, *homes[1:])


WAYS: dict[str, Callable[[Shelf, Homes], Homes]] = {
    "on idle devices too": lambda shelf, homes: with_first(shelf, homes, idle_only=True),
    "wherever there is room": lambda shelf, homes: with_first(shelf, homes, idle_only=False),
    "everywhere, without a plan": lambda shelf, homes: (),
}


def compare(shelves: int, items: int) -> Iterator[Measurement]:
    """Makespans and bytes fetched, as ratios to those with the plan's homes."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    fetched: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(shelves):
        shelf = random_shelf(random.Random(seed))  # noqa: S311 - nothing secret
        placed = plan(shelf.document, shelf.pool, Objective.THROUGHPUT)
        if not isinstance(placed, Plan) or any(
            stage.held(Holding.RELOADED) for stage in placed.stages
        ):
            continue
        homes = placed.homes()
        reference = VirtualRun(shelf, homes)
        seconds = reference.run(items)
        for way, change in WAYS.items():
            changed = change(shelf, homes)
            if changed != homes:
                run = VirtualRun(shelf, changed)
                times[way].append(run.run(items) / seconds)
                fetched[way].append(run.fetched_bytes / reference.fetched_bytes)
    for way, ratios in times.items():
        yield from _told(f"{items} items, first fragment {way}", ratios, fetched[way])


def _told(name: str, ratios: Sequence[float], fetched: Sequence[float]) -> Iterator[Measurement]:
    of = f"of the plan's ({len(ratios)} pools)"
    faster = sum(ratio < 0.99 for ratio in ratios) / len(ratios)
    slower = sum(ratio > 1.01 for ratio in ratios) / len(ratios)
    yield Measurement(name=f"{name}: makespan", value=geometric_mean(ratios), unit=of)
    yield Measurement(name=f"{name}: median makespan", value=median(ratios), unit=of)
    yield Measurement(name=f"{name}: faster by 1 %", value=faster, unit="share of pools")
    yield Measurement(name=f"{name}: slower by 1 %", value=slower, unit="share of pools")
    yield Measurement(name=f"{name}: bytes fetched", value=geometric_mean(fetched), unit=of)


def main() -> None:
    """Run over so many random pools."""
    report = Report(parse_arguments(__doc__))
    for items in (5, 100):
        for measurement in compare(60 if report.quick else 400, items):
            report.add(measurement)
    report.finish()


if __name__ == "__main__":
    main()
