"""The picture of a bench: what was compared, in its order, and where the goals are."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from measurement import RATIO, VALUE, Arguments, Measurement, Report, argument_parser, shared

BENCH = Path(__file__).parents[2] / "bench"
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


@pytest.mark.parametrize("option", ["--json", "--picture"])
def test_that_nothing_can_be_written_is_said_before_anything_is_measured(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argument_parser("A bench.")
    gone = tmp_path / "gone"
    for path, why in (
        (gone / "out.json", f"there is no folder {gone} that can be written"),
        (tmp_path, f"{tmp_path} is a folder; name a file"),
    ):
        with pytest.raises(SystemExit) as end:
            parser.parse_args([option, str(path)])
        assert end.value.code == 2
        assert f"argument {option}: {why}" in capsys.readouterr().err
    there = shared(parser.parse_args([option, str(tmp_path / "out")]))
    assert tmp_path / "out" in {there.json, there.picture}


@pytest.mark.parametrize("bench", sorted(BENCH.glob("*.py")), ids=lambda path: path.stem)
def test_the_first_line_of_a_bench_is_a_sentence_that_describes_it(bench: Path) -> None:
    """`--help` shows it, and no more."""
    text = bench.read_text()
    described = re.search(r"(argument_parser|parse_arguments|run_in_folder)\(__doc__", text)
    first = text.removeprefix('"""').split("\n", 1)[0]
    assert not described or first.rstrip('"').endswith(".")
