"""The picture of a plan: well-formed, and all of the plan is in it."""

import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from fragment_pools import MIB, SECOND, device, partition, placed
from shoal_cli.commands.charts import WIDTH, draw, shortened
from shoal_cli.commands.plan_pictures import MANY, Links, link_words, panels
from shoal_planner.figures import PlanFigures, figures
from shoal_planner.placement import plan
from shoal_planner.schedule import schedule
from shoal_protocol.choices import Objective

SVG = "{http://www.w3.org/2000/svg}"


def planned(count: int, devices: int) -> PlanFigures:
    document = partition([10**8] * count, [14 * MIB] * count, [10**5] * (count + 1))
    pool = [device(f"<pi&{index}>", flops=SECOND * (1 + index % 3)) for index in range(devices)]
    return figures(placed(plan(document, pool, Objective.THROUGHPUT)))


def drawn(of: PlanFigures, idle: tuple[str, ...] = ()) -> ET.Element:
    links = Links(own={"<pi&0>": "1 MB/s"}, between=lambda one, other: "2 MB/s")
    parts = panels("Placement p", of, links, idle)
    return ET.fromstring(draw("A plan", "predicted", parts))  # noqa: S314 - our own


@given(st.integers(1, 5), st.integers(1, 14))
def test_each_device_of_a_stage_is_named_in_its_box_and_beside_the_charts(
    count: int, devices: int
) -> None:
    of = planned(count, max(count, devices))
    picture = drawn(of, ("left-over",))
    words = ["".join(each.itertext()) for each in picture.iter(f"{SVG}text")]
    busy = {bar.device for bar in schedule(of, MANY)}
    for stage in of.stages:
        for each in stage.devices:
            times = 1 + (each.device in busy)
            assert sum(each.device in word for word in words) >= times
    assert any(word == "not used: left-over" for word in words)
    assert {"One item", "12 items in a row"} <= set(words)


@given(st.integers(1, 5), st.integers(1, 14))
def test_nothing_is_drawn_beside_the_picture(count: int, devices: int) -> None:
    picture = drawn(planned(count, max(count, devices)))
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    assert width == WIDTH
    for each in picture.iter(f"{SVG}rect"):
        left, top = float(each.get("x", 0)), float(each.get("y", 0))
        assert left >= 0
        assert left + float(each.attrib["width"]) <= width + 1
        assert top + float(each.attrib["height"]) <= height


def test_a_plan_without_times_is_drawn_without_charts() -> None:
    document = partition([None], [14 * MIB])
    of = figures(placed(plan(document, [device("a")], Objective.LATENCY)))
    words = [each.text for each in drawn(of).iter(f"{SVG}text")]
    assert "One item" not in words
    assert "Placement p: stages and links" in words


def test_links_say_what_limits_and_long_names_keep_their_ends() -> None:
    assert link_words(12.5e6, 0.02) == "12.5 MB/s, 20 ms"
    assert link_words(None) == link_words(float("inf")) == ""
    assert shortened("abcdefghij", 7) == "abc…hij"
    assert shortened("abc", 7) == "abc"
