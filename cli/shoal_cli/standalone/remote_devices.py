"""A coordinator's devices, as manifests, plans and reports see them."""

from collections.abc import Sequence
from dataclasses import replace

from shoal_api.kinds import DevicePool
from shoal_api.kinds.device_pool import Local, LocalDevice
from shoal_cli.local.manifests import Manifests
from shoal_cli.local.orders import JobOrder, Orders
from shoal_cli.local.planned_jobs import PlannedJob, device_report
from shoal_cli.local.report import DeviceReport
from shoal_cli.local.watch import DeviceTally
from shoal_cli.transfer.joined import Reachable
from shoal_planner.devices import PoolDevice
from shoal_planner.speeds import levelled, measured_device
from shoal_protocol.choices import Residency
from shoal_protocol.speeds import fragment_times_of, link_of, speed_of
from shoal_protocol.units import Bytes
from shoal_protocol.v1 import coordinator_pb2 as pb


class NoDevices(Exception):
    """A coordinator without a device that could work."""


async def ready_devices(coordinator: Reachable) -> Sequence[pb.DeviceStatus]:
    """The devices that can work now. Raises `NoDevices`, and as `Reachable.calling` does."""
    async with coordinator.calling() as client:
        found = await client.devices()
    ready = [each for each in found if each.state == pb.DeviceStatus.READY]
    if not ready:
        away = f" ({len(found)} were there before)" if found else ""
        raise NoDevices(
            f"{coordinator.target} has no device that is ready{away}; `shoal invite` on the "
            "coordinator's machine prints a line to start an agent with"
        )
    return sorted(ready, key=lambda device: device.name)


def on_devices(manifests: Manifests, devices: Sequence[pb.DeviceStatus]) -> Manifests:
    """The manifests with the coordinator's devices in every pool."""
    local = Local(
        devices=tuple(LocalDevice(name=d.name, memory=Bytes(d.budget_bytes)) for d in devices)
    )

    def served(pool: DevicePool) -> DevicePool:
        return replace(pool, spec=replace(pool.spec, local=local))

    return replace(manifests, pools={name: served(p) for name, p in manifests.pools.items()})


def as_measured(orders: Orders, devices: Sequence[pb.DeviceStatus]) -> Orders:
    """The orders, planned for what the devices were measured to do."""

    def planned(order: JobOrder) -> JobOrder:
        single = order.plan.pool.spec.residency is Residency.SINGLE
        cut = replace(order.plan.cut, devices=planned_for(devices, single=single))
        return replace(order, plan=replace(order.plan, cut=cut))

    return replace(orders, jobs=tuple(map(planned, orders.jobs)))


def planned_for(
    devices: Sequence[pb.DeviceStatus], *, single: bool = False
) -> tuple[PoolDevice, ...]:
    """A coordinator's devices as planning sees them."""
    return levelled(
        [
            measured_device(
                each.name,
                Bytes(each.budget_bytes),
                speed_of(each.speed),
                link_of(each),
                fragment_times_of(each),
                cache_bytes=Bytes(each.cache_bytes) or None,
                single=single,
            )
            for each in devices
        ]
    )


def device_seen(jobs: Sequence[PlannedJob], name: str, tally: DeviceTally) -> DeviceReport:
    """A device of a coordinator, which knows within which budget it took what: that may follow a
    limit of the device's machine."""
    return device_report(
        jobs,
        name=name,
        budget_bytes=tally.largest_budget_bytes,
        tally=tally,
        has_exceeded=tally.last.HasField("budget_excess"),
    )
