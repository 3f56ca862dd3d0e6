"""What measurements of devices and links change about a plan."""

from dataclasses import replace

import pytest

from fragment_pools import MIB, SECOND, device, partition, placed
from shoal_planner.costs import Costs, Span
from shoal_planner.device_costs import Holding
from shoal_planner.devices import ASSUMED_FLOPS_PER_CPU, PAGE_BYTES_PER_SECOND, PoolDevice
from shoal_planner.placement import plan
from shoal_planner.speeds import levelled, measured_device, refined
from shoal_protocol.choices import Objective
from shoal_protocol.partition import Work
from shoal_protocol.speeds import FragmentTime, Link, Speed
from shoal_protocol.units import Bytes, nanoseconds

BUDGET = Bytes(24 * MIB)
GIGA = 1e9


def measured(name: str, processors: float = 1.0, **rates: float) -> PoolDevice:
    return measured_device(name, BUDGET, Speed(processors=processors, **rates))


def test_a_device_that_was_not_measured_is_planned_with_what_is_assumed() -> None:
    assert measured_device("pi-4", BUDGET) == PoolDevice(name="pi-4", budget_bytes=BUDGET)


def test_a_device_with_half_a_processor_computes_and_maps_half_as_fast() -> None:
    rates = {"product_flops_per_second": 80 * GIGA, "page_bytes_per_second": 4 * GIGA}
    whole, half = measured("whole", 1.0, **rates), measured("half", 0.5, **rates)
    assert half.flops_per_second == whole.flops_per_second // 2
    assert half.page_bytes_per_second == whole.page_bytes_per_second // 2


def test_more_processors_compute_faster_but_map_no_faster() -> None:
    four = measured_device("four", BUDGET, Speed(processors=4.0))
    assert four.flops_per_second == 4 * ASSUMED_FLOPS_PER_CPU
    assert four.page_bytes_per_second == PAGE_BYTES_PER_SECOND


def test_weights_that_are_read_again_come_from_the_disk() -> None:
    fast = measured("fast", page_bytes_per_second=10 * GIGA, disk_bytes_per_second=2 * GIGA)
    slow = measured("slow", page_bytes_per_second=10 * GIGA, disk_bytes_per_second=0.04 * GIGA)
    assert slow.page_bytes_per_second < 0.04 * GIGA < fast.page_bytes_per_second < 2 * GIGA
    assert slow.reload_bytes_per_second < 0.04 * GIGA


def test_a_device_with_little_to_compute_takes_as_long_as_reading_its_weights() -> None:
    document = partition([MIB], [16 * MIB])
    word = measured("a", product_flops_per_second=80 * GIGA, memory_bytes_per_second=4 * GIGA)
    answer = placed(plan(document, [word], Objective.LATENCY))
    assert answer.latency_nanoseconds == -(-8 * MIB * SECOND // (4 * SECOND))


def test_each_kind_of_work_takes_its_own_rate_where_all_are_measured() -> None:
    document = partition([SECOND], [MIB])
    (fragment,) = document.fragments
    work = Work(convolution=4 * SECOND, matrix=3 * SECOND, memory=2 * SECOND)
    known = replace(document, fragments=(replace(fragment, work=work),))
    rates = {
        "convolution_flops_per_second": 8 * GIGA,
        "product_flops_per_second": 4 * GIGA,
        "memory_bytes_per_second": 2 * GIGA,
    }
    both = measured("both", 2.0, **rates)
    whole = Span(0, 1)
    assert Costs(known).on(whole, both).compute == SECOND // 4 + 3 * SECOND // 8 + SECOND
    del rates["memory_bytes_per_second"]
    partly = measured("partly", 2.0, **rates)
    assert Costs(known).on(whole, partly).compute == Costs(document).on(whole, partly).compute


def test_a_device_that_computes_slowly_gets_fewer_fragments() -> None:
    document = partition([SECOND] * 6, [4 * MIB] * 6)
    rates = {"convolution_flops_per_second": 8 * GIGA, "product_flops_per_second": 8 * GIGA}
    pool = [measured("fast", 1.0, **rates), measured("slow", 0.2, **rates)]
    answer = placed(plan(document, pool, Objective.THROUGHPUT))
    work = {name: 0 for name in ("fast", "slow")}
    for stage in answer.stages:
        for name in stage.devices:
            work[name] += len(stage.fragments)
    assert work["fast"] == 5
    assert work["slow"] == 1


def test_a_measured_link_limits_and_delays() -> None:
    link = Link(bytes_per_second=12.5e6, round_trip_seconds=0.004)
    known = measured_device("far", BUDGET, link=link)
    assert known.link_bytes_per_second == 12_500_000
    assert known.latency_nanoseconds == 2_000_000


def test_devices_that_differ_as_measurements_do_count_as_equal() -> None:
    pool = [device(name, flops=flops) for name, flops in (("a", 100), ("b", 109), ("c", 200))]
    assert [each.flops_per_second for each in levelled(pool)] == [104, 104, 200]


def test_what_is_unknown_of_a_device_stays_unknown_beside_known_ones() -> None:
    pool = [device("a", link_bytes_per_second=100), device("b"), device("c")]
    assert [each.link_bytes_per_second for each in levelled(pool)] == [100, None, None]


def test_stages_stay_whole_where_reading_weights_again_is_slow() -> None:
    """Each of three devices could serve all three stages in blocks: a third of their weights each
    time from the disk. One whole stage each is faster."""
    document = partition([37 * SECOND // 10] * 3, [66 * MIB] * 3, least=[23 * MIB] * 3)
    rates = {"product_flops_per_second": 200 * GIGA, "page_bytes_per_second": 11 * GIGA}
    pool = [
        measured_device(
            name,
            Bytes(90 * MIB),
            Speed(processors=share, disk_bytes_per_second=0.4 * GIGA, **rates),
        )
        for name, share in (("a", 0.5), ("b", 0.4), ("c", 0.35))
    ]
    answer = placed(plan(document, pool, Objective.THROUGHPUT))
    assert [len(stage.devices) for stage in answer.stages] == [1, 1, 1]
    assert all(stage.held(Holding.WHOLE) for stage in answer.stages)


def ran(name: str, *times: float, flops: int = 1000) -> PoolDevice:
    """A device on which tasks of the first fragments took so many seconds."""
    known = tuple(
        (fragment.digest, nanoseconds(took))
        for fragment, took in zip(RAN.fragments, times, strict=False)
    )
    return replace(device(name, flops=flops), times=known)


RAN = partition([1000] * 3, [MIB] * 3)
"""By the rates of `ran`, a task of each takes a second."""


def test_what_tasks_took_takes_the_place_of_what_rates_predict() -> None:
    (slow,) = refined(RAN, [ran("a", 2.0, 3.0, 1.0)])
    assert Costs(RAN).times(Span(0, 3), slow) == (2 * SECOND, 3 * SECOND, SECOND)
    assert Costs(RAN).on(Span(0, 2), slow).compute == 5 * SECOND


def test_what_was_measured_of_tasks_and_loads_under_a_quota_is_not_stretched_again() -> None:
    known = (FragmentTime(digest=RAN.fragments[0].digest, task_seconds=2.0, load_seconds=0.05),)
    limited = measured_device("a", Bytes(MIB), Speed(processors=0.25), times=known)
    assert limited.loads == ((RAN.fragments[0].digest, SECOND // 20),)
    assert limited.times == ((RAN.fragments[0].digest, 2 * SECOND),)


def test_a_fragment_that_has_not_run_on_a_device_takes_the_ratio_that_it_had_elsewhere() -> None:
    _, other = refined(RAN, [ran("a", 2.0, 3.0), ran("b", flops=500)])
    assert Costs(RAN).times(Span(0, 2), other) == (4 * SECOND, 6 * SECOND)


def test_a_fragment_that_ran_nowhere_takes_the_ratio_of_the_device() -> None:
    (slow,) = refined(RAN, [ran("a", 2.0, 2.0)])
    assert Costs(RAN).times(Span(2, 3), slow) == (2 * SECOND,)


SWAPPED = partition([1000] * 2, [30 * MIB] * 2, least=[10 * MIB] * 2)
"""By the rates of `swapped`, a task computes for a second, and reads for three within the least."""


def swapped(name: str, *within: tuple[int, float]) -> PoolDevice:
    """A device on which tasks of the first fragment took so many seconds within grants of MiB."""
    digest = SWAPPED.fragments[0].digest
    return replace(
        device(name, flops=1000),
        budget_bytes=Bytes(30 * MIB),
        page_bytes_per_second=5 * MIB,
        times=((digest, nanoseconds(1.0)),),
        within=tuple((digest, Bytes(mib * MIB), nanoseconds(took)) for mib, took in within),
    )


def in_blocks(on: PoolDevice, fragment: int, granted_mib: int) -> float:
    return Costs(SWAPPED).at_grant(fragment, on, granted_mib * MIB) / SECOND


def test_what_tasks_took_in_blocks_corrects_what_is_predicted_of_other_grants() -> None:
    (untried,) = refined(SWAPPED, [swapped("a")])
    assert [in_blocks(untried, 0, mib) for mib in (10, 20, 30)] == [4.0, 2.5, 1.0]
    (slow,) = refined(SWAPPED, [swapped("a", (10, 7.0))])
    for fragment in (0, 1):
        found = [in_blocks(slow, fragment, mib) for mib in (10, 20, 30)]
        assert found == pytest.approx([7.0, 4.0, 1.0])


def test_of_several_grants_the_median_counts_and_one_that_reads_nothing_does_not() -> None:
    tried = swapped("a", (10, 7.0), (15, 5.5), (20, 100.0), (30, 9.0), (40, 9.0))
    (slow,) = refined(SWAPPED, [tried])
    assert in_blocks(slow, 0, 10) == pytest.approx(7.0, rel=0.02)
    assert slow.within == ()


def test_reading_that_took_less_than_nothing_leaves_a_rate() -> None:
    (fast,) = refined(SWAPPED, [swapped("a", (10, 0.5))])
    assert 1.0 < in_blocks(fast, 0, 10) < 1.2


def test_devices_that_read_again_as_fast_as_measurements_differ_stay_alike() -> None:
    one, other = refined(SWAPPED, [swapped("a", (10, 7.0)), swapped("b", (10, 7.5))])
    assert replace(one, name="") == replace(other, name="")


def test_devices_whose_tasks_differ_as_measurements_do_stay_alike() -> None:
    one, other = refined(RAN, [ran("a", 1.0, 1.0, 1.0), ran("b", 1.1, 1.1, 1.1)])
    assert replace(one, name="") == replace(other, name="")


def test_the_next_plan_gives_less_to_a_device_on_which_tasks_took_longer() -> None:
    before = placed(plan(RAN, [ran("a"), ran("b", flops=900)], Objective.LATENCY))
    assert [stage.devices for stage in before.stages] == [("a",)]
    pool = [ran("a", 2.0, 2.0, 2.0), ran("b", 1.1, 1.1, 1.1, flops=900)]
    after = placed(plan(RAN, pool, Objective.LATENCY))
    assert [stage.devices for stage in after.stages] == [("b",)]
