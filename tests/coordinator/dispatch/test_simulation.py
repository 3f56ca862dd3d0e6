"""1,000 seeds of lost, slow and returning devices (see `simulation`)."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest

from coordinator.dispatch import simulated_world
from coordinator.dispatch.simulated_world import World, Wrong
from coordinator.dispatch.simulation import (
    simulate,
    simulate_crowded,
    simulate_memory,
    simulate_restarts,
    simulate_turns,
)
from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.events import Event, ItemsStored
from shoal_coordinator.dispatch.instructions import Execute, FailItem, Instruction, Travel
from shoal_coordinator.dispatch.machine import step
from shoal_coordinator.dispatch.state import StageQueue, State

CHUNK = 100

W = TypeVar("W", bound=World)


def ended(first: int, simulated: Callable[[int], W]) -> Iterator[W]:
    """The worlds of a chunk of seeds; `simulated` raises `Wrong` at the first step that breaks a
    rule."""
    for seed in range(first, first + CHUNK):
        world = simulated(seed)
        assert set(world.finished) == set(world.specs)
        yield world


@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_every_input_ends_once_within_every_budget_whatever_happens(first: int) -> None:
    together = 0
    for world in ended(first, simulate):
        together += world.together
    assert together > 50, "several tasks ran at once"


@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_chains_that_are_given_ahead_lose_nothing(first: int) -> None:
    ahead = 0
    for world in ended(first, partial(simulate, chain=True)):
        ahead += sum(isinstance(what, Execute) and what.ahead for _, what in world.story)
    assert ahead > 500


@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_items_that_travel_end_once_whatever_is_lost_repeated_or_late(first: int) -> None:
    travelled = arrived = 0
    for world in ended(first, partial(simulate, light=True)):
        travelled += sum(isinstance(what, Travel) for _, what in world.story)
        arrived += world.arrived
    assert arrived > 300
    assert travelled > arrived, "some did not come through"


@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_results_outlive_every_crash_of_their_coordinator_and_none_is_made_twice(
    first: int, tmp_path: Path
) -> None:
    crashes = saved = runs = tasks = 0
    for world in ended(first, lambda seed: simulate_restarts(seed, tmp_path / str(seed))):
        crashes, saved = crashes + world.crashes, saved + world.saved
        runs, tasks = runs + world.runs.total(), tasks + len(world.runs)
    assert crashes > CHUNK
    assert saved > 2 * CHUNK, "what was stored before a crash counts after it"
    assert runs < 1.5 * tasks


@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_activations_stay_within_memory_and_disk_and_are_what_was_made(
    first: int, tmp_path: Path
) -> None:
    refusals = spills = runs = tasks = 0
    for world in ended(first, lambda seed: simulate_memory(seed, tmp_path / str(seed))):
        refusals, spills = refusals + world.refusals, spills + world.spills
        runs, tasks = runs + world.runs.total(), tasks + len(world.runs)
    assert refusals > CHUNK, "many had to wait for room"
    assert spills > CHUNK // 10, "fragments took the room of what waited in memory"
    assert runs < 1.5 * tasks


@pytest.mark.parametrize("first", range(0, 500, CHUNK))
def test_items_stay_on_devices_whose_fragments_take_turns_and_end_once_whatever_happens(
    first: int,
) -> None:
    stayed = able = 0
    for world in ended(first, simulate_turns):
        for one, other in _successive_tasks(world):
            homes = world.specs[other.job].stages[other.stage].homes
            if one.stage < other.stage and one.device in homes and len(homes) > 1:
                stayed, able = stayed + (one.device == other.device), able + 1
    assert able > 1000
    assert stayed > 0.65 * able, "half of them do by chance"


def _successive_tasks(world: World) -> Iterator[tuple[Execute, Execute]]:
    """Tasks of an item, and those that were given next."""
    tasks: dict[tuple[str, int], list[Execute]] = defaultdict(list)
    for _, what in world.story:
        if isinstance(what, Execute):
            tasks[what.job, what.item].append(what)
    return (pair for each in tasks.values() for pair in pairwise(each))


@pytest.mark.parametrize("first", range(0, 300, CHUNK))
def test_full_devices_slow_items_down_and_fail_none(first: int, tmp_path: Path) -> None:
    parked = tasks = runs = 0
    for world in ended(first, lambda seed: simulate_crowded(seed, tmp_path / str(seed))):
        failed = [what for _, what in world.story if isinstance(what, FailItem)]
        assert failed == [], f"seed {world.seed}"
        assert set(world.finished.values()) == {None}
        parked += any(queue.job.crowding.most for queue in _queues(world))
        runs, tasks = runs + world.runs.total(), tasks + len(world.runs)
    assert parked > CHUNK // 4, "many had to wait for room"
    assert runs < 1.5 * tasks


def _queues(world: World) -> list[StageQueue]:
    return [queue for job in world.state.ended.values() for queue in job.queues]


def test_a_fragment_that_crashes_every_device_fails_no_job_but_its_own() -> None:
    blamed = 0
    for seed in range(200):
        world = simulate(seed, crashing=True)
        for name, failure in world.finished.items():
            if failure is not None and "times in a row, on" in failure.message:
                used = {stage.digest for stage in world.specs[name].stages}
                assert used & world.trouble.crashing, failure.message
                blamed += 1
    assert blamed > 50


def test_a_seed_gives_the_same_transcript_every_time(tmp_path: Path) -> None:
    one, other = simulate(7), simulate(7)
    assert one.transcript == other.transcript
    for run in (simulate_restarts, simulate_memory):
        once, again = (run(7, tmp_path / f"{run.__name__}-{time}") for time in range(2))
        assert once.transcript == again.transcript


def test_a_count_that_is_wrong_for_one_step_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invariants are looked at in one step of so many."""
    wrong: list[Device] = []

    def faulty(state: State, event: Event) -> tuple[Instruction, ...]:
        while wrong:
            wrong.pop().work.load -= 1
        given = step(state, event)
        if isinstance(event, ItemsStored):
            wrong.extend(list(state.devices.values())[:1])
            for device in wrong:
                device.work.load += 1
        return given

    monkeypatch.setattr(simulated_world, "step", faulty)

    def simulate_many() -> None:
        for seed in range(100):
            wrong.clear()
            simulate(seed)

    with pytest.raises(Wrong, match=r"load \d is not"):
        simulate_many()
