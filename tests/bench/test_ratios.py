"""The picture of a bench: what was compared, in its order, and where the goals are."""

import xml.etree.ElementTree as ET
from pathlib import Path

from measurement import RATIO, VALUE, Arguments, Measurement, Report

MADE = [
    Measurement(name="slow", value=2.0, unit="s", peer=1.0, ratio=2.0, goal=RATIO <= 1.25),
    Measurement(name="fast", value=1.0, unit="s", peer=2.0, ratio=0.5, goal=RATIO <= 0.66),
    Measurement(name="alone", value=1.0, unit="s", goal=VALUE <= 3.0),
]


def test_a_picture_names_what_was_compared_and_which_goals_were_missed(
    tmp_path: Path,
) -> None:
    target = tmp_path / "streaming.svg"
    report = Report(Arguments(json=None, quick=True, picture=target))
    for each in MADE:
        report.add(each)
    report.finish()
    drawn = ET.fromstring(target.read_text())  # noqa: S314 - our own
    words = ["".join(each.itertext()) for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [word for word in words if word in {"slow", "fast", "alone"}] == ["slow", "fast"]
    assert {"streaming", "measured", "goal, met", "goal, missed"} <= {*words}
