"""Where the time of one item goes, also where others keep the machine busy."""

import item_latency
import pytest
from item_latency import Lines, Stamp
from measurement import Arguments, Report


def came(at: int, *names: str) -> list[Stamp]:
    """An item's way, a microsecond from one boundary to the next."""
    return [Stamp(name, at + 1000 * place, (1, 1), 0) for place, name in enumerate(names)]


def lines() -> Lines:
    return Lines(Report(Arguments(json=None, quick=True)), "a call")


def test_items_that_came_by_the_same_way_are_measured() -> None:
    told = lines()
    usual = [*came(0, "begin", "a", "end"), *came(10_000, "begin", "a", "end")]
    other = came(20_000, "begin", "b", "a", "end")
    told.add_ways(item_latency.ways([*usual, *other], "begin"))
    names = {each.name: each.value for each in told.report.measurements}
    assert names["a call: all"] == names["a call: all, the least"] == 2.0
    assert names["a call 01: begin, a"] == 1.0


@pytest.mark.parametrize(
    ("stamps", "said"),
    [
        ([*came(0, "begin", "a"), *came(9_000, "begin", "b")], "1 item came by the usual way"),
        ([], "0 items came by the usual way"),
    ],
)
def test_where_no_two_items_came_by_the_same_way_that_is_said(
    stamps: list[Stamp], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = lines()
    told.add_ways(item_latency.ways(stamps, "begin"))
    assert told.report.measurements == []
    assert f"a call: not measured: {said}" in capsys.readouterr().out
