"""Fragments do without what they can while memory is short on the machine, never without more."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.test_lending import streaming
from agent.test_residency import new_ledger
from shoal_agent.memory.demands import Grant, Load
from shoal_agent.memory.pressure import (
    LITTLE_PERCENT,
    MUCH_PERCENT,
    PLENTY_FRACTION,
    Shortage,
    withheld,
)
from shoal_agent.telemetry.pressure import stalled_percent
from shoal_protocol.units import Bytes

BUDGET = Bytes(640)
SHORT = PLENTY_FRACTION / 2
READINGS = st.none() | st.floats(0, 100)


@given(readings=st.lists(READINGS))
def test_never_more_than_half_of_the_budget_is_withheld(readings: list[float | None]) -> None:
    size = Bytes(0)
    for reading in readings:
        size = withheld(size, BUDGET, reading)
        assert 0 <= size <= BUDGET // 2


@given(before=st.integers(0, BUDGET // 2).map(Bytes))
def test_a_machine_that_does_not_say_withholds_nothing(before: Bytes) -> None:
    assert withheld(before, BUDGET, None) == 0


def test_an_agent_yields_to_a_neighbour_until_both_fit_and_regains_what_it_had() -> None:
    """Memory for 1000 in all, of which another process takes 0, then 560, then 0 again."""
    size, history = Bytes(0), []
    for other in (*[0] * 5, *[560] * 40, *[0] * 40):
        stalled = 50.0 if other + BUDGET - size > 1000 else 0.5 * LITTLE_PERCENT
        if 0 <= 1000 - (other + BUDGET - size) < BUDGET // 8:
            stalled = (LITTLE_PERCENT + MUCH_PERCENT) / 2
        size = withheld(size, BUDGET, stalled)
        history.append(size)
    assert set(history[:5]) == {0}
    assert BUDGET - history[8] + 560 <= 1000, "it yields within some steps"
    assert len(set(history[8:45])) == 1, "it does not swing"
    assert history[-1] == 0


def test_what_stalls_at_the_agents_own_limit_is_no_reason_to_yield() -> None:
    """Weights that are read again and again at the limit of the agent's group stall as much as
    before when it has less: nobody else gets anything."""
    shortage, size, history = Shortage(limit_hits=7), Bytes(0), []
    for hits, stalled in (*[(7, 30.0)] * 4, *[(8, 30.0), (8, 30.0), (9, 30.0)] * 9):
        size = withheld(size, BUDGET, shortage.elsewhere(stalled, hits, SHORT))
        history.append(size)
    assert history[3] == BUDGET // 2, "others were short of memory"
    assert history[-1] == 0


def test_what_stalled_at_the_own_limit_counts_until_the_average_has_forgotten_it() -> None:
    shortage = Shortage(limit_hits=0)
    found = [shortage.elsewhere(30.0, hits, SHORT) for hits in (5, 5, 5, 5, 5)]
    assert found == [0.0, 0.0, 0.0, 30.0, 30.0]
    assert shortage.elsewhere(None, 6, SHORT) is None


def test_a_machine_with_memory_available_is_not_short_whatever_stalls() -> None:
    """The limit that a pod's processes are at is not theirs to see: no hit of it is counted."""
    shortage, size = Shortage(limit_hits=0), Bytes(0)
    for _ in range(9):
        size = withheld(size, BUDGET, shortage.elsewhere(60.0, 0, 0.9))
    assert size == 0
    found = [shortage.elsewhere(60.0, 0, SHORT) for _ in range(5)]
    assert found == [0.0, 0.0, 60.0, 60.0, 60.0], "the average has forgotten what was before"


def test_a_machine_that_does_not_say_what_is_available_may_be_short() -> None:
    assert Shortage(limit_hits=0).elsewhere(60.0, 0, None) == 60.0


def test_fragments_that_can_run_in_less_do_and_nothing_is_evicted_for_pressure() -> None:
    ledger = new_ledger(a=20)
    streaming(ledger, "b", 60)
    assert ledger.withhold(Bytes(50)) == [Grant(digest="b", size=Bytes(30))]
    assert ledger.lend() == [], "what is withheld is not lent"
    assert ledger.withhold(Bytes(90)) == [Grant(digest="b", size=Bytes(10))]
    assert ledger.withhold(Bytes(100)) == []
    assert set(ledger.resident) == {"a", "b"}
    assert ledger.withhold(Bytes(0)) == [Grant(digest="b", size=Bytes(60))]


def test_loads_and_activations_have_what_is_withheld() -> None:
    ledger = new_ledger()
    streaming(ledger, "a", 60)
    ledger.withhold(Bytes(80))
    assert ledger.request_load("b", Bytes(40)) is Load.ADMITTED
    assert ledger.request_space(40)


@pytest.mark.parametrize(
    ("texts", "percent"),
    [
        ((), None),
        (("",), None),
        (("full avg10=9.00 avg60=0.00 avg300=0.00 total=1\n",), None),
        (("some avg10=much avg60=0.00\n",), None),
        (("some avg10=12.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=9.00 total=1\n",), 12.5),
        (("some avg10=1.00 total=1\n", "some avg10=3.00 total=1\n"), 3.0),
    ],
)
def test_the_shortest_of_machine_and_group_counts_where_there_is_any(
    tmp_path: Path, texts: tuple[str, ...], percent: float | None
) -> None:
    paths = [tmp_path / str(number) for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    assert stalled_percent([*paths, tmp_path / "missing"]) == percent
