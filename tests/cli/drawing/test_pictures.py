"""Pictures: well-formed SVG with everything that they are made of, readable on any ground."""

import xml.etree.ElementTree as ET

import pytest

from shoal_cli.commands.device_pictures import thinned
from shoal_cli.drawing.chart import BLUE, RED
from shoal_cli.drawing.panels import Area, Level, Line, Panel
from shoal_cli.drawing.svg import WIDTH, draw
from shoal_cli.local.resident import Sample

SVG = "{http://www.w3.org/2000/svg}"
POINTS = [(40.0, 12.0), (80.0, 6.0), (160.0, 3.0)]


def drawn(*panels: Panel, title: str = "A title") -> ET.Element:
    charts = [panel.chart(f"{number}") for number, panel in enumerate(panels)]
    return ET.fromstring(draw(title, "and what it is about", charts))  # noqa: S314 - our own


def panel(*, logarithmic: bool = False, names: int = 1) -> Panel:
    return Panel(
        title="Time",
        x_title="MiB",
        y_title="ms",
        lines=[
            Line(name=f"line number {each}", colour=BLUE, points=POINTS) for each in range(names)
        ],
        levels=[Level(name="limit", colour=RED, value=9.0)],
        logarithmic=logarithmic,
    )


def words(picture: ET.Element) -> list[str]:
    return ["".join(each.itertext()) for each in picture.iter(f"{SVG}text")]


def places(picture: ET.Element) -> list[tuple[float, float]]:
    """Where the points of the only line are."""
    found = [
        each.attrib["transform"].removeprefix("translate(").removesuffix(")").split(",")
        for group in picture.iter(f"{SVG}g")
        if "mark-symbol role-mark" in group.get("class", "")
        for each in group.iter(f"{SVG}path")
    ]
    return [(float(x), float(y)) for x, y in found]


def test_a_picture_names_itself_its_axes_and_all_that_is_in_it() -> None:
    named = {"A title", "and what it is about", "Time", "MiB", "ms", "line number 0", "limit"}
    assert named <= {*words(drawn(panel()))}


def test_points_lie_at_their_numbers_and_larger_numbers_higher() -> None:
    (first, second, third) = places(drawn(panel()))
    assert third[0] - second[0] == pytest.approx(2 * (second[0] - first[0]), abs=0.4)
    assert second[1] - first[1] == pytest.approx(2 * (third[1] - second[1]), abs=0.4)
    assert third[1] > second[1] > first[1], "zero is at the bottom"


def test_on_a_logarithmic_axis_equal_ratios_are_equal_distances() -> None:
    (first, second, third) = places(drawn(panel(logarithmic=True)))
    assert second[0] - first[0] == pytest.approx(third[0] - second[0], abs=0.4)


def test_several_panels_are_below_one_another_with_legends_of_their_own() -> None:
    picture = drawn(panel(), panel(names=12))
    assert words(picture).count("line number 0") == 2
    assert "line number 11" in words(picture)
    assert float(picture.attrib["width"]) < WIDTH + 120
    assert picture.attrib["role"] == "img"


def test_names_are_text_and_not_markup() -> None:
    assert "<b>&model</b>" in words(drawn(panel(), title="<b>&model</b>"))


def test_words_and_axes_have_other_colours_on_dark_ground() -> None:
    (style,) = [each.text or "" for each in drawn(panel()).iter(f"{SVG}style")]
    assert style.startswith("@media (prefers-color-scheme: dark)")
    for each in ("svg > rect {", "text {", ".role-axis-grid"):
        assert each in style


def test_an_area_lies_between_its_bounds() -> None:
    area = Area(name="weights", colour=BLUE, points=[(0.0, 1.0, 3.0), (1.0, 1.0, 3.0)])
    picture = drawn(Panel(title="t", x_title="x", y_title="y", areas=[area], height=300))
    assert any("mark-area" in each.get("class", "") for each in picture.iter(f"{SVG}g"))


def test_a_panel_with_nothing_in_it_has_axes_all_the_same() -> None:
    picture = drawn(Panel(title="t", x_title="x", y_title="y"))
    assert {"x", "y"} <= {*words(picture)}


def test_no_peak_is_lost_when_samples_are_thinned() -> None:
    samples = [
        Sample(seconds=each / 10_000, anonymous_bytes=each % 97, file_bytes=0)
        for each in range(20_000)
    ]
    kept = thinned(samples, 0.0, 2.0)
    assert len(kept) <= WIDTH + 1
    assert max(each.agent_bytes for each in kept) == 96
    assert [each.seconds for each in kept] == sorted(each.seconds for each in kept)
