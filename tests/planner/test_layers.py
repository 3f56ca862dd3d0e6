"""Planning at the level of layers, against brute force and by examples."""

import re
from collections.abc import Iterable
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layer_pools import MB, Plan, chain, every_plan, every_weight, graphs, pools, weigh
from shoal_planner.layers.cuts import cuts_of
from shoal_planner.layers.documents import pipedream, read_pool, read_profile
from shoal_planner.layers.graph import COORDINATOR, Device, Layer, LayerGraph, Link, Pool, Tensor
from shoal_planner.layers.planning import plan
from shoal_planner.layers.plans import LayerPlan, Unplaceable, explain, summary
from shoal_protocol.choices import Objective

ITEMS = 20


def value(objective: Objective, times: tuple[float, float]) -> float:
    period, first = times
    match objective:
        case Objective.THROUGHPUT:
            return period
        case Objective.LATENCY:
            return first
        case Objective.MAKESPAN:
            return first + (ITEMS - 1) * period


def as_weighed(answer: LayerPlan, pool: Pool) -> Plan:
    named = {device.name: device for device in pool.devices}
    return [
        (frozenset(stage.layers), [named[name] for name in stage.devices])
        for stage in answer.stages
    ]


def check_no_plan_is_better(graph: LayerGraph, pool: Pool, objective: Objective) -> None:
    cold = objective is Objective.MAKESPAN
    best = min(
        (value(objective, each) for each in every_weight(graph, pool, cold=cold)), default=inf
    )
    answer = plan(graph, pool, objective, ITEMS)
    if best == inf:
        assert isinstance(answer, Unplaceable)
        return
    assert isinstance(answer, LayerPlan), answer
    own = weigh(graph, pool, as_weighed(answer, pool), cold=cold)
    assert (answer.times.period, answer.times.first) == pytest.approx(own, abs=1e-9)
    assert answer.value == pytest.approx(best, abs=1e-9)
    assert answer.gap == 0


@settings(max_examples=200, deadline=None)
@given(graphs(), pools(), st.sampled_from(Objective))
def test_no_plan_of_any_cuts_and_groups_is_better(
    graph: LayerGraph, pool: Pool, objective: Objective
) -> None:
    check_no_plan_is_better(graph, pool, objective)


@pytest.mark.minutes
@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=2000, deadline=None)
@given(graphs(most=10), pools(most=5), st.sampled_from(Objective))
def test_no_plan_of_ten_layers_on_five_devices_is_better(
    graph: LayerGraph, pool: Pool, objective: Objective
) -> None:
    check_no_plan_is_better(graph, pool, objective)


@settings(max_examples=60, deadline=None)
@given(graphs(most=5), pools(), st.booleans())
def test_brute_force_weighs_every_plan(graph: LayerGraph, pool: Pool, cold: bool) -> None:
    weighed = [weigh(graph, pool, each, cold=cold) for each in every_plan(graph, pool)]
    tried = [*every_weight(graph, pool, cold=cold)]
    assert rounded(tried) == rounded(each for each in weighed if each != (inf, inf))


def rounded(weights: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return sorted((round(period, 6), round(first, 6)) for period, first in weights)


# ---- where not all can be tried ------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(graphs(), pools(), st.sampled_from(Objective))
def test_a_search_that_is_cut_short_states_a_bound_that_no_plan_beats(
    graph: LayerGraph, pool: Pool, objective: Objective
) -> None:
    best = plan(graph, pool, objective, ITEMS)
    short = plan(graph, pool, objective, ITEMS, max_steps=1)
    if isinstance(best, Unplaceable) or isinstance(short, Unplaceable):
        assert isinstance(best, Unplaceable) == isinstance(short, Unplaceable)
        return
    assert short.lower_bound <= best.value + 1e-9 <= short.value + 2e-9
    own = weigh(graph, pool, as_weighed(short, pool), cold=objective is Objective.MAKESPAN)
    assert (short.times.period, short.times.first) == pytest.approx(own, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(graphs(most=9), st.integers(3, 30))
def test_cuts_of_joined_layers_are_cuts_of_the_graph(graph: LayerGraph, most: int) -> None:
    every = cuts_of(graph, [1.0] * len(graph.layers), 10_000)
    some = cuts_of(graph, [1.0] * len(graph.layers), most)
    assert every.complete
    assert set(some.sets) <= set(every.sets)
    assert {0, (1 << len(graph.layers)) - 1} <= set(some.sets)
    assert len(some) <= most
    assert some.complete == (len(every) <= most)


# ---- examples ------------------------------------------------------------------------------------


def planned(graph: LayerGraph, pool: Pool, objective: Objective, items: int = 1) -> LayerPlan:
    answer = plan(graph, pool, objective, items)
    assert isinstance(answer, LayerPlan), answer
    return answer


def devices(*names: str, **rest: Any) -> tuple[Device, ...]:
    return tuple(Device(name=name, **rest) for name in names)


def test_replicas_share_the_items_of_the_stage_that_they_suit_by_their_speed() -> None:
    fast = Device(name="fast", flops_per_second=3.0)
    slow = Device(name="slow", flops_per_second=1.0)
    graph = LayerGraph((Layer(name="all", flops=12.0),), ())
    answer = planned(graph, Pool((slow, fast)), Objective.THROUGHPUT)
    assert answer.times.period == pytest.approx(3)
    assert [(part.device, part.share) for part in answer.stages[0].parts] == [
        ("fast", 0.75),
        ("slow", 0.25),
    ]


def test_a_cut_goes_where_little_crosses_a_slow_link() -> None:
    graph = chain([1, 1, 1, 1], moved=[0, 100 * MB, 1 * MB, 100 * MB, 0], weights=MB)
    pool = Pool(
        devices("a", "b", budget_bytes=2 * MB, reload_bytes_per_second=1), {}, Link(10 * MB)
    )
    answer = planned(graph, pool, Objective.THROUGHPUT)
    assert [stage.layers for stage in answer.stages] == [(0, 1), (2, 3)]
    assert answer.times.period == 2
    assert answer.gap == 0


def test_a_device_takes_more_than_fits_where_that_is_cheaper_than_another_device() -> None:
    graph = chain([1, 1], moved=[0, 100 * MB, 0], weights=10 * MB)
    small = devices("a", "b", budget_bytes=15 * MB, reload_bytes_per_second=10 * MB)
    answer = planned(graph, Pool(small, {}, Link(10 * MB)), Objective.LATENCY)
    (stage,) = answer.stages
    assert [part.reading_seconds for part in stage.parts] == [0.5, 0.5]
    assert answer.times.first == 2.5
    assert "500 ms" in text_of(answer, ("first", "second"))


def test_a_stage_is_a_branch_also_where_the_order_of_the_layers_interrupts_it() -> None:
    layers = tuple(
        Layer(name=name, seconds={"": 1.0}, weight_bytes=MB) for name in ("y1", "x", "y2")
    )
    tensors = (
        Tensor(producer=0, consumers=(2,), bytes=100 * MB),
        Tensor(producer=1, consumers=(None,), bytes=0),
    )
    small = devices("a", "b", budget_bytes=2 * MB, reload_bytes_per_second=1)
    answer = planned(
        LayerGraph(layers, tensors), Pool(small, {}, Link(1 * MB)), Objective.THROUGHPUT
    )
    assert [stage.layers for stage in answer.stages] == [(1,), (0, 2)]
    assert answer.times.period == 2


def test_inputs_come_over_the_link_of_the_coordinator() -> None:
    near = {frozenset((COORDINATOR, "near")): Link(100 * MB)}
    far = {frozenset((COORDINATOR, "far")): Link(1 * MB)}
    graph = chain([1], moved=[10 * MB, 0])
    answer = planned(graph, Pool(devices("far", "near"), near | far), Objective.LATENCY)
    assert answer.stages[0].devices == ("near",)
    assert answer.times.first == pytest.approx(1.1)


def test_a_layer_that_fits_nowhere_is_named_with_what_each_device_has() -> None:
    graph = chain([1, 1], weights=64 * 2**20)
    answer = plan(graph, Pool(devices("a", "b", budget_bytes=2**20)), Objective.LATENCY)
    assert isinstance(answer, Unplaceable)
    assert answer.message("tiny.json") == (
        "tiny.json cannot be placed: layer l0 needs 64 MiB by itself; a has 1 MiB, b has 1 MiB; "
        "raise a budget"
    )


def test_the_explanation_names_the_plans_that_lost_with_their_cost() -> None:
    graph = chain([1, 2, 1], weights=8 * MB)
    pool = Pool(devices("a", "b", "c", budget_bytes=16 * MB))
    answer = planned(graph, pool, Objective.THROUGHPUT)
    assert {each.name.split(" (")[0] for each in answer.rejected} >= {"single device", "even split"}
    assert all(each.value >= answer.value for each in answer.rejected)
    assert summary(answer).endswith("no plan is better")
    assert "against" in text_of(answer, ("first", "second", "third"))


def text_of(answer: LayerPlan, names: tuple[str, ...]) -> str:
    tables = explain(answer, names)
    return "\n".join(cell for table in tables for row in table.rows for cell in row)


# ---- documents -----------------------------------------------------------------------------------


def test_a_profile_and_devices_are_read_from_json() -> None:
    graph = read_profile(
        """{"layers": [{"name": "a", "seconds": {"pi": 0.5}}, {"name": "b", "flops": 10}],
            "tensors": [{"from": null, "to": ["a"], "bytes": 1},
                        {"from": "a", "to": ["b", null], "bytes": 2}]}"""
    )
    assert graph.tensors[1] == Tensor(producer=0, consumers=(1, None), bytes=2)
    pool = read_pool(
        """{"devices": [{"name": "x", "kind": "pi", "flops_per_second": 20, "budget_bytes": 9}],
            "links": [{"between": ["x", "coordinator"], "bytes_per_second": 4}]}"""
    )
    assert [pool.devices[0].seconds(layer) for layer in graph.layers] == [0.5, 0.5]
    assert pool.between("x", COORDINATOR) == Link(4)


PIPEDREAM = """node2 -- Add -- forward_compute_time=3.0, backward_compute_time=4.0, \
activation_size=[6.0; 2.0], parameter_size=5.0
node1 -- Input0 -- forward_compute_time=9.0, backward_compute_time=0.0, activation_size=7.0, \
parameter_size=0.000
\tnode1 -- node2"""


@pytest.mark.parametrize(("training", "seconds", "moved"), [(False, 0.003, 7), (True, 0.007, 14)])
def test_a_profile_of_pipedream_is_put_in_order_and_loads_its_data_in_no_time(
    training: bool, seconds: float, moved: float
) -> None:
    graph = pipedream(PIPEDREAM, training=training)
    times = [layer.seconds["gpu"] for layer in graph.layers]
    assert times == pytest.approx([0, seconds])
    assert graph.layers[1].activation_bytes == 8
    assert graph.tensors == (Tensor(producer=0, consumers=(1,), bytes=moved),)


def profile_of(seconds: str) -> str:
    return f"""{{"layers": [{{"name": "a", "seconds": {{"pi": {seconds}}}}}], "tensors": []}}"""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "expected an object"),
        ('{"layers": []}', "'tensors' is missing or unknown"),
        ('{"layers": [], "tensors": []}', "a profile needs one layer at least"),
        ('{"layers": 3, "tensors": []}', "not in the format: 'int' object is not iterable"),
        (
            '{"layers": [{"name": "a"}], "tensors": [{"from": "b", "to": [null], "bytes": 1}]}',
            "'b' is missing or unknown",
        ),
        (
            '{"layers": [{"name": "a"}, {"name": "b"}], '
            '"tensors": [{"from": "b", "to": ["a"], "bytes": 1}]}',
            "not in topological order",
        ),
        (
            '{"machines": {"x": [[0, 1, 0.5, 8]], "y": [[0, 0, 0.5, 8]]}}',
            "y was measured in other blocks than the others",
        ),
        (profile_of("NaN"), "seconds of pi is not from 0 to 1e+30"),
        (profile_of("1e999"), "seconds of pi is not from 0 to 1e+30"),
        (profile_of("-1"), "seconds of pi is not from 0 to 1e+30"),
        (profile_of("true"), "seconds of pi is no number"),
        (profile_of('"1"'), "seconds of pi is no number"),
        ('{"machines": {"x": [[0, 0, NaN, 8]]}}', "seconds of x is not from 0 to 1e+30"),
        ("{" * 9 + "[" * 200_000, "Expecting property name"),
        ('{"layers": ' + "[" * 200_000, "is nested too deeply"),
        ("node1 -- what", "neither a node nor an edge of a PipeDream profile: 'node1 -- what'"),
    ],
)
def test_what_is_no_profile_is_refused_in_words(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_profile(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"devices": [{"name": "a", "budget_bytes": NaN}]}', "budget_bytes is not from 0 to"),
        ('{"devices": [{"name": "a", "flops_per_second": 0}]}', "flops_per_second is 0"),
        ('{"devices": [], "link": {"bytes_per_second": null}}', "bytes_per_second is no number"),
        ('{"devices": [], "link": {"latency_seconds": -1}}', "latency_seconds is not from 0 to"),
    ],
)
def test_devices_with_numbers_that_are_none_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_pool(text)


def devices_with(rest: str) -> str:
    return f"""{{"devices": [{{"name": "a"}}, {{"name": "b"}}], {rest}}}"""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            '{"devices": [{"name": "a", "budget": 9}]}',
            "a device has no budget; known are name, kind, budget_bytes, flops_per_second, "
            "reload_bytes_per_second",
        ),
        (devices_with('"Links": []'), "a file of devices has no Links; known are devices, links"),
        (devices_with('"link": {"rate": 9}'), "link has no rate; known are bytes_per_second, "),
        (
            devices_with('"links": [{"between": ["a", "c"]}]'),
            "a link is between ['a', 'c'], and there is no device c",
        ),
        (devices_with('"links": [{"between": ["a", "a"]}]'), "a link is between two devices, not"),
        (devices_with('"links": [{"between": "ab"}]'), "a link is between two devices, not 'ab'"),
        (
            devices_with('"links": [{"between": ["a", "b"]}, {"between": ["b", "a"]}]'),
            "two links are between a and b",
        ),
        (devices_with('"link": {"bytes_per_second": 1e-300}'), "bytes_per_second is 1e-300"),
        ('{"devices": [{"name": 5}]}', "a device's name is text, not 5"),
        ('{"devices": [{"name": "a", "kind": null}]}', "a device's kind is text, not None"),
    ],
)
def test_devices_that_would_be_read_otherwise_than_meant_are_refused(
    text: str, problem: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_pool(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            '{"layers": [{"name": "a", "weights": 9}], "tensors": []}',
            "a layer has no weights; known are name, seconds, flops, weight_bytes",
        ),
        ('{"layers": [{"name": "a"}, {"name": "a"}], "tensors": []}', "two layers are called a"),
        ('{"layers": [{"name": null}], "tensors": []}', "a layer's name is text, not None"),
        (
            '{"layers": [{"name": "a"}], "tensors": [{"from": null, "to": "a", "bytes": 1}]}',
            "'a' is no list of layers",
        ),
    ],
)
def test_layers_that_would_be_read_otherwise_than_meant_are_refused(
    text: str, problem: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_profile(text)
