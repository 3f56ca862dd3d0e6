"""Several models on one pool: the next plan has what those before it leave. Pure.

That is memory, processor time, and links: a device that works for another model three fifths of the
time has two fifths left, so its rates count as two fifths. So does the rate of a link that is taken
three fifths of the time; of a link between two devices as much is left as of the end that has less.
What works all the time is still shared, so a quarter is left of everything (`_LEAST_LEFT`).

What cannot be held at once beside the others is planned as if it were alone: its fragments and
theirs are then loaded in turn, which is slow, but each model runs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shoal_planner.devices import PeerLink, PoolDevice
from shoal_planner.figures import item_shares
from shoal_planner.outcome import Infeasible, Plan, StagePlan
from shoal_protocol.units import Bytes, Nanoseconds, format_bytes, listed

_LEAST_LEFT: Final = 0.25
_NAMED: Final = 4


@dataclass(frozen=True, slots=True)
class Taken:
    """What other models have of a device: memory, a part of its processor's time, and of its
    link's, in the direction that is taken more. Parts are in tenths, since measurements differ by
    as much and each difference asks for a new plan."""

    held_bytes: int
    busy: float
    link: float = 0.0

    @property
    def left(self) -> float:
        """Of the processor."""
        return _left_of(self.busy)

    @property
    def link_left(self) -> float:
        """Of the link."""
        return _left_of(self.link)


@dataclass(frozen=True, slots=True)
class Use:
    """What one stage of one model has of a device."""

    device: str
    held_bytes: int
    busy: float
    link: float


def _left_of(taken: float) -> float:
    return round(max(_LEAST_LEFT, 1 - taken), 2)


_NOTHING: Final = Taken(held_bytes=0, busy=0.0)


def taken_by(plans: Iterable[Plan]) -> Mapping[str, Taken]:
    """What these plans take of devices, by their names."""
    return added(use for each in plans for stage in each.stages for use in _uses(each, stage))


def added(uses: Iterable[Use]) -> Mapping[str, Taken]:
    """What all stages together have, by devices."""
    by_device: dict[str, list[Use]] = {}
    for use in uses:
        by_device.setdefault(use.device, []).append(use)
    return {
        name: Taken(
            held_bytes=sum(use.held_bytes for use in of),
            busy=_tenths(sum(use.busy for use in of)),
            link=_tenths(sum(use.link for use in of)),
        )
        for name, of in sorted(by_device.items())
    }


def _tenths(part: float) -> float:
    return round(min(1.0, part), 1)


def _uses(plan: Plan, stage: StagePlan) -> Iterator[Use]:
    """Of each device of a stage, while items come as fast as they can."""
    period = 0 if plan.items_per_second is None else plan.period_nanoseconds or 0
    if not period:
        yield from (Use(share.device, share.resident_bytes, 0.0, 0.0) for share in stage.shares)
        return
    for share, part, cost in zip(stage.shares, item_shares(stage), stage.costs, strict=True):
        busy, link = part * cost.busy / period, part * cost.link / period
        yield Use(share.device, share.resident_bytes, busy, link)


def left_over(pool: Sequence[PoolDevice], taken: Mapping[str, Taken]) -> tuple[PoolDevice, ...]:
    """The devices with what is left of their budgets, their processors and their links."""
    return tuple(_with_links_left(_left(each, taken.get(each.name)), taken) for each in pool)


def _with_links_left(device: PoolDevice, taken: Mapping[str, Taken]) -> PoolDevice:
    own = taken.get(device.name, _NOTHING).link_left

    def left(peer: PeerLink) -> PeerLink:
        part = min(own, taken.get(peer.name, _NOTHING).link_left)
        return replace(peer, bytes_per_second=_part(peer.bytes_per_second, part))

    rate = _part(device.link_bytes_per_second, own)
    return replace(device, link_bytes_per_second=rate, peers=tuple(map(left, device.peers)))


def _left(device: PoolDevice, of: Taken | None) -> PoolDevice:
    if of is None:
        return device
    return replace(
        device,
        budget_bytes=Bytes(max(0, device.budget_bytes - of.held_bytes)),
        flops_per_second=max(1, int(device.flops_per_second * of.left)),
        convolutions_per_second=_part(device.convolutions_per_second, of.left),
        products_per_second=_part(device.products_per_second, of.left),
        memory_bytes_per_second=_part(device.memory_bytes_per_second, of.left),
        moved_bytes_per_second=_part(device.moved_bytes_per_second, of.left),
        preparing_nanoseconds=Nanoseconds(int(device.preparing_nanoseconds / of.left)),
        handling_nanoseconds=Nanoseconds(int(device.handling_nanoseconds / of.left)),
    )


def _part(rate: int | None, part: float) -> int | None:
    return None if rate is None else max(1, int(rate * part))


def beside(plan: Plan, taken: Mapping[str, Taken]) -> Plan:
    """The plan, made for what is left, which says so."""
    return replace(plan, beside=_sentence(plan, taken))


def crowded(plan: Plan, taken: Mapping[str, Taken]) -> Plan:
    """The plan, made as if it were alone, which says where it has no room beside the others."""
    full = [
        share.device
        for stage in plan.stages
        for share in stage.shares
        if share.device in taken
        and share.resident_bytes + taken[share.device].held_bytes > share.budget_bytes
    ]
    if not full:
        return plan
    text = (
        "planned as if it were alone: beside other models there is no room on "
        f"{listed(full, _NAMED)}, where their fragments and these are loaded in turn, which takes "
        "longer than is said here"
    )
    return replace(plan, beside=text)


def _sentence(plan: Plan, taken: Mapping[str, Taken]) -> str:
    budgets = {share.device: share.budget_bytes for stage in plan.stages for share in stage.shares}
    shared = [name for name in budgets if name in taken]
    if not shared:
        return "on devices that no other model uses"
    parts = [
        f"{name} {_parts_left(taken[name])} and {format_bytes(budgets[name])}"
        for name in shared[:_NAMED]
    ]
    more = len(shared) - _NAMED
    parts += [f"{more} more a part"] * (more > 0)
    return f"other models leave {', '.join(parts)}"


def _parts_left(of: Taken) -> str:
    processor = f"{100 * of.left:.0f} % of its processor"
    return f"{processor}, {100 * of.link_left:.0f} % of its link" if of.link else processor


def is_at_once(answer: Plan | Infeasible) -> bool:
    """Whether each device holds its fragments at once, with room for other items."""
    return not (isinstance(answer, Infeasible) or answer.reloading or answer.waiting)
