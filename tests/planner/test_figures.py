"""A plan in figures: what programs read, and what was measured beside it."""

import json
from dataclasses import asdict

import pytest

from fragment_pools import MIB, SECOND, device, partition, placed
from shoal_planner.figures import Rates, figures, infeasible_figures
from shoal_planner.outcome import Infeasible
from shoal_planner.placement import MAX_REJECTED, plan
from shoal_protocol.choices import Objective

DOCUMENT = partition(
    [10**8, 2 * 10**8], [18 * MIB] * 2, [10**6, 2 * 10**6, 10**6], least=[6 * MIB] * 2
)
POOL = [
    device("fast", flops=2 * SECOND, link_bytes_per_second=10**8, latency_nanoseconds=1_000_000),
    device("slow", link_bytes_per_second=10**8),
]


def test_the_figures_of_each_device_add_up_to_those_of_the_plan() -> None:
    answer = placed(plan(DOCUMENT, POOL, Objective.LATENCY))
    of = figures(answer)
    total = 0.0
    for stage in of.stages:
        for each in stage.devices:
            assert each.compute_seconds is not None
            assert each.held_bytes <= (each.budget_bytes or 0)
            total += sum(
                getattr(each, f"{name}_seconds")
                for name in ("compute", "read", "receive", "send", "delay")
            )
    assert total == pytest.approx(of.predicted.latency_seconds)


def test_replicas_share_the_items_as_fast_as_each_can() -> None:
    document = partition([10**8], [10 * MIB])
    (stage,) = figures(placed(plan(document, POOL, Objective.THROUGHPUT))).stages
    assert [each.share for each in stage.devices] == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
    # Two of three items take 50 ms, the third 100 ms.
    assert stage.predicted_seconds == pytest.approx(0.2 / 3)


def test_what_a_run_measured_is_beside_what_was_predicted() -> None:
    of = figures(placed(plan(DOCUMENT, POOL, Objective.LATENCY)))
    rates = Rates(items_per_second=3.0, latency_seconds=0.4)
    measured = of.with_measured(rates, {0: 0.1, 1: 0.25})
    assert measured.measured == rates
    seconds = [stage.measured_seconds for stage in measured.stages]
    assert sum(each or 0.0 for each in seconds) == pytest.approx(0.35)
    partly = of.with_measured(rates, {0: 0.1})
    assert None in [stage.measured_seconds for stage in partly.stages]


def test_figures_are_json_of_bounded_size() -> None:
    document = partition([10**8] * 12, [4 * MIB] * 12)
    pool = [device(f"d{index}", flops=SECOND * (1 + index % 5)) for index in range(20)]
    of = figures(placed(plan(document, pool, Objective.THROUGHPUT)))
    assert len(of.rejected) <= MAX_REJECTED
    assert json.loads(json.dumps(asdict(of), allow_nan=False))["objective"] == "Throughput"


def test_a_refusal_says_what_each_device_lacks() -> None:
    answer = plan(
        partition([1], [30 * MIB]), [device("a"), device("b", budget=MIB)], Objective.LATENCY
    )
    assert isinstance(answer, Infeasible)
    of = infeasible_figures(answer, answer.message("rec"))
    assert of.need_bytes == 30 * MIB
    assert [(each.device, each.missing_bytes) for each in of.devices] == [
        ("a", 6 * MIB),
        ("b", 29 * MIB),
    ]
