"""What else there was: the divisions that one would think of first, and why they lost."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shoal_planner.costs import Costs, Division, Span
from shoal_planner.device_costs import Holding
from shoal_planner.devices import PoolDevice
from shoal_planner.disks import has_room
from shoal_planner.goal import Goal
from shoal_planner.heuristics import Divisions, by_memory, evenly
from shoal_planner.outcome import EVEN_SPLIT, Rejected, duration
from shoal_protocol.choices import Objective
from shoal_protocol.units import counted, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """The best division, by a goal, on a pool. The others are weighed against it. `required` are
    its pins: fragment -> device."""

    costs: Costs
    pool: Sequence[PoolDevice]
    goal: Goal
    best: Divisions
    required: Mapping[int, str] = field(default_factory=dict)

    def rejected(
        self, without_replicas: Divisions | None, others: Sequence[Divisions]
    ) -> Iterator[Rejected]:
        """Those that differ from the best, each once. `others` are the next best, in order."""
        named: list[tuple[str, Divisions | Rejected]] = [
            (EVEN_SPLIT, evenly(self.costs, self.pool)),
            ("one device", self._on_one_device()),
            ("split by memory", by_memory(self.costs, self.pool)),
        ]
        if without_replicas is not None:
            named.append(("without replicas", without_replicas))
        named += [
            (f"next best: {in_words(each)}" if place == 0 else in_words(each), each)
            for place, each in enumerate(others)
        ]
        seen = {self.best}
        for name, each in named:
            if isinstance(each, Rejected):
                if not self._is_on_one_device():
                    yield each
            elif each not in seen:
                seen.add(each)
                yield self._weighed(name, each)

    def from_scratch(self, ideal: Divisions) -> Rejected | None:
        """The plan that would be the best if nothing had to move; None: it would be no better."""
        value, chosen = self._value(ideal), self._value(self.best)
        if value >= chosen:
            return None
        gain = 100 * (chosen - value) / chosen
        period, latency = self.costs.totals(ideal)
        predictable = self.costs.predictable(self.pool)
        return Rejected(
            alternative="best from scratch",
            reason=f"gains {gain:.2g} %: not worth the fragments that would move",
            period_nanoseconds=period if predictable else None,
            latency_nanoseconds=latency if predictable else None,
        )

    def _is_on_one_device(self) -> bool:
        """Of the best: whether one device has all fragments, if only one after the other."""
        return len(self.best) == 1 and len(self.best[0].devices) == 1

    def _on_one_device(self) -> Divisions | Rejected:
        """All fragments on the device that is best with them."""
        costs, whole = self.costs, Span(0, len(self.costs.document.fragments))
        able = [(Division(whole, (each,)),) for each in self.pool if costs.at_once(whole, each)]
        if able:
            return min(able, key=lambda each: (self._value(each), each[0].devices[0].name))
        roomiest = max(self.pool, key=lambda each: each.budget_bytes)
        need, have = _together(costs, whole), format_bytes(roomiest.budget_bytes)
        reason = f"all fragments need {need}; {roomiest.name} has {have}"
        if lacking := _lacking_disk(costs, whole, roomiest):
            reason = lacking
        if roomiest.single:
            reason = f"{roomiest.name} holds one fragment at a time"
        return Rejected(alternative="one device", reason=reason)

    def _value(self, divisions: Divisions) -> int:
        return self.goal.value(*self.costs.totals(divisions))

    def _weighed(self, name: str, lost: Divisions) -> Rejected:
        """A division that lost, with what it would have given."""
        if len(lost) == 1 and len(lost[0].devices) == 1:
            name = f"all on {lost[0].devices[0].name}"
        for division in lost:
            device = division.devices[0]
            if self.costs.holding(division.span, device) is None:
                need = format_bytes(self.costs.least_in_turn(division.span, waiting=True))
                have = format_bytes(device.budget_bytes)
                reason = f"a fragment for {device.name} needs {need}; it has {have}"
                lacking = _lacking_disk(self.costs, division.span, device)
                return Rejected(alternative=name, reason=lacking or reason)
        reason = self._against_pins(lost) or self._worse_held(lost)
        if not self.costs.predictable(self.pool):
            return Rejected(alternative=name, reason=reason or "is less balanced")
        period, latency = self.costs.totals(lost)
        return Rejected(
            alternative=name,
            reason=reason or self._slower(lost),
            period_nanoseconds=period,
            latency_nanoseconds=latency,
        )

    def _against_pins(self, lost: Divisions) -> str:
        """Where it would be no plan at all, however fast it is."""
        for division in lost:
            names = [device.name for device in division.devices]
            for fragment in range(division.span.start, division.span.end):
                pinned = self.required.get(fragment)
                if pinned is not None and names != [pinned]:
                    return f"fragment {fragment} is pinned to {pinned}"
        return ""

    def _worse_held(self, lost: Divisions) -> str:
        """Where it would hold fragments in a way that the best need not: that comes before time."""
        for said in (_would_reload, _would_wait):
            if said(self.costs, self.best):
                break
            if reason := said(self.costs, lost):
                return reason
        return ""

    def _slower(self, lost: Divisions) -> str:
        (period, latency), best = self.costs.totals(lost), self.costs.totals(self.best)
        best_period, best_latency = best
        match self.goal.objective:
            case Objective.MAKESPAN if self._value(lost) > self._value(self.best):
                times = [duration(self._value(each)) for each in (lost, self.best)]
                items = counted(self.goal.items, "item")
                return f"{items} would take {times[0]}, against {times[1]}"
            case Objective.LATENCY if latency > best_latency:
                return _item_takes(latency, best_latency)
        if period > best_period:
            slowest = max(lost, key=self.costs.period)
            names = ", ".join(device.name for device in slowest.devices)
            return f"{names} would need {duration(period)} an item, against {duration(best_period)}"
        if latency > best_latency:
            return _item_takes(latency, best_latency)
        if len(lost) != len(self.best):
            stages = counted(len(lost), "stage")
            return f"is as good, with {stages} in the place of {len(self.best)}"
        return "is as good; ties go to fewer moves, then fewer devices, then smaller names"


def _item_takes(latency: int, best: int) -> str:
    return f"an item would take {duration(latency)}, against {duration(best)}"


def _would_reload(costs: Costs, lost: Divisions) -> str:
    for division in lost:
        for device in division.devices:
            if costs.holding(division.span, device) is not Holding.RELOADED:
                continue
            if device.single:
                return f"{device.name} holds one fragment at a time: it would load them in turn"
            if lacking := _lacking_disk(costs, division.span, device):
                return f"{lacking}: it would load them in turn"
            needs = f"its fragments need {_together(costs, division.span)}"
            have = f"{device.name} has {format_bytes(device.budget_bytes)}"
            return f"{needs}; {have}: it would load them in turn"
    return ""


def _would_wait(costs: Costs, lost: Divisions) -> str:
    for division in lost:
        for device in division.devices:
            if not costs.receives(division.span, device):
                return f"{device.name} has no room for other items beside a fragment: they wait"
    return ""


def _lacking_disk(costs: Costs, span: Span, device: PoolDevice) -> str:
    """`its fragments take 2 GiB on disk; pi-4 has 768 MiB`; empty: there is room for them."""
    stored = costs.stored.together(span.start, span.end)
    if has_room(device, stored):
        return ""
    have = format_bytes(device.cache_bytes or 0)
    return f"its fragments take {format_bytes(stored)} on disk; {device.name} has {have}"


def _together(costs: Costs, span: Span) -> str:
    """`36 MiB together`, or `at least 12 MiB together, in blocks`."""
    least = costs.least(span)
    if least == costs.resident(span):
        return f"{format_bytes(least)} together"
    return f"at least {format_bytes(least)} together, in blocks"


def in_words(divisions: Sequence[Division]) -> str:
    """`0-1 on jetson; 2 on pi-4, pi-zero`."""
    parts = []
    for division in divisions:
        first, last = division.span.start, division.span.end - 1
        fragments = f"{first}" if first == last else f"{first}-{last}"
        parts.append(f"{fragments} on {', '.join(device.name for device in division.devices)}")
    return "; ".join(parts)
