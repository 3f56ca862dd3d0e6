"""Devices: what a pool's coordinator reports of each, as objects that `kubectl` shows. Pure.

A device that is silent is Ready Unknown; so are all while the coordinator does not answer. One that
is not connected stays as long as its node is selected, since its agent will be back.
"""

from dataclasses import replace
from typing import Final, assert_never

from shoal_api.columns import print_device
from shoal_api.kinds import Device, DevicePool
from shoal_api.kinds.device import CachedFragments, DeviceStatus
from shoal_api.schema import API_VERSION
from shoal_operator.reconcile.condition_updates import (
    FALSE,
    TRUE,
    UNKNOWN,
    ConditionUpdate,
    conditions,
    shortened,
)
from shoal_operator.reconcile.decision import DeviceChild, Manifest, ObjectKey
from shoal_operator.reconcile.names import device_object_name, namespace_of
from shoal_operator.reconcile.pods import labels_of, metadata_of
from shoal_operator.reconcile.snapshot import (
    ConnectedDevice,
    CoordinatorView,
    DevicePoolSnapshot,
    DeviceState,
    Unreachable,
)
from shoal_operator.reconcile.times import earlier, seconds_since

_SEEN_SECONDS: Final = 60.0
_THERE_SECONDS: Final = 300.0
"""How often a device is written only because it is there: all that a pool at rest writes."""


def device_key(pool: DevicePool, name: str) -> ObjectKey:
    """Where a Device is, to remove it."""
    return ObjectKey(
        api_version=API_VERSION, kind="Device", namespace=namespace_of(pool), name=name
    )


def devices_gone(snapshot: DevicePoolSnapshot, selected: frozenset[str]) -> frozenset[str]:
    """Devices that will not be back, by the names of their objects: not connected, and their node
    is not selected any more.
    """
    if isinstance(snapshot.view, Unreachable):
        return frozenset()
    alive = {each.name for each in snapshot.view.devices if each.state is not DeviceState.LOST}
    pool = snapshot.pool.metadata.name
    stay = {device_object_name(pool, name) for name in selected | alive}
    return frozenset(device.metadata.name for device in snapshot.devices) - stay


def device_children(snapshot: DevicePoolSnapshot, gone: frozenset[str]) -> tuple[DeviceChild, ...]:
    """A Device for each that is connected, and for those that were and are not gone."""
    known = {each.metadata.name: each for each in snapshot.devices}
    pool = snapshot.pool.metadata.name
    match snapshot.view:
        case Unreachable(reason=reason):
            update = ConditionUpdate("Ready", UNKNOWN, "CoordinatorUnreachable", reason)
            return tuple(_as_before(snapshot, each, update) for _, each in sorted(known.items()))
        case CoordinatorView(devices=reported):
            connected = {device_object_name(pool, each.name): each for each in reported}
            update = ConditionUpdate(
                "Ready", FALSE, "NotConnected", "the coordinator has no session of it"
            )
            shown = {
                name: _reported(snapshot, name, each, known.get(name))
                for name, each in connected.items()
                if each.state is not DeviceState.LOST or name in known
            } | {
                name: _as_before(snapshot, device, update)
                for name, device in known.items()
                if name not in connected
            }
            return tuple(shown[name] for name in sorted(shown.keys() - gone))
        case _:
            assert_never(snapshot.view)


def _reported(
    snapshot: DevicePoolSnapshot, name: str, each: ConnectedDevice, before: Device | None
) -> DeviceChild:
    old = DeviceStatus() if before is None or before.status is None else before.status
    seen = earlier(snapshot.now, each.silent_seconds)
    stays = _THERE_SECONDS if each.state is DeviceState.READY else _SEEN_SECONDS
    if old.last_seen_time is not None and seconds_since(old.last_seen_time, seen) < stays:
        seen = old.last_seen_time
    status = DeviceStatus(
        conditions=old.conditions,
        node=shortened(each.name, 253),
        architecture=shortened(each.architecture, 32) or None,
        budget_bytes=each.budget_bytes,
        floor_bytes=each.floor_bytes,
        cached_fragments=CachedFragments(count=each.cached_fragments, bytes=each.cached_bytes),
        last_seen_time=seen,
    )
    return _child(snapshot, name, before, status, _state_update(each))


def _as_before(
    snapshot: DevicePoolSnapshot, device: Device, update: ConditionUpdate
) -> DeviceChild:
    status = device.status or DeviceStatus()
    return _child(snapshot, device.metadata.name, device, status, update)


def _state_update(each: ConnectedDevice) -> ConditionUpdate:
    match each.state:
        case DeviceState.READY:
            return ConditionUpdate("Ready", TRUE, "Connected", "its session is alive")
        case DeviceState.SILENT:
            return ConditionUpdate(
                "Ready", UNKNOWN, "Silent", "it does not answer, and is not given up yet"
            )
        case DeviceState.DRAINING:
            return ConditionUpdate(
                "Ready", FALSE, "Draining", "it finishes what it runs, and leaves"
            )
        case DeviceState.LOST:
            return ConditionUpdate("Ready", FALSE, "Lost", "it was given up")
        case _:
            assert_never(each.state)


def _child(
    snapshot: DevicePoolSnapshot,
    name: str,
    before: Device | None,
    status: DeviceStatus,
    update: ConditionUpdate,
) -> DeviceChild:
    generation = 1 if before is None else before.metadata.generation or 0
    known = conditions(status.conditions, [update], generation=generation, now=snapshot.now)
    pool = snapshot.pool
    labels = labels_of(pool, "device", pool=pool.metadata.name)
    manifest: Manifest = {
        "apiVersion": API_VERSION,
        "kind": "Device",
        "metadata": metadata_of(pool, name, labels),
        "spec": {"poolRef": {"name": pool.metadata.name}},
    }
    status = replace(status, observed_generation=generation, conditions=known)
    status = print_device(status)
    return DeviceChild(device=manifest, status=status)
