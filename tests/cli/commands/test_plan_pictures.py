"""The picture of a plan: all of the plan is in it, and nothing is beside it."""

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fragment_pools import MIB, SECOND, device, partition, placed
from shoal_cli.commands.plan_pictures import MANY, Links, charts, link_words
from shoal_cli.drawing.chart import Chart
from shoal_cli.drawing.svg import WIDTH
from shoal_planner.figures import PlanFigures, figures
from shoal_planner.placement import plan
from shoal_planner.schedule import schedule
from shoal_protocol.choices import Objective


def planned(count: int, devices: int) -> PlanFigures:
    document = partition([10**8] * count, [14 * MIB] * count, [10**5] * (count + 1))
    pool = [device(f"<pi&{index}>", flops=SECOND * (1 + index % 3)) for index in range(devices)]
    return figures(placed(plan(document, pool, Objective.THROUGHPUT)))


def drawn(of: PlanFigures, idle: tuple[str, ...] = ()) -> list[Chart]:
    links = Links(own={"<pi&0>": "1 MB/s"}, between=lambda one, other: "2 MB/s")
    return charts("Placement p", of, links, idle)


def rows(chart: Chart) -> list[Mapping[str, Any]]:
    """What the layers of a topology draw."""
    layers: Any = chart.spec["layer"]
    return [row for layer in layers for row in layer["data"]["values"]]


@given(st.integers(1, 5), st.integers(1, 14))
def test_each_device_of_a_stage_has_a_box_and_each_that_works_a_row(
    count: int, devices: int
) -> None:
    of = planned(count, max(count, devices))
    topology, one, many = drawn(of, ("left-over",))
    words = [row["text"] for row in rows(topology) if "text" in row]
    names = [each.device for stage in of.stages for each in stage.devices]
    assert [word for word in words if word in names] == names
    assert topology.text == "not used: left-over"
    for chart, items in ((one, 1), (many, MANY)):
        busy = {bar.device for bar in schedule(of, items)}
        encoding: Any = chart.spec["encoding"]
        assert all(f'"{name}"' in encoding["y"]["axis"]["labelExpr"] for name in busy)
    assert (one.title, many.title) == ("One item", "12 items in a row")


@given(st.integers(1, 5), st.integers(1, 14))
def test_nothing_is_drawn_beside_the_picture(count: int, devices: int) -> None:
    topology = drawn(planned(count, max(count, devices)))[0]
    height: Any = topology.spec["height"]
    for row in rows(topology):
        assert 0 <= row["x"] <= row.get("x2", row["x"]) + WIDTH
        assert max(row["x"], row.get("x2", 0)) <= WIDTH
        assert 0 <= row["y"] <= row.get("y2", row["y"]) <= height


def test_a_plan_without_times_is_drawn_without_charts() -> None:
    document = partition([None], [14 * MIB])
    of = figures(placed(plan(document, [device("a")], Objective.LATENCY)))
    assert [chart.title for chart in drawn(of)] == ["Placement p: stages and links"]


def test_links_say_what_limits() -> None:
    assert link_words(12.5e6, 0.02) == "12.5 MB/s, 20 ms"
    assert link_words(None) == link_words(float("inf")) == ""
