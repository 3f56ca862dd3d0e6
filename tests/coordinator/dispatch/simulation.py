"""The real dispatcher and real agent cores in one process, under a seed, on a network that
misbehaves.

A scenario draws devices, jobs and faults from its seed; the world then runs in virtual time:
messages take time, sessions break, devices die, hang and return; activations come late, twice, out
of order or not at all; loads and tasks fail. After a while the faults stop. Then everything must
end in bounded time, and no agent may still hold an activation.

    python tests/coordinator/dispatch/simulation.py 0 1000   runs these seeds, prints what fails
    (`chain`, `light`, `turns`, `restart`, `memory` or `crowded` behind them: of the other kinds);
    looks at the invariants at every step
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from coordinator.dispatch.scenarios import chained, crowded, in_turn, scenario
from coordinator.dispatch.simulated_link import SECOND, Model
from coordinator.dispatch.simulated_memory import StoringAgent, StoringWorld
from coordinator.dispatch.simulated_restarts import RestartingWorld
from coordinator.dispatch.simulated_results import Outputs
from coordinator.dispatch.simulated_world import Trouble, World, Wrong

LOOK_EVERY = 5
"""What breaks an invariant either stays, and the next look finds it, or heals at once, and a look
of one of many seeds finds it. The step that broke it: run the seed alone, as above."""
FAULTS_END = 25 * SECOND
PATIENCE = 400 * SECOND
"""Virtual time after the last fault in which everything must have ended."""
FULL_PATIENCE = 1200 * SECOND
"""The same where disks are so full that a try takes as long as a sender waits for room."""
_HELD_WITHIN = 120 * SECOND
_HELD_STEADILY = 5 * SECOND
"""Longer than what moves a fragment waits for: what is at home by then stays there."""
_LATE = 20 * SECOND
"""Within this, what is still on its way arrives, and the last devices return."""
_SETTLED = SECOND
_QUIET = 5 * SECOND
"""No scenario submits or breaks anything later than this unless the jobs still run."""


def simulate(
    seed: int,
    *,
    crashing: bool = False,
    chain: bool = False,
    light: bool = False,
    look_every: int = LOOK_EVERY,
) -> World:
    """Run one scenario to its end; `Wrong` says what was wrong, with the transcript.

    With `crashing`, the last fragment of the first job ends every agent that loads it. With `chain`
    there is one job, whose tasks are given ahead of their inputs; with `light`, whose items travel.
    """
    world = chained(seed, light=light) if chain or light else scenario(seed, crashing=crashing)
    return _run(world, look_every)


def simulate_turns(seed: int, *, look_every: int = LOOK_EVERY) -> World:
    """Run a scenario in which devices load the fragments of a job in turn, and share its items."""
    return _run(in_turn(seed), look_every)


def simulate_restarts(seed: int, folder: Path, *, look_every: int = LOOK_EVERY) -> RestartingWorld:
    """Run a scenario in which the coordinator dies too; its disk is a `folder`, not there yet."""
    kind = seed % 3
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        outputs = Outputs(folder, patch, seed)
        make = partial(RestartingWorld, outputs=outputs)
        world = chained(seed, light=kind == 1, make=make) if kind else scenario(seed, make=make)
        assert isinstance(world, RestartingWorld)
        _run(world, look_every)
        return world


def simulate_memory(seed: int, folder: Path, *, look_every: int = LOOK_EVERY) -> StoringWorld:
    """Run a scenario in which activations take memory; devices have their disks in a `folder`."""
    make = partial(StoringWorld, folder=folder)
    kind = seed % 4
    chain = chained(seed, light=kind == 1, make=make) if kind < 2 else None
    world = chain or scenario(seed, make=make)
    assert isinstance(world, StoringWorld)
    _run(world, look_every, FULL_PATIENCE)
    for agent in world.agents.values():
        assert isinstance(agent, StoringAgent)
        if agent.connected and not agent.hung and (left := agent.left()):
            raise world.wrong(f"{agent.name} has {left} left")
    return world


def simulate_crowded(seed: int, folder: Path, *, look_every: int = LOOK_EVERY) -> StoringWorld:
    """Run a scenario in which devices have room for the activations of one item or two."""

    def make(seed: int, models: list[Model], trouble: Trouble) -> StoringWorld:
        world = StoringWorld(seed, models, trouble, folder)
        world.disk_bytes = world.sizes.choice((14, 15, 20))
        world.calm = True  # disks do not come and go
        return world

    world = crowded(seed, make)
    assert isinstance(world, StoringWorld)
    _run(world, look_every, FULL_PATIENCE)
    return world


def _run(world: World, look_every: int, patience: int = PATIENCE) -> World:
    world.look_every = look_every

    def ended() -> bool:
        return world.now > _QUIET and world.jobs_ended and not world.down

    world.run(FAULTS_END, ended)
    world.calm = True
    world.run(FAULTS_END + patience, ended)
    if not world.jobs_ended:
        raise world.wrong(f"{world.specs.keys() - world.finished.keys()} have not ended")
    _check_held(world)
    latest = world.now + _LATE
    world.run(latest, lambda: world.still)
    world.run(min(world.now + _SETTLED, latest), lambda: False)
    world.check_invariants()
    _check_nothing_left(world)
    return world


def _check_held(world: World) -> None:
    """When nothing else goes on, what is held comes to its homes, and into their memory where there
    is room for all that is held there, and stays there; then its lease ends."""
    latest = world.now + _HELD_WITHIN
    while world.held and world.now < latest and (_away(world) or _not_at_home(world)):
        world.run(world.now + SECOND, lambda: not world.held)
    world.run(world.now + _HELD_STEADILY, lambda: not world.held)
    if missing := _not_at_home(world):
        raise world.wrong("; ".join(missing))
    for spec in world.held:
        world.cancel(spec.name)


def _away(world: World) -> bool:
    """Whether a device may still return."""
    return any(not agent.connected or agent.hung for agent in world.agents.values())


def _not_at_home(world: World) -> list[str]:
    """What is held, and not yet where it should be."""
    missing = []
    for agent in world.agents.values():
        held = {s.digest: s for spec in world.held for s in spec.stages if agent.name in s.homes}
        if not agent.connected or agent.hung:
            continue
        most = sum(s.resident_bytes + agent.model.excess.get(s.digest, 0) for s in held.values())
        has_room = most <= agent.model.budget and not (agent.model.single and len(held) > 1)
        for digest, stage in held.items():
            need = stage.least_bytes + agent.model.excess.get(digest, 0)
            if need <= agent.model.budget and digest not in agent.cached:
                missing.append(f"{agent.name} has not fetched {digest[7:9]}, which is held")
            if has_room and digest not in agent.ledger.resident:
                missing.append(f"{agent.name} has not loaded {digest[7:9]}, which is held")
    return missing


def _check_nothing_left(world: World) -> None:
    state = world.state
    if state.jobs or state.services:
        raise world.wrong("a job or a service is left")
    for device in state.devices.values():
        if device.work.queued or device.work.load or device.work.outputs:
            raise world.wrong(f"{device.name} has work left")
    for agent in world.agents.values():
        held = list(agent.queue._held)
        if agent.connected and not agent.hung and (held or agent.legs.waiting):
            raise world.wrong(f"{agent.name} still holds {held}")
        if agent.connected and not agent.hung and agent.legs.known:
            raise world.wrong(f"{agent.name} still knows legs of jobs that have ended")


_ON_DISK: dict[str, Callable[..., World]] = {
    "restart": simulate_restarts,
    "memory": simulate_memory,
    "crowded": simulate_crowded,
}


def main() -> None:
    """Run a range of seeds."""
    first, last = int(sys.argv[1]), int(sys.argv[2])
    failed = []
    for seed in range(first, last):
        try:
            if (run := _ON_DISK.get(sys.argv[-1])) is not None:
                with tempfile.TemporaryDirectory() as folder:
                    run(seed, Path(folder) / "disk", look_every=1)
            elif "turns" in sys.argv:
                simulate_turns(seed, look_every=1)
            else:
                simulate(seed, chain="chain" in sys.argv, light="light" in sys.argv, look_every=1)
        except Wrong as wrong:
            failed.append(seed)
            print(wrong if len(failed) == 1 else str(wrong).split("\n", maxsplit=1)[0])
    print(f"{last - first} seeds, {len(failed)} failed: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
