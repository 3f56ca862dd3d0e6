"""The order of devices within a tier: the criteria, the scores, and the index that serves them.

The scores are checked twice: against the papers' formulas, and against recorded numbers of a
package that others use (hack/record_rankings.py).
"""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coordinator.dispatch import textbook
from coordinator.dispatch.driving import MIB, Table, chain, digest, job, some
from shoal_coordinator.dispatch.device import Device, Tally, new_device
from shoal_coordinator.dispatch.events import DeviceJoined, Policy, Telemetry
from shoal_coordinator.dispatch.instructions import Execute
from shoal_coordinator.dispatch.ranking import (
    CRITERIA,
    SCORED,
    aras,
    edas,
    entropy_weights,
    mabac,
    score,
)
from shoal_coordinator.dispatch.servers import add_server, best, rank, relist, remove_server
from shoal_coordinator.dispatch.state import Service
from shoal_protocol.units import Bytes, Nanoseconds

METHODS = {"edas": edas, "aras": aras, "mabac": mabac}
TEXTBOOK = {"edas": textbook.edas, "aras": textbook.aras, "mabac": textbook.mabac}
RECORDED = json.loads(Path(__file__).with_name("rankings.json").read_text())
MATRICES = st.integers(2, 12).flatmap(
    lambda rows: arrays(
        np.float64, (rows, 5), elements=st.floats(0.5, 100, allow_nan=False, width=32)
    )
)
TYPES = np.array([1, -1, 1, -1, -1], dtype=np.float64)


def tells_apart(matrix: np.ndarray) -> bool:
    """Textbook forms divide by the spread of a column without asking."""
    return bool((np.ptp(matrix, axis=0) > 1e-3).all())


@settings(max_examples=60, deadline=None)
@given(matrix=MATRICES.filter(tells_apart))
def test_the_entropy_weights_are_those_of_the_literature(matrix: np.ndarray) -> None:
    wanted = textbook.entropy_weights(matrix.tolist())
    np.testing.assert_allclose(entropy_weights(matrix), wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=60, deadline=None)
@given(matrix=MATRICES.filter(tells_apart))
def test_the_scores_are_those_of_the_literature(name: str, matrix: np.ndarray) -> None:
    weights = entropy_weights(matrix)
    ours = METHODS[name](matrix, weights, TYPES)
    wanted = TEXTBOOK[name](matrix.tolist(), weights.tolist(), TYPES.tolist())
    np.testing.assert_allclose(ours, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: f"{len(case['matrix'])} rows")
def test_weights_and_scores_are_those_that_a_known_package_gave(
    case: dict[str, list[float]],
) -> None:
    matrix, types = np.array(case["matrix"]), np.array(RECORDED["types"], dtype=np.float64)
    weights = entropy_weights(matrix)
    np.testing.assert_allclose(weights, case["weights"], rtol=1e-9)
    for name, method in METHODS.items():
        scores = method(matrix, weights, types)
        np.testing.assert_allclose(scores, case[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("policy", SCORED)
def test_a_device_that_is_better_in_every_way_comes_first(policy: Policy) -> None:
    best_values = [0.1, 2e9, 30.0, 0.9, 1e6, 1.0, 2.0]
    worse_values = [0.9, 1e9, 60.0, 0.2, 9e6, 3.0, 0.5]
    better, worse = score([best_values, worse_values], policy)
    assert better > worse


@pytest.mark.parametrize("policy", SCORED)
@pytest.mark.parametrize("column", range(len(CRITERIA)))
def test_every_criterion_counts_in_its_direction(policy: Policy, column: int) -> None:
    low, high = [1.0] * len(CRITERIA), [1.0] * len(CRITERIA)
    high[column] = 2.0
    of_low, of_high = score([low, high], policy)
    assert (of_high > of_low) == (CRITERIA[column][1] > 0)


@pytest.mark.parametrize("policy", SCORED)
def test_what_is_unknown_is_not_zero(policy: Policy) -> None:
    cool: list[float | None] = [0.5, 1e9, 30.0, None, None, 1.0, None]
    hot: list[float | None] = [0.5, 1e9, 70.0, None, None, 1.0, None]
    unknown: list[float | None] = [0.5, 1e9, None, None, None, 1.0, None]
    of_cool, of_hot, of_unknown = score([cool, hot, unknown], policy)
    assert of_cool > of_unknown > of_hot


@pytest.mark.parametrize("policy", SCORED)
def test_devices_that_say_nothing_are_equal(policy: Policy) -> None:
    assert len(set(score([[None] * len(CRITERIA)] * 3, policy))) == 1


@pytest.mark.parametrize("policy", SCORED)
def test_telemetry_decides_who_gets_the_task(policy: Policy) -> None:
    table = Table()
    for name in ("busy", "calm"):
        table.join(name, resident=("a",))
    for name, load in (("busy", 0.95), ("calm", 0.05)):
        table.measure(name, Telemetry(cpu_fraction=load, memory_available=Bytes(MIB)))
    given = table.submit(job(chain("a"), 2, policy=policy))
    # The second goes to the other: a device that is free goes before one that is better.
    assert [execute.device for execute in some(given, Execute)] == ["calm", "busy"]


def test_fifo_takes_turns() -> None:
    table = Table()
    for name in ("d1", "d2", "d3"):
        table.join(name, resident=("a",))
    seen = table.play(table.submit(job(chain("a"), 30)))
    devices = [execute.device for execute in some(seen, Execute)]
    assert {name: devices.count(name) for name in set(devices)} == {"d1": 10, "d2": 10, "d3": 10}


def test_the_least_loaded_device_is_reckoned_by_its_measured_time() -> None:
    table = Table()
    for name in ("fast", "slow"):
        table.join(name, resident=("a",))
        table.state.devices[name].work.times[digest("a")] = 10 if name == "fast" else 15
    given = table.submit(job(chain("a"), 100, policy=Policy.LEAST_LOADED))
    devices = [execute.device for execute in some(given, Execute)]
    assert devices == ["fast", "slow", "fast", "slow"]


class Fleet:
    """A service and devices beside it, changed at random, and looked at in full."""

    def __init__(self, policy: Policy) -> None:
        self.service = Service(
            digest=digest("a"),
            resident=Bytes(1),
            least=Bytes(1),
            homes=(),
            granted={},
            policy=policy,
        )
        self.devices = [
            new_device(
                DeviceJoined(at=Nanoseconds(0), device=name, session=1, budget=Bytes(1)),
                order=index,
                tally=Tally(Bytes(1)),
                slots=2,
            )
            for index, name in enumerate(f"d{index}" for index in range(8))
        ]

    def first(self) -> Device | None:
        """The best of all servers, by looking at each."""
        listed = list(self.service.servers)
        return min(listed, key=lambda one: rank(self.service, one), default=None)


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(("add", "remove", "give", "end", "learn")),
        st.integers(0, 7),
        st.integers(1, 50),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(policy=st.sampled_from(list(Policy)), changes=CHANGES)
def test_the_index_names_the_device_that_looking_at_all_would(
    policy: Policy, changes: list[tuple[str, int, int]]
) -> None:
    fleet = Fleet(policy)
    for count, (change, index, value) in enumerate(changes):
        device = fleet.devices[index]
        match change:
            case "add":
                device.scores = {policy: float(value)} if device.listed == {} else device.scores
                add_server(fleet.service, device)
            case "remove":
                remove_server(fleet.service, device)
            case "give":
                device.work.queued += 1
                device.work.load += 1
                device.work.last_given = count
            case "end":
                if device.work.queued:
                    device.work.queued -= 1
                    device.work.load -= 1
                relist(device)
            case _:
                device.work.times[digest("a")] = value
                relist(device)
        if value % 3 == 0:
            assert best(fleet.service) is fleet.first()
    assert best(fleet.service) is fleet.first()
    assert len(fleet.service.ranks) <= 4 * len(fleet.service.servers) + 200
