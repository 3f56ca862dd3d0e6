"""Devices: what a pool's coordinator reports of each, as objects that `kubectl` shows. Pure.

A device that is silent is Ready Unknown; so are all while the coordinator does not answer. One that
is not connected stays as long as its node is selected, since its agent will be back. What it and
its links measure is written once a minute (`measurements`). Whether it is within its budget: see
`budgets`.
"""

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Final

from shoal_api.columns import print_device
from shoal_api.fields import Metadata, Reference
from shoal_api.kinds import Device
from shoal_api.kinds.device import (
    CachedFragments,
    DeviceLink,
    DevicePeer,
    DeviceSpec,
    DeviceSpeed,
    DeviceStatus,
)
from shoal_operator.reconcile.budgets import device_budget, excess_note
from shoal_operator.reconcile.conditions import (
    FALSE,
    TRUE,
    UNKNOWN,
    ConditionUpdate,
    shortened,
    with_conditions,
)
from shoal_operator.reconcile.decision import DeviceChild
from shoal_operator.reconcile.fragment_budgets import planned_on
from shoal_operator.reconcile.manifests import labels_of, manifest
from shoal_operator.reconcile.measurements import FOLLOW_SECONDS, without_numbers
from shoal_operator.reconcile.names import (
    chosen_name,
    device_object_name,
    distinct_device_name,
)
from shoal_operator.reconcile.snapshot import (
    ConnectedDevice,
    DevicePoolSnapshot,
    DeviceState,
    Unreachable,
)
from shoal_operator.reconcile.times import as_time, instant, seconds_since
from shoal_protocol.copying import copied
from shoal_protocol.speeds import UNKNOWN_LINK, Link, Speed

_THERE_SECONDS: Final = 300.0
"""How often a device is written of which nothing changes: all that an idle pool writes."""


_STATES: Final = {
    DeviceState.READY: ConditionUpdate("Ready", TRUE, "Connected", "its session is alive"),
    DeviceState.SILENT: ConditionUpdate(
        "Ready", UNKNOWN, "Silent", "it does not answer, and is not given up yet"
    ),
    DeviceState.DRAINING: ConditionUpdate(
        "Ready", FALSE, "Draining", "it finishes what it runs, and leaves"
    ),
    DeviceState.LOST: ConditionUpdate("Ready", FALSE, "Lost", "it was given up"),
}
_HAS_LEFT: Final = ConditionUpdate(
    "Ready", FALSE, "Left", "it left in order, as its pod was deleted or is replaced"
)
_NOT_CONNECTED: Final = ConditionUpdate(
    "Ready", FALSE, "NotConnected", "the coordinator has no session of it"
)


def devices_gone(snapshot: DevicePoolSnapshot, selected: frozenset[str]) -> frozenset[str]:
    """Devices that will not be back, by the names of their objects: not connected, and their node
    is not selected any more.
    """
    if isinstance(snapshot.view, Unreachable):
        return frozenset()
    alive = {each.name for each in snapshot.view.devices if each.state is not DeviceState.LOST}
    stay = _object_names(snapshot, selected | alive).values()
    return frozenset(device.metadata.name for device in snapshot.devices).difference(stay)


def _object_names(snapshot: DevicePoolSnapshot, devices: Iterable[str]) -> dict[str, str]:
    """What each device's object is called."""
    pool, names = snapshot.pool.metadata.name, dict[str, str]()
    own = {each.metadata.name for each in snapshot.devices}
    for device in devices:
        plain, distinct = device_object_name(pool, device), distinct_device_name(pool, device)
        names[device] = chosen_name(plain, distinct, own, snapshot.taken_names)
    return names


def device_children(snapshot: DevicePoolSnapshot, gone: frozenset[str]) -> tuple[DeviceChild, ...]:
    """A Device for each that is connected, and for those that were and are not gone."""
    planned = planned_on(snapshot.placements)
    return tuple(
        replace(
            each, status=replace(each.status, fragments=planned.get(each.status.node or "", ()))
        )
        for each in _children(snapshot, gone)
    )


def _children(snapshot: DevicePoolSnapshot, gone: frozenset[str]) -> tuple[DeviceChild, ...]:
    known = {each.metadata.name: each for each in snapshot.devices}
    pool, view = snapshot.pool.metadata.name, snapshot.view
    if isinstance(view, Unreachable):
        update = ConditionUpdate("Ready", UNKNOWN, "CoordinatorUnreachable", view.reason)
        return tuple(_child(snapshot, known[name], update) for name in sorted(known))
    names = _object_names(snapshot, (each.name for each in view.devices))
    connected = {names[each.name]: each for each in view.devices}
    shown = []
    for name in sorted((known.keys() | connected.keys()) - gone):
        device, each = known.get(name), connected.get(name)
        if each is not None and (device is not None or each.state is not DeviceState.LOST):
            device = device or _new(pool, name)
            seen = _seen(snapshot, device, each)
            ready = _HAS_LEFT if each.has_left else _STATES[each.state]
            shown.append(_child(snapshot, device, ready, each, seen))
        elif each is None and device is not None:
            shown.append(_child(snapshot, device, _NOT_CONNECTED))
    return tuple(shown)


def _new(pool: str, name: str) -> Device:
    spec = DeviceSpec(pool_ref=Reference(name=pool))
    return Device(metadata=Metadata(name=name, generation=1), spec=spec)


def _seen(snapshot: DevicePoolSnapshot, device: Device, each: ConnectedDevice) -> DeviceStatus:
    before = device.status or DeviceStatus()
    seen = as_time(max(0.0, instant(snapshot.now) - each.silent_seconds))
    was, measured = (before.speed, before.link), (_speed(each.speed), _link(each.link))
    is_still = each.state is DeviceState.READY and was == measured
    stays = _THERE_SECONDS if is_still else FOLLOW_SECONDS
    if before.last_seen_time is not None and seconds_since(before.last_seen_time, seen) < stays:
        seen = before.last_seen_time
        if without_numbers(was) == without_numbers(measured):
            measured = was
    return DeviceStatus(
        node=shortened(each.name, 253),
        architecture=shortened(each.architecture, 32) or None,
        budget_bytes=each.budget_bytes,
        floor_bytes=each.floor_bytes,
        cached_fragments=CachedFragments(count=each.cached_fragments, bytes=each.cached_bytes),
        last_seen_time=seen,
        speed=measured[0],
        link=measured[1],
    )


def _speed(values: Speed) -> DeviceSpeed | None:
    """What is known of a speed; None where nothing is."""
    known = {name: value for name, value in asdict(values).items() if value is not None}
    return DeviceSpeed(**known) if known else None


def _link(link: Link) -> DeviceLink | None:
    """What is known of a link; None where nothing is."""
    if link == UNKNOWN_LINK:
        return None
    return copied(
        DeviceLink,
        link,
        peers=tuple(
            copied(DevicePeer, each, name=name)
            for name, each in link.peers
            if name  # the coordinator has none
        ),
    )


def _limit(snapshot: DevicePoolSnapshot, device: Device, node: str | None) -> int | None:
    """The memory limit in force of a device's pod; as it was where the pods were not read."""
    limits = {pod.node: pod.limit_in_force_bytes or pod.limit_bytes for pod in snapshot.pods}
    before = None if device.status is None else device.status.limit_bytes
    return before if node is None else limits.get(node, before)


def _child(
    snapshot: DevicePoolSnapshot,
    device: Device,
    ready: ConditionUpdate,
    reported: ConnectedDevice | None = None,
    status: DeviceStatus | None = None,
) -> DeviceChild:
    """A Device; its status is as it was, but for what is given."""
    status, budget = status or device.status or DeviceStatus(), device_budget(device, reported)
    status = replace(status, limit_bytes=_limit(snapshot, device, status.node))
    return DeviceChild(
        device=manifest(
            snapshot.pool,
            "Device",
            device.metadata.name,
            labels_of(snapshot.pool, "device"),
            spec={"poolRef": {"name": snapshot.pool.metadata.name}},
        ),
        status=print_device(with_conditions(status, device, [ready, budget], snapshot.now)),
        notes=excess_note(device, budget, snapshot.now),
    )
