"""The smallest budget that a fragment runs in, and what a task of it takes at several: as a
Placement says of the devices of its plan, and a Device of the plans that it serves. Pure.

They change where the plan does, or what it was made with. A device that has measured its tasks says
so only where that has changed much (`fragment_times` of the coordinator).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from statistics import median_high

from shoal_api.fields import TimeAtBudget
from shoal_api.kinds import Placement
from shoal_api.kinds.device import MAX_PLANNED, PlannedFragment
from shoal_api.kinds.placement import MAX_BUDGETS, FragmentBudgets, PlacementStatus
from shoal_operator.reconcile.planned_cuts import age
from shoal_operator.reconcile.plans import Site
from shoal_operator.reconcile.snapshot import ConnectedDevice
from shoal_planner.budgets import fragment_at_budgets
from shoal_planner.costs import Costs
from shoal_planner.devices import PoolDevice
from shoal_planner.figures import known_seconds
from shoal_planner.outcome import Plan
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes


def budgets_of(
    plan: Plan, site: Site, reported: Iterable[ConnectedDevice]
) -> tuple[FragmentBudgets, ...]:
    """Of each fragment of a plan, on the devices of its stage; these have `reported` what they
    measured."""
    measured = {
        (each.name, time.digest): dict(time.within) for each in reported for time in each.times
    }
    return tuple(islice(_budgets(plan, site, measured), MAX_BUDGETS))


def _budgets(
    plan: Plan, site: Site, measured: Mapping[tuple[str, Digest], Mapping[int, float]]
) -> Iterator[FragmentBudgets]:
    costs, devices = Costs(site.document), {each.name: each for each in site.devices}
    for stage in plan.stages:
        kinds: dict[PoolDevice, list[str]] = {}
        for name in stage.devices:
            kind = replace(devices[name], name="", budget_bytes=Bytes(0), cached=())
            kinds.setdefault(kind, []).append(name)
        for index in stage.fragments:
            digest = site.document.fragments[index].digest
            for kind, names in kinds.items():
                alike: dict[frozenset[int], list[str]] = {}
                for name in names:
                    ran = frozenset(measured.get((name, digest), ()))
                    alike.setdefault(ran, []).append(name)
                for granted, its in alike.items():
                    took = {
                        each: median_high(measured[name, digest][each] for name in its)
                        for each in granted
                    }
                    times = _times(costs, index, kind, took)
                    yield FragmentBudgets(
                        fragment=index,
                        devices=tuple(its),
                        least_budget_bytes=times[-1].budget_bytes,
                        times=times,
                    )


def _times(
    costs: Costs, index: int, kind: PoolDevice, took: Mapping[int, float]
) -> tuple[TimeAtBudget, ...]:
    """On devices of a kind that have run it within the same grants: what that `took`, and what is
    predicted of other budgets. Plans are made with what devices have measured, too."""
    found = fragment_at_budgets(costs, index, kind, took)
    return tuple(
        TimeAtBudget(budget_bytes=budget, seconds=known_seconds(time))
        if granted is None
        else TimeAtBudget(budget_bytes=budget, seconds=round(took[granted], 9), measured=True)
        for budget, (time, granted) in found.items()
    )


def planned_on(placements: Iterable[Placement]) -> Mapping[str, tuple[PlannedFragment, ...]]:
    """What plans give to each device: a fragment once, as the newest of them says. A thousand jobs
    may have as many plans of the same fragments on the same devices."""
    found: dict[str, dict[str | None, PlannedFragment]] = {}
    seen: set[tuple[str | None, tuple[str, ...]]] = set()
    for each in sorted(placements, key=age, reverse=True):
        status = each.status or PlacementStatus()
        digests = {of.fragment: of.digest for of in status.fragments}
        for budgets in status.budgets:
            digest = digests.get(budgets.fragment)
            if (digest, budgets.devices) in seen:
                continue
            seen.add((digest, budgets.devices))
            planned = PlannedFragment(
                placement=each.metadata.name,
                fragment=budgets.fragment,
                digest=digest,
                least_budget_bytes=budgets.least_budget_bytes,
                times=budgets.times,
            )
            for name in budgets.devices:
                its = found.setdefault(name, {})
                if len(its) < MAX_PLANNED:
                    its.setdefault(digest, planned)
    return {
        name: tuple(sorted(its.values(), key=lambda of: (of.placement, of.fragment)))
        for name, its in found.items()
    }
