"""The bench of the planner of layers: its comparisons hold; its times are not for a test."""

import pytest

import planner as bench


def test_no_straight_pipeline_has_a_larger_bottleneck_than_the_published_one() -> None:
    found = list(bench.published())
    assert len(found) == len(bench.PUBLISHED)
    assert [each.name for each in found if not each.met] == []


def test_no_rule_of_thumb_is_better_on_measured_machines() -> None:
    found = list(bench.machines())
    assert len(found) == 16
    assert [each.name for each in found if not each.met] == []
    assert min(each.value for each in found) < 0.99, "the rules are never beaten"


@pytest.mark.parametrize(("layers", "devices", "gap"), [(213, 6, 0.0), (430, 16, 0.1)])
def test_many_layers_on_many_devices_keep_their_gap(layers: int, devices: int, gap: float) -> None:
    _, stated = bench.chains(layers, devices, gap)
    assert stated.met
