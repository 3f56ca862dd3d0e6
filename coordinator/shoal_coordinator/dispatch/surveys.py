"""Which devices a fragment could be loaded on at all, looked at once for many fragments.

A tick considers every fragment that waits. With a thousand devices that all work, or all load, and
hundreds of fragments, asking each device about each fragment takes seconds to find that nothing can
be done. What a device could give to *any* other fragment is a number, its *reach*: its budget
without the fragments that it has tasks for, and nothing while one moves in or out. A fragment that
needs more, at the least, cannot be loaded there, whatever the tables of `decisions` say of the
rest.

A survey is good for as long as nothing but loads and tasks begins: reaches only fall by that.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import takewhile
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from shoal_coordinator.dispatch.decisions import has_starved, turn_is_over, users_of
from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.services import awaits_homes
from shoal_coordinator.dispatch.state import Service, State

_Sized: TypeAlias = list[tuple[int, Device]]


def reach_of(device: Device) -> int:
    """What another fragment could have there at most, once all that may go has gone."""
    memory, in_use = device.memory, device.work.in_use
    if memory.moving or device.draining or device.lost:
        return 0
    return memory.budget - sum(memory.resident.get(digest, 0) for digest in in_use)


class Survey:
    """Of all devices, for services that look for some. Each part is made when it is first asked
    for: most services have homes, and ask for none."""

    def __init__(self, state: State) -> None:
        self.state = state

    @cached_property
    def _by_reach(self) -> _Sized:
        devices = self.state.devices.values()
        return _largest_first((reach_of(device), device) for device in devices)

    @cached_property
    def _still(self) -> list[Device]:
        """Those where nothing moves in or out."""
        return [each for each in self.state.devices.values() if not each.memory.moving]

    @cached_property
    def _at_turns_end(self) -> _Sized:
        """Of these, those that have served for a turn, by their budgets."""
        over = (each for each in self._still if turn_is_over(self.state, each))
        return _largest_first((each.memory.budget, each) for each in over)

    @cached_property
    def _lowest_priority(self) -> int | None:
        """Of what these serve; None: they serve nobody."""
        used = (users_of(self.state, device) for device in self._still)
        most = (max(user.priority for user in users) for users in used if users)
        return min(most, default=None)

    def could_load(self, service: Service) -> Iterator[Device]:
        """All on which the fragment could be loaded, and others."""
        return _first(self._by_reach, service.least)

    def drop_loading(self) -> None:
        """Loads have begun: leave those out on which nothing else can be loaded now."""
        self._by_reach = [each for each in self._by_reach if not each[1].memory.moving]

    def could_preempt(self, service: Service) -> Iterator[Device]:
        """All that could be emptied for the fragment, and others: for work of a higher priority
        than theirs at once, else for a service that starves when their turn is over."""
        lowest = self._lowest_priority
        if lowest is not None and service.priority > lowest:
            return iter(self._still)
        if has_starved(self.state, service):
            return _first(self._at_turns_end, service.least)
        return iter(())


def _largest_first(devices: Iterable[tuple[int, Device]]) -> _Sized:
    return sorted(devices, key=itemgetter(0), reverse=True)


def _first(devices: _Sized, least: int) -> Iterator[Device]:
    """Those with at least so much."""
    return (device for _, device in takewhile(lambda each: each[0] >= least, devices))


class _Unmet(NamedTuple):
    """A service that waits, with the least that it needs, and its place among all."""

    least: int
    place: int
    service: Service


class Demand:
    """The services that look for devices, for devices that look for services."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._at_home: dict[str, list[_Unmet]] = {}
        anywhere: list[_Unmet] = []
        for place, service in enumerate(state.unmet):
            unmet = _Unmet(service.least, place, service)
            if service.homes_up:
                for name in dict.fromkeys(service.homes):
                    self._at_home.setdefault(name, []).append(unmet)
            elif service.queues and not service.held and not awaits_homes(state, service):
                anywhere.append(unmet)
        self._anywhere = sorted(anywhere, key=itemgetter(0))
        self._least = [each.least for each in self._anywhere]

    def for_device(self, device: Device) -> list[Service]:
        """All that could be loaded there, and others, in the order in which they wait."""
        within = bisect_right(self._least, reach_of(device))
        found = [*self._at_home.get(device.name, ()), *self._anywhere[:within]]
        return [each.service for each in sorted(found, key=itemgetter(1))]
