"""What fragments take of devices' disks, in plans: `test_placement` weighs them by brute force."""

from fragment_pools import MIB, SECOND, device, partition, placed, reloads
from shoal_planner.outcome import Infeasible
from shoal_planner.placement import plan
from shoal_protocol.choices import Objective


def test_what_a_disk_cannot_hold_together_is_on_other_devices() -> None:
    document = partition([10**9] * 3, [20 * MIB] * 3)
    small = device("small", 64 * MIB, 4 * SECOND, cache_bytes=15 * MIB)
    pool = [small, device("large", 64 * MIB, cache_bytes=64 * MIB)]
    answer = placed(plan(document, pool, Objective.LATENCY))
    assert answer.homes() == (("small",), ("large",), ("large",))
    lost = next(each for each in answer.rejected if each.alternative == "split by memory")
    taken = "its fragments take 20 MiB on disk; small has 15 MiB: it would load them in turn"
    assert lost.reason == taken


def test_what_no_disk_can_hold_together_is_loaded_in_turn() -> None:
    document = partition([10**9] * 3, [20 * MIB] * 3)
    answer = placed(
        plan(document, [device("a", 64 * MIB, cache_bytes=15 * MIB)], Objective.LATENCY)
    )
    assert reloads(answer)


def test_a_fragment_that_no_disk_has_room_for_is_refused_with_need_and_have() -> None:
    document = partition([10**9] * 2, [20 * MIB, 40 * MIB])
    pool = [device("a", 64 * MIB, cache_bytes=15 * MIB), device("b", 24 * MIB)]
    answer = plan(document, pool, Objective.LATENCY)
    assert isinstance(answer, Infeasible)
    assert answer.message("cut").startswith(
        "cut cannot be placed: a fragment takes 20.1 MiB on a device's disk; of the devices with "
        "enough memory there are for fragments: a 15 MiB; cut finer or raise the cache's size"
    )
