"""What the command line says of sizes agrees with what the kinds take."""

from shoal_api.kinds.device_pool import MAX_LOCAL_DEVICES
from shoal_cli.local.sizes import MOST_DEVICES


def test_one_machine_pretends_as_many_devices_as_a_pool_may_have() -> None:
    assert MOST_DEVICES == MAX_LOCAL_DEVICES
