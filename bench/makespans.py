"""What the planner predicts of whole jobs, against the real dispatcher in virtual time.

The real dispatcher runs random chains on random pools (`virtual_runs.py`), over devices that take
as long for each step as the planner's model says. What is compared is thus how the model puts the
steps together: what waits for what, and what goes on at once.

- *Makespans*, as planned, on devices that have nothing yet: with room for what they serve, and on
  one to three that are too small for the model, so that they load fragments in turn; and on one
  or two that hold one fragment at a time.
- *Stages in turn*: a chain divided between two devices that both load their fragments in turn. The
  time from one item to the next.
- *Replicas in turn*: the same of two devices that share the items of the whole chain; and how that
  compares with the better one of the two by itself.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

from measurement import VALUE, Measurement, Report, measured, parse_arguments
from virtual_runs import MIB, Homes, Shelf, VirtualRun, random_shelf

from shoal_planner.costs import Costs, Division, Span
from shoal_planner.device_costs import Holding
from shoal_planner.goal import Goal
from shoal_planner.outcome import Plan
from shoal_planner.placement import plan
from shoal_protocol.choices import Objective
from shoal_protocol.units import Bytes, Nanoseconds, seconds

SMALL = Bytes(44 * MIB)
"""Any fragment fits, most chains do not."""
ITEMS = (4, 16, 100)
_FEW, _MANY = 40, 120
"""Items of two jobs: what the second takes more is the steady time of the others."""


def makespans(shelves: Iterator[Shelf], items: int) -> Iterator[float]:
    """The errors of the predictions, as parts of what was measured."""
    goal = Goal(Objective.MAKESPAN, items)
    for shelf in shelves:
        placed = plan(shelf.document, shelf.pool, goal.objective, items=items)
        if not isinstance(placed, Plan):
            continue
        assert placed.period_nanoseconds is not None
        assert placed.latency_nanoseconds is not None
        value = goal.value(placed.period_nanoseconds, placed.latency_nanoseconds)
        yield _error(value, VirtualRun(shelf, placed.homes()).run(items))


def turns(shelves: Iterator[Shelf]) -> Iterator[float]:
    """The errors of the predicted period, as parts of what was measured."""
    for shelf in shelves:
        costs, (one, other, *_) = Costs(shelf.document), shelf.pool
        for border in range(1, costs.count):
            parts = (Span(0, border), one), (Span(border, costs.count), other)
            if any(costs.holding(*part) is not Holding.RELOADED for part in parts):
                continue
            homes = tuple((device.name,) for span, device in parts for _ in span.fragments)
            period, _ = costs.totals([Division(span, (device,)) for span, device in parts])
            yield _error(period, _steady(shelf, homes))


def replicas(shelves: Iterator[Shelf]) -> Iterator[tuple[float, float]]:
    """The errors of the predicted period, and the period as a part of that of the better one."""
    for shelf in shelves:
        costs, pair = Costs(shelf.document), shelf.pool[:2]
        whole = Span(0, costs.count)
        if any(costs.holding(whole, each) is not Holding.RELOADED for each in pair):
            continue
        better = min(pair, key=lambda device: costs.on(whole, device).period)
        together, alone = (
            _steady(shelf, (tuple(each.name for each in devices),) * costs.count)
            for devices in (pair, (better,))
        )
        yield _error(costs.period(Division(whole, pair)), together), together / alone


def _steady(shelf: Shelf, homes: Homes) -> float:
    """Seconds from one item to the next."""
    few, many = (VirtualRun(shelf, homes).run(items) for items in (_FEW, _MANY))
    return (many - few) / (_MANY - _FEW)


def _error(predicted: int, took: float) -> float:
    return abs(seconds(Nanoseconds(predicted)) / took - 1)


def random_shelves(count: int) -> Iterator[Shelf]:
    return (random_shelf(random.Random(seed)) for seed in range(count))  # noqa: S311 - no secret


def small_shelves(count: int, devices: int) -> Iterator[Shelf]:
    """With so many devices, each of them small."""
    for shelf in random_shelves(count):
        small = tuple(replace(each, budget_bytes=SMALL) for each in shelf.pool[:devices])
        yield replace(shelf, pool=small)


def single_shelves(count: int, devices: int) -> Iterator[Shelf]:
    """With so many devices, each with residency Single."""
    for shelf in random_shelves(count):
        single = tuple(replace(each, single=True) for each in shelf.pool[:devices])
        yield replace(shelf, pool=single)


def main() -> None:
    """Over so many random pools."""
    report = Report(parse_arguments(__doc__))
    count = 60 if report.quick else 400
    for items in ITEMS:
        found = list(makespans(random_shelves(count), items))
        report.add(_measured(f"{items} items from nothing: error of the makespan", found))
        report.add(_within(f"{items} items from nothing", found))
        small = [
            error for n in (1, 2, 3) for error in makespans(small_shelves(count // 3, n), items)
        ]
        report.add(_measured(f"{items} items on small devices: error of the makespan", small))
        report.add(_within(f"{items} items on small devices", small))
        single = [
            error for n in (1, 2) for error in makespans(single_shelves(count // 2, n), items)
        ]
        report.add(
            _measured(f"{items} items, one fragment at a time: error of the makespan", single)
        )
        report.add(_within(f"{items} items, one fragment at a time", single))
    found = list(turns(small_shelves(count // 3, 2)))
    report.add(_measured("stages in turn: error of the period", found))
    report.add(_within("stages in turn", found))
    shared = list(replicas(small_shelves(count // 3, 2)))
    found = [error for error, _ in shared]
    report.add(_measured("replicas in turn: error of the period", found))
    report.add(_within("replicas in turn", found))
    name = "replicas in turn: their period, of that of the better one alone"
    report.add(measured(name, [ratio for _, ratio in shared], unit="", goal=VALUE <= 1.0))
    report.finish()


def _measured(name: str, errors: list[float]) -> Measurement:
    return measured(name, errors, unit="of the time", goal=VALUE <= 0.25)


def _within(name: str, errors: list[float]) -> Measurement:
    value = sum(each <= 0.25 for each in errors) / len(errors)
    return Measurement(name=f"{name}: within 25 %", value=value, unit=f"of {len(errors)} runs")


if __name__ == "__main__":
    main()
