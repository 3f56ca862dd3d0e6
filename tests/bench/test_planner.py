"""The bench of the planner of layers: its comparisons hold; its times are not for a test."""

import planned_pools
import pytest

import planner as bench
from shoal_planner.layers.documents import pipedream
from shoal_protocol.choices import Objective


def test_no_straight_pipeline_has_a_larger_bottleneck_than_the_published_one() -> None:
    found = list(bench.published())
    assert len(found) == 3 * len(bench.PIPEDREAM) * len(bench.LINKS)
    assert [each.name for each in found if not each.met] == []


def test_no_rule_of_thumb_is_better_on_measured_machines() -> None:
    found = list(bench.machines())
    assert len(found) == 16
    assert [each.name for each in found if not each.met] == []
    assert min(each.value for each in found) < 0.99, "the rules are never beaten"


def test_the_recurrence_of_pipedream_finds_what_it_published() -> None:
    text = (bench.PROFILES / "pipedream" / "vgg16.txt").read_text()
    found = bench.pipedream_bottlenecks(pipedream(text, training=True), bench.FREE)
    for (model, devices), bottleneck in bench.PUBLISHED.items():
        if model == "vgg16":
            assert found[devices] == pytest.approx(bottleneck, rel=2e-4)


@pytest.mark.parametrize(
    ("size", "objective"),
    [
        *((bench.SIZES[0], each) for each in Objective),
        (bench.SIZES[1], Objective.THROUGHPUT),
        pytest.param(bench.SIZES[1], Objective.LATENCY, marks=pytest.mark.minutes),
        pytest.param(bench.SIZES[1], Objective.MAKESPAN, marks=pytest.mark.minutes),
    ],
)
def test_many_layers_on_many_devices_keep_their_gap(size: bench.Size, objective: Objective) -> None:
    _, stated = bench.chains(size, objective)
    assert stated.met


@pytest.mark.minutes  # as `planner/test_large_pools.py`, on the bench's pools
def test_pools_of_unequal_devices_keep_their_gap_and_beat_simple_splits() -> None:
    took, *others = planned_pools.cuts(12, Objective.THROUGHPUT, 1)
    assert took.value > 0
    assert [each.name for each in others if not each.met] == []


@pytest.mark.minutes
def test_few_fragments_move_after_a_loss_and_a_second_model_gains_from_what_is_known() -> None:
    assert planned_pools.moved(2).met
    assert planned_pools.second_models(2).met


def test_what_moves_after_the_loss_of_a_single_device_is_not_judged() -> None:
    assert planned_pools.moved(1).met is None
