"""What is loaded where: which services get a device, and which devices load something.

Loading is just in time: a job's first stages at its start (on the homes that a plan gives them; or,
without a plan, as CROWDio does, on every device that has room), any other when a task of a stage
before it was given. A device loads one fragment at a time; what must go first is unloaded, and
answered, before. How a fragment could be loaded on one device, and what may go for it, is a matter
of tables: see `decisions`.

A device that a starving service *preempts* is given nothing new until it is empty.
"""

from collections.abc import Iterable

from shoal_coordinator.dispatch.decisions import (
    LOADING,
    PREEMPTION,
    LoadCase,
    PreemptionCase,
    decide,
)
from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.fragments import plan_load, start_load
from shoal_coordinator.dispatch.instructions import Tier
from shoal_coordinator.dispatch.servers import may_serve, rank, review
from shoal_coordinator.dispatch.services import awaits_homes, can_host, end_preemption
from shoal_coordinator.dispatch.state import Service, State
from shoal_coordinator.dispatch.surveys import Survey
from shoal_coordinator.dispatch.turns import waiting_for


def consider_service(state: State, service: Service, survey: Survey) -> None:
    if not service.queues:
        return
    waiting = service.waiting
    _note_starving(state, service, waiting)
    if not waiting and not service.wanted:
        state.unmet.pop(service, None)
        return
    if awaits_homes(state, service):
        return
    if service.homes_up:
        for name in service.homes:
            device = state.devices.get(name)
            if device is not None:
                load_if_possible(state, service, device)
    elif not service.held:
        _spread(state, service, waiting, survey)
    if waiting and service.unserved:
        _preempt(state, service, survey)
    if not waiting and service.servers and not _home_missing(state, service):
        state.unmet.pop(service, None)


def consider_device(state: State, device: Device, unmet: Iterable[Service]) -> None:
    """A device has nothing to do: load what suits it best of what is unmet."""
    if device.memory.moving or device.draining or device.lost:
        return
    if device.preempted_by is not None:
        if device.work.idle:
            load_if_possible(state, device.preempted_by, device)
        return
    wanting = [service for service in unmet if _wants(state, service, device)]
    choices = [
        (service, tier)
        for service in wanting
        if (tier := tier_for(state, service, device)) is not None
    ]
    if choices:
        load_if_possible(state, min(choices, key=_urgency)[0], device)


def _urgency(choice: tuple[Service, Tier]) -> tuple[int, int, int]:
    """The smallest first. Of the stages the latest: items are finished before others are begun."""
    service, tier = choice
    return -service.priority, tier, -service.queues[0].stage


def load_if_possible(state: State, service: Service, device: Device) -> None:
    """Load the fragment there, making room if need be; do nothing if it cannot be done now."""
    case = LoadCase(state, service, device)
    tier = decide(LOADING, case).verdict
    if tier is Tier.EVICT:
        plan_load(state, service, device, case.victims or [])
    elif tier is not None:
        start_load(state, service, device, tier)


def tier_for(state: State, service: Service, device: Device) -> Tier | None:
    """How the fragment could be loaded there now; None if it cannot, or is there."""
    return decide(LOADING, LoadCase(state, service, device)).verdict


# ---- how many devices ----------------------------------------------------------------------------


def _home_missing(state: State, service: Service) -> bool:
    homes = (state.devices.get(name) for name in service.homes)
    return any(
        device is not None and service.digest not in device.memory.resident for device in homes
    )


def _spread(state: State, service: Service, waiting: int, survey: Survey) -> None:
    """Without a home: once; a first stage wherever there is room; more as work piles up."""
    first = any(not queue.predecessors for queue in service.queues)
    depth = state.limits.queue_depth
    enough = not waiting or any(device.work.has_slot for device in service.servers)
    if service.servers and not first and enough:
        return
    if len(service.servers) == len(state.devices):
        return
    choices = [
        rank(service, device, tier)
        for device in survey.could_load(service)
        if (tier := tier_for(state, service, device)) is not None
    ]
    for cost, _, load, _, _, device in sorted(choices):
        piled_up = waiting > depth * len(service.loading)
        if service.unserved:
            wanted = True
        elif cost == Tier.EVICT:
            wanted = piled_up and not load
        else:
            wanted = piled_up or first
        if wanted:
            load_if_possible(state, service, device)
    if choices:
        survey.drop_loading()


def _wants(state: State, service: Service, device: Device) -> bool:
    if not service.queues:
        return False
    if service.homes_up:
        return device.name in service.homes
    if service.held or awaits_homes(state, service):
        return False
    if service.unserved:
        return True
    if not device.memory.resident and any(not queue.predecessors for queue in service.queues):
        return True
    return service.waiting > state.limits.queue_depth * len(service.loading)


# ---- preemption --------------------------------------------------------------------------------


def _note_starving(state: State, service: Service, waiting: int) -> None:
    if not waiting or service.servers or service.loading:
        service.starving_since = None
        if not waiting or service.servers:
            end_preemption(state, service)
    elif service.starving_since is None:
        service.starving_since = state.now


def _preempt(state: State, service: Service, survey: Survey) -> None:
    """No device serves it, and none can be freed at once: one of the busy ones empties itself."""
    if service.preempting is not None:
        return
    first = sorted(
        survey.could_preempt(service), key=lambda device: (device.work.load, device.order)
    )
    device = next((each for each in first if _may_preempt(state, service, each)), None)
    if device is None:
        return
    device.preempted_by = service
    service.preempting = device
    review(state, device)
    if device.work.idle:
        load_if_possible(state, service, device)


def _may_preempt(state: State, service: Service, device: Device) -> bool:
    if device.preempted_by is not None or device.memory.moving:
        return False
    return bool(
        may_serve(service, device)
        and can_host(state, service, device)
        and device.disk.can_provide(service.digest, state.now)
        and waiting_for(service, device)
        and decide(PREEMPTION, PreemptionCase(state, service, device)).verdict
    )
