"""What else there was: the divisions that one would think of first, and why they lost."""

from collections.abc import Sequence

from shoal_planner.costs import Costs, Division, PoolDevice, Span
from shoal_planner.heuristics import Divisions, evenly
from shoal_planner.outcome import Rejected, duration
from shoal_protocol.units import format_bytes


def even_split(costs: Costs, pool: Sequence[PoolDevice], best: Divisions) -> Rejected | None:
    """Equal numbers of fragments on each device; None where the best division is just that."""
    even = evenly(costs, pool)
    if even == best:
        return None
    for division in even:
        device = division.devices[0]
        if costs.holding(division.span, device) is None:
            need = format_bytes(costs.least_in_turn(division.span))
            have = format_bytes(device.budget_bytes)
            reason = f"a fragment for {device.name} needs {need}; it has {have}"
            return Rejected(alternative="even split", reason=reason)
    return rejected(costs, even, "even split", best, pool)


def on_one_device(costs: Costs, pool: Sequence[PoolDevice], best: Divisions) -> Rejected | None:
    """All fragments on the device that is fastest with them; None where the best is just that."""
    whole = Span(0, len(costs.document.fragments))
    able = [device for device in pool if costs.at_once(whole, device)]
    if not able:
        roomiest = max(pool, key=lambda each: each.budget_bytes)
        need, have = _together(costs, whole), format_bytes(roomiest.budget_bytes)
        reason = f"all fragments need {need}; {roomiest.name} has {have}"
        if roomiest.single:
            reason = f"{roomiest.name} holds one fragment at a time"
        return Rejected(alternative="one device", reason=reason)
    fastest = min(able, key=lambda each: (costs.on(whole, each).period, each.name))
    alone = (Division(whole, (fastest,)),)
    return None if alone == best else rejected(costs, alone, f"all on {fastest.name}", best, pool)


def rejected(
    costs: Costs,
    lost: Divisions,
    alternative: str,
    best: Divisions,
    pool: Sequence[PoolDevice],
) -> Rejected:
    """A division that lost against the best, with what it would have given."""
    reason = _would_reload(costs, lost)
    if not costs.predictable(pool):
        return Rejected(alternative=alternative, reason=reason or "is less balanced")
    period, latency = costs.totals(lost)
    return Rejected(
        alternative=alternative,
        reason=reason or _slower(costs, lost, best),
        period_nanoseconds=period,
        latency_nanoseconds=latency,
    )


def _would_reload(costs: Costs, lost: Divisions) -> str:
    for division in lost:
        for device in division.devices:
            if costs.at_once(division.span, device):
                continue
            if device.single:
                return f"{device.name} holds one fragment at a time: it would load them in turn"
            needs = f"its fragments need {_together(costs, division.span)}"
            have = f"{device.name} has {format_bytes(device.budget_bytes)}"
            return f"{needs}; {have}: it would load them in turn"
    return ""


def _together(costs: Costs, span: Span) -> str:
    """`36 MiB together`, or `at least 12 MiB together, in blocks`."""
    least = costs.least(span)
    if least == costs.resident(span):
        return f"{format_bytes(least)} together"
    return f"at least {format_bytes(least)} together, in blocks"


def _slower(costs: Costs, lost: Divisions, best: Divisions) -> str:
    (period, latency), (best_period, best_latency) = costs.totals(lost), costs.totals(best)
    if period > best_period:
        slowest = max(lost, key=costs.period)
        names = ", ".join(device.name for device in slowest.devices)
        return f"{names} would need {duration(period)} an item, against {duration(best_period)}"
    if latency > best_latency:
        return f"an item would take {duration(latency)}, against {duration(best_latency)}"
    if len(lost) != len(best):
        return f"is as good, with {len(lost)} stages in the place of {len(best)}"
    return "is as good; ties go to fewer moves, then fewer devices, then smaller names"


def in_words(divisions: Sequence[Division]) -> str:
    """`0-1 on jetson; 2 on pi-4, pi-zero`."""
    parts = []
    for division in divisions:
        first, last = division.span.start, division.span.end - 1
        fragments = f"{first}" if first == last else f"{first}-{last}"
        parts.append(f"{fragments} on {', '.join(device.name for device in division.devices)}")
    return "; ".join(parts)
