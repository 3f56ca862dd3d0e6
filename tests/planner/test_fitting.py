"""Pools of many unequal devices with hardly more memory than a model takes: what fits is found."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragment_pools import MIB, cut_table, device, partition, placed, reloads
from shoal_api.kinds.placement import Pin
from shoal_planner.costs import Costs
from shoal_planner.devices import PoolDevice
from shoal_planner.fitting import fitted
from shoal_planner.goal import Goal
from shoal_planner.placement import plan
from shoal_planner.planned_cuts import choose_cut
from shoal_planner.search import Question, Wishes, classes_of, search
from shoal_protocol.choices import Objective
from shoal_protocol.partition import PartitionDocument


def scarce(
    chance: random.Random, devices: int, *, spare: int = 0
) -> tuple[PartitionDocument, list[PoolDevice], list[str]]:
    """Fragments that each fill a device but for some MiB, and their devices, in another order."""
    sizes = [chance.randint(4, 40) for _ in range(devices)]
    document = partition(
        [chance.randint(1, 5) * 10**8 for _ in sizes], [size * MIB for size in sizes]
    )
    homes = [f"d{index:02}" for index in range(devices)]
    pool = [
        device(
            name,
            budget=(size + chance.randint(0, spare)) * MIB,
            flops=chance.randint(10, 100) * 10**8,
        )
        for name, size in zip(homes, sizes, strict=True)
    ]
    return document, sorted(pool, key=lambda _: chance.random()), homes


@pytest.mark.parametrize("spare", [0, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_dozen_unequal_devices_that_just_hold_a_model_hold_it_at_once(
    seed: int, spare: int
) -> None:
    document, pool, _ = scarce(random.Random(seed), 12, spare=spare)  # noqa: S311 - a fixed seed
    answer = placed(plan(document, pool, Objective.THROUGHPUT))
    assert not reloads(answer)


def test_pins_that_a_dozen_unequal_devices_can_follow_are_no_reason_to_refuse() -> None:
    document, pool, homes = scarce(random.Random(0), 12)  # noqa: S311 - a fixed seed
    pins = [Pin(fragment=each, device=homes[each]) for each in (3, 8)]
    answer = placed(plan(document, pool, Objective.THROUGHPUT, pins=pins))
    assert not reloads(answer)
    assert [answer.homes()[each] for each in (3, 8)] == [("d03",), ("d08",)]


def test_of_very_many_fragments_no_memory_is_lost_where_not_all_borders_are_tried() -> None:
    """Eight devices that just hold 256 fragments, of which each device takes another number."""
    chance = random.Random(1)  # noqa: S311 - a fixed seed
    counts = [11, 17, 23, 29, 37, 41, 47, 51]
    document = partition([10**7] * sum(counts), [MIB] * sum(counts))
    pool = [
        device(f"d{index}", budget=count * MIB, flops=chance.randint(10, 100) * 10**8)
        for index, count in enumerate(counts)
    ]
    pool = [*pool[::2], *pool[1::2]]
    answer = placed(plan(document, pool, Objective.THROUGHPUT))
    assert not reloads(answer)


def test_cuts_are_planned_that_a_dozen_unequal_devices_just_hold() -> None:
    chance = random.Random(3)  # noqa: S311 - a fixed seed
    weights = [chance.randint(4, 40) * MIB for _ in range(12)]
    pool = [
        device(f"d{place:02}", budget=2 * size, flops=chance.randint(10, 100) * 10**8)
        for place, size in enumerate(weights)
    ]
    table = cut_table([10**8] * 12, weights)
    found = choose_cut(table, sorted(pool, key=lambda _: chance.random()), Goal(Objective.LATENCY))
    assert found is not None
    assert found.period is not None, "the devices would load fragments in turn"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_fits_at_all_is_found(data: st.DataObject) -> None:
    """Against a search that weighs all divisions."""
    numbers = st.integers(1, 5)
    sizes: Sequence[int] = data.draw(st.lists(numbers, min_size=1, max_size=6))
    crossing = [data.draw(st.integers(0, 2)) * MIB // 2 for _ in range(len(sizes) + 1)]
    document = partition([10**8] * len(sizes), [size * MIB for size in sizes], crossing)
    pool = [
        device(
            f"d{index}",
            budget=data.draw(st.integers(1, 9)) * MIB,
            single=data.draw(st.booleans()),
            cache_bytes=data.draw(st.sampled_from([None, 2 * MIB, 4 * MIB])),
        )
        for index in range(data.draw(st.integers(1, 4)))
    ]
    pinned = st.dictionaries(
        st.integers(0, len(sizes) - 1), st.sampled_from([each.name for each in pool]), max_size=2
    )
    question = Question(
        costs=Costs(document),
        pool=pool,
        goal=Goal(Objective.THROUGHPUT),
        wishes=Wishes(required=data.draw(pinned), replicas=False),
        reloading=data.draw(st.booleans()),
    )
    every = search(question)
    assert every is not None
    classes = classes_of(question)
    steps = fitted(question, classes)
    assert (steps is not None) == bool(every.divisions)
    for step in steps or ():
        (like,) = [each.like for each, count in zip(classes, step.chosen, strict=True) if count]
        assert question.fits(step.span, like)
