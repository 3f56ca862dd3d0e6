"""What a device says of its speed is a number from the wire: no plan of others fails for it."""

from itertools import product

import pytest

from fragment_pools import MIB, device, partition, placed
from shoal_planner.devices import PoolDevice
from shoal_planner.placement import plan
from shoal_planner.speeds import levelled, measured_device, refined
from shoal_protocol.choices import Objective
from shoal_protocol.speeds import fragment_times_of, link_of, speed_of
from shoal_protocol.units import Bytes
from shoal_protocol.v1 import coordinator_pb2 as api

ABSURD = (5e-324, 1e-300, 1.1e-15, 9e14, 1e308, float("nan"), -1.0)
RATES = (
    *("processors", "convolution_flops_per_second", "product_flops_per_second"),
    *("memory_bytes_per_second", "page_bytes_per_second", "disk_bytes_per_second"),
)


def told(rate: float, link: float, time: float) -> PoolDevice:
    """A device that says these numbers of all that it says anything of."""
    status = api.DeviceStatus(name="liar", link_bytes_per_second=link, round_trip_seconds=time)
    status.transfer_seconds_per_byte = status.handling_seconds = time
    for name in RATES:
        setattr(status.speed, name, rate)
    for other in ("", "honest", "liar"):
        status.links.add(device=other, bytes_per_second=link, round_trip_seconds=time)
    for number in range(2):
        fragment = status.times.add(digest=f"sha256:{number:064x}", seconds=time, load_seconds=rate)
        fragment.within.add(granted_bytes=5 * MIB, seconds=time)
    known = speed_of(status.speed), link_of(status), fragment_times_of(status)
    return measured_device("liar", Bytes(64 * MIB), *known)


@pytest.mark.parametrize(("rate", "link", "time"), [*product(ABSURD, repeat=3)])
def test_a_device_with_absurd_speeds_keeps_nobody_from_planning(
    rate: float, link: float, time: float
) -> None:
    document = partition([10**8] * 2, [20 * MIB] * 2, [10**5] * 3, least=[7 * MIB, 5 * MIB])
    honest = device("honest", budget=64 * MIB)
    pool = refined(document, levelled([honest, told(rate, link, time)]))
    assert placed(plan(document, pool, Objective.LATENCY)).stages
