"""Charts: well-formed SVG whose marks are where the numbers are."""

import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from shoal_cli.commands.charts import WIDTH, Area, Level, Line, Panel, draw, ticks
from shoal_cli.commands.device_pictures import thinned
from shoal_cli.local.resident import Sample

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*panels: Panel, title: str = "A title") -> ET.Element:
    return ET.fromstring(draw(title, "and what it is about", panels))  # noqa: S314 - our own


def panel(*, logarithmic: bool = False, names: int = 1) -> Panel:
    points = [(40.0, 12.0), (80.0, 6.0), (160.0, 3.0)]
    return Panel(
        title="Time",
        x_title="MiB",
        y_title="ms",
        lines=[
            Line(name=f"line number {each}", colour="c", points=points) for each in range(names)
        ],
        levels=[Level(name="limit", value=9.0)],
        logarithmic=logarithmic,
    )


def circles(picture: ET.Element) -> list[tuple[float, float]]:
    """The points of the only line; the legend's own mark comes last."""
    found = [
        (float(each.attrib["cx"]), float(each.attrib["cy"]))
        for each in picture.iter(f"{SVG}circle")
    ]
    return found[:-1]


def test_a_picture_names_itself_its_axes_and_all_that_is_in_it() -> None:
    texts = [each.text for each in drawn(panel()).iter(f"{SVG}text")]
    assert {"A title", "and what it is about", "Time", "MiB", "ms", "line number 0", "limit"} <= {
        *texts
    }


def test_points_lie_at_their_numbers_and_larger_numbers_higher() -> None:
    (first, second, third) = circles(drawn(panel()))
    assert third[0] - second[0] == pytest.approx(2 * (second[0] - first[0]), abs=0.4)
    assert second[1] - first[1] == pytest.approx(2 * (third[1] - second[1]), abs=0.4)
    assert third[1] > second[1] > first[1], "zero is at the bottom"


def test_on_a_logarithmic_axis_equal_ratios_are_equal_distances() -> None:
    (first, second, third) = circles(drawn(panel(logarithmic=True)))
    assert second[0] - first[0] == pytest.approx(third[0] - second[0], abs=0.4)


def test_a_long_legend_goes_on_in_the_next_row_and_never_leaves_the_picture() -> None:
    picture = drawn(panel(names=12))
    entries = [each for each in picture.iter(f"{SVG}text") if (each.text or "").startswith("line")]
    rows = {each.attrib["y"] for each in entries}
    assert len(rows) > 1
    assert all(float(each.attrib["x"]) + 6.5 * len(each.text or "") < WIDTH for each in entries)


def test_names_are_text_and_not_markup() -> None:
    picture = drawn(panel(), title="<b>&model</b>")
    assert "<b>&model</b>" in [each.text for each in picture.iter(f"{SVG}text")]


def test_colours_differ_on_dark_ground() -> None:
    (style,) = [each.text or "" for each in drawn(panel()).iter(f"{SVG}style")]
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for each in (".ground", ".c ", ".limit", "text"):
        assert each in light
        assert each in dark


@pytest.mark.parametrize("most", [0.003, 1.0, 7.3, 64.0, 999.0, 123_456.0])
def test_ticks_are_few_round_and_equally_far_apart(most: float) -> None:
    found = ticks(0.0, most)
    assert 3 <= len(found) <= 8
    assert len({round(b - a, 9) for a, b in pairwise(found)}) == 1
    assert found[0] == 0.0
    assert found[-1] <= most * 1.000001


def test_a_panel_with_nothing_in_it_has_axes_all_the_same() -> None:
    nothing = Area(name="nothing", colour="a", points=[(0.0, 0.0, 0.0)])
    for areas in ([], [nothing]):
        picture = drawn(Panel(title="t", x_title="x", y_title="y", areas=areas))
        assert {"x", "y", "0"} <= {each.text for each in picture.iter(f"{SVG}text")}


def test_no_peak_is_lost_when_samples_are_thinned() -> None:
    samples = [
        Sample(seconds=each / 10_000, anonymous_bytes=each % 97, file_bytes=0)
        for each in range(20_000)
    ]
    kept = thinned(samples, 0.0, 2.0)
    assert len(kept) <= WIDTH + 1
    assert max(each.agent_bytes for each in kept) == 96
    assert [each.seconds for each in kept] == sorted(each.seconds for each in kept)
