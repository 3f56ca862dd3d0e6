"""What a seed stands for: devices, jobs over random graphs, and what goes wrong when."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from coordinator.dispatch.simulated_link import SECOND, Model
from coordinator.dispatch.simulated_world import Trouble, World
from shoal_coordinator.dispatch.events import JobSpec, Mode, Policy, Stage
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes, Nanoseconds

_HELD_SHARE = 0.3
"""Of the jobs, how many have their fragments held."""


Make = Callable[[int, list[Model], Trouble], World]
"""Makes a world of a seed, devices and what goes wrong."""


def scenario(seed: int, *, crashing: bool = False, make: Make = World) -> World:
    """Draw a world from a seed."""
    chance = random.Random(seed * 7919 + 1)  # noqa: S311 (not for secrets)
    jobs = [_job(chance, index) for index in range(chance.choice((1, 1, 1, 2, 3)))]
    models = _devices(chance, {s.digest: s.least_bytes for job in jobs for s in job.stages})
    rough = chance.random() < 0.7
    world = make(seed, models, _trouble(chance, jobs) if rough else Trouble())
    if crashing:
        world.trouble.crashing = frozenset({jobs[0].stages[-1].digest})
    names = [model.name for model in models]
    if chance.random() < 0.5:
        jobs = [_with_homes(chance, job, names) for job in jobs]
    for agent in world.agents.values():
        world.later(chance.uniform(0, 1.5) * SECOND, agent.connect)
    for job in jobs:
        _plan_job(world, chance, job)
    _plan_placements(world, jobs)
    if rough:
        _plan_faults(world, chance)
        _plan_budgets(world)
    world.tick()
    return world


def chained(seed: int, *, light: bool = False, make: Make = World) -> World:
    """Draw a world of one long chain with a device for each stage and room for all, so that most
    tasks are given ahead of their inputs, or with `light` most items travel; then often there are
    replicas, and another light job on the same devices."""
    chance = random.Random(seed * 7919 + 2)  # noqa: S311 (not for secrets)
    names = [f"device-{index}" for index in range(chance.choice((2, 3, 3, 4)))]
    count = len(names)
    stages = [
        Stage(
            digest=Digest(f"sha256:c{stage}".ljust(71, "0")),
            resident_bytes=Bytes(5),
            least_bytes=Bytes(5),
            predecessors=_predecessors(chance, stage) if chance.random() < 0.2 else (stage - 1,),
            takes_model_inputs=not stage or chance.random() < 0.2,
            gives_results=stage == count - 1 or chance.random() < 0.15,
            homes=(names[stage],) if chance.random() < 0.9 else (names[stage], names[0]),
            batch=(8, 1)[stage % 2],
            batch_item_bytes=Bytes(1),
        )
        for stage in range(count)
    ]
    job = JobSpec(
        name="job-0",
        stages=(replace(stages[0], predecessors=()), *stages[1:]),
        items=chance.choice((5, 20, 40)) * (2 if light else 1),
        epoch=1,
        mode=Mode.STREAMING,
        policy=chance.choice(list(Policy)),
        priority=0,
        backoff_limit=chance.choice((0, 1, 3)),
        light=light,
    )
    if light:
        job = _with_replicas(random.Random(f"{seed} replicas"), job, names)  # noqa: S311 (not for secrets)
    rough = chance.random() < 0.9
    model = partial(Model, budget=50, smallest=20, single=False, slowness=1)
    models = [model(name=name) for name in names]
    world = make(seed, models, _trouble(chance, [job]) if rough else Trouble())
    world.state.limits = replace(world.state.limits, queue_depth=chance.choice((3, 8)))
    for agent in world.agents.values():
        world.later(chance.uniform(0, 0.2) * SECOND, agent.connect)
    _plan_job(world, chance, job)
    if light:
        _plan_beside(world, job)
    for _ in range(3 if rough else 0):
        _plan_faults(world, chance)
    if rough:
        _plan_budgets(world)
    world.tick()
    return world


def crowded(seed: int, make: Make) -> World:
    """Draw a world in which nothing goes wrong, and any try that is in vain fails its item: a few
    devices with many items for the room that they have for activations."""
    chance = random.Random(seed * 7919 + 3)  # noqa: S311 (not for secrets)
    names = [f"device-{index}" for index in range(chance.choice((1, 1, 2, 3)))]
    jobs = []
    for number in range(chance.choice((1, 1, 2))):
        stages = [
            Stage(
                digest=Digest(f"sha256:{'fg'[number]}{stage}".ljust(71, "0")),
                resident_bytes=Bytes(5),
                least_bytes=Bytes(5),
                predecessors=(stage - 1,) if stage else (),
                takes_model_inputs=not stage,
                gives_results=False,
            )
            for stage in range(chance.choice((2, 3, 4)))
        ]
        job = JobSpec(
            name=f"job-{number}",
            stages=(*stages[:-1], replace(stages[-1], gives_results=True)),
            items=chance.choice((5, 12, 30)),
            epoch=1,
            priority=chance.choice((0, 0, 1)),
            backoff_limit=0,
        )
        jobs.append(_with_homes(chance, job, names) if chance.random() < 0.5 else job)
    budget = chance.choice((6, 8, 12))
    model = partial(Model, budget=budget, smallest=budget, single=False, slowness=1)
    world = make(seed, [model(name=name) for name in names], Trouble())
    for agent in world.agents.values():
        world.later(chance.uniform(0, 0.2) * SECOND, agent.connect)
    for job in jobs:
        world.later(chance.uniform(0, 2) * SECOND, partial(world.submit, job))
    world.tick()
    return world


def in_turn(seed: int, make: Make = World) -> World:
    """Draw a world of one or two jobs whose stages have the same devices, or two groups of them,
    each too small for the fragments that it has."""
    chance = random.Random(seed * 7919 + 4)  # noqa: S311 (not for secrets)
    names = [f"device-{index}" for index in range(chance.choice((1, 2, 2, 3, 4)))]
    jobs = [_divided(chance, number, names) for number in range(chance.choice((1, 1, 1, 2)))]
    budget = chance.choice((6, 8, 12))
    models = [
        Model(
            name=name,
            budget=budget,
            smallest=6,
            single=chance.random() < 0.2,
            slowness=chance.choice((1, 1, 4)),
        )
        for name in names
    ]
    rough = chance.random() < 0.7
    world = make(seed, models, _trouble(chance, jobs) if rough else Trouble())
    for agent in world.agents.values():
        world.later(chance.uniform(0, 1) * SECOND, agent.connect)
    for job in jobs:
        _plan_job(world, chance, job)
    if rough:
        _plan_faults(world, chance)
        _plan_budgets(world)
    world.tick()
    return world


def _divided(chance: random.Random, number: int, names: list[str]) -> JobSpec:
    """Several stages of one group of devices, and perhaps others of another one."""
    count = chance.choice((2, 3, 4, 6))
    border = chance.choice((0, 0, 0, count // 2))
    groups = [chance.sample(names, chance.randint(1, len(names))) for _ in range(2)]
    stages = [
        Stage(
            digest=Digest(f"sha256:{'hi'[number]}{stage}".ljust(71, "0")),
            resident_bytes=Bytes(5),
            least_bytes=Bytes(5),
            predecessors=_predecessors(chance, stage) if chance.random() < 0.2 else (stage - 1,),
            takes_model_inputs=not stage,
            gives_results=stage == count - 1 or chance.random() < 0.1,
            homes=tuple(groups[stage < border]),
            output_bytes=chance.choice((None, Bytes(20 << 20))),
        )
        for stage in range(count)
    ]
    return JobSpec(
        name=f"job-{number}",
        stages=(replace(stages[0], predecessors=()), *stages[1:]),
        items=chance.choice((3, 12, 40)),
        epoch=1,
        policy=chance.choice(list(Policy)),
        priority=chance.choice((0, 0, 1)),
        backoff_limit=chance.choice((0, 1, 3)),
        parallelism=chance.choice((0, 0, 0, 3)),
    )


def _with_replicas(chance: random.Random, job: JobSpec, names: list[str]) -> JobSpec:
    """The same, with some stages on several devices."""
    if chance.random() < 0.5:
        return job
    stages = [
        replace(stage, homes=tuple(dict.fromkeys((*stage.homes, *chance.choices(names, k=2)))))
        if chance.random() < 0.5
        else stage
        for stage in job.stages
    ]
    return replace(job, stages=tuple(stages))


def _job(chance: random.Random, index: int) -> JobSpec:
    count = chance.choice((1, 2, 2, 3, 3, 4, 5))
    shared, swappable = chance.random() < 0.3, chance.random() < 0.5
    stages: list[Stage] = []
    for stage in range(count):
        predecessors = _predecessors(chance, stage)
        name = f"{'s' if shared else chr(97 + index)}{stage}"
        size = 5 + (stage * 7) % 11 if shared else chance.randint(4, 20)
        least = 2 + size // 3 if shared else chance.randint(2, size)
        stages.append(
            Stage(
                digest=Digest(f"sha256:{name}".ljust(71, "0")),
                resident_bytes=Bytes(size),
                least_bytes=Bytes(least if shared or swappable else size),
                predecessors=predecessors,
                takes_model_inputs=not predecessors or chance.random() < 0.2,
                gives_results=stage == count - 1 or chance.random() < 0.15,
                batch=(1, 4)[(index + stage) % 2],
                batch_item_bytes=Bytes(1),
            )
        )
    return JobSpec(
        name=f"job-{index}",
        stages=tuple(stages),
        items=chance.choice((0, 1, 2, 5, 8, 12)),
        epoch=1,
        mode=chance.choice((Mode.STREAMING, Mode.STREAMING, Mode.BARRIER)),
        policy=chance.choice(list(Policy)),
        priority=chance.choice((0, 0, 1)),
        backoff_limit=chance.choice((0, 1, 3)),
    )


def _predecessors(chance: random.Random, stage: int) -> tuple[int, ...]:
    if stage == 0 or (stage > 1 and chance.random() < 0.1):
        return ()
    if chance.random() < 0.6:
        return (stage - 1,)
    return tuple(sorted(chance.sample(range(stage), chance.randint(1, stage))))


def _devices(chance: random.Random, sizes: dict[Digest, Bytes]) -> list[Model]:
    """The first device has room for every fragment, at least in blocks; some others do not."""
    most = max(sizes.values())
    models = []
    for index in range(chance.choice((1, 2, 3, 3, 4, 6))):
        budget = chance.choice((most, most + 3, 2 * most, 3 * most))
        if index and chance.random() < 0.2:
            budget = most - 1
        model = Model(
            name=f"device-{index}",
            budget=budget,
            smallest=min(budget, most),
            single=chance.random() < 0.4,
            slowness=chance.choice((1, 1, 1, 4)),
        )
        if chance.random() < 0.1:
            model.excess[chance.choice(list(sizes))] = chance.randint(1, 6)
        models.append(model)
    return models


def _trouble(chance: random.Random, jobs: list[JobSpec]) -> Trouble:
    items = [(job.name, chance.randrange(job.items)) for job in jobs if job.items]
    return Trouble(
        task=chance.choice((0, 0, 0.05, 0.2)),
        load=chance.choice((0, 0, 0.1, 0.3)),
        push=chance.choice((0, 0, 0.1, 0.4)),
        store=chance.choice((0, 0, 0.1)),
        repeat=chance.choice((0, 0.2)),
        poison=tuple(items[:1]) if chance.random() < 0.1 else (),
        invalid=tuple(items[:1]) if chance.random() < 0.2 else (),
        unreadable=tuple(items[1:2]) if chance.random() < 0.2 else (),
    )


def _with_homes(chance: random.Random, job: JobSpec, names: list[str]) -> JobSpec:
    def placed(stage: Stage) -> Stage:
        homes = tuple(chance.sample(names, chance.randint(1, min(2, len(names)))))
        granted = tuple(
            (home, Bytes(chance.randrange(stage.least_bytes, stage.resident_bytes)))
            for home in homes
            if stage.least_bytes < stage.resident_bytes and chance.random() < 0.5
        )
        return replace(stage, homes=homes, granted=granted)

    return replace(job, stages=tuple(map(placed, job.stages)))


def _plan_job(world: World, chance: random.Random, job: JobSpec) -> None:
    at = chance.uniform(0, 2) * SECOND
    arrivals = random.Random(f"{world.seed} {job.name}")  # noqa: S311 (not for secrets)
    if job.mode is Mode.STREAMING and arrivals.random() < 0.2:
        pauses = [arrivals.choice((0, 0, 0.1, 2)) * SECOND for _ in range(job.items)]
        world.later(at, partial(world.stream, job, pauses))
        return
    completed = frozenset(item for item in range(job.items) if chance.random() < 0.05)
    if chance.random() < 0.1:
        deadline = Nanoseconds(int(at + chance.uniform(1, 20) * SECOND))
        job = replace(job, deadline=deadline)
    world.later(at, partial(world.submit, job, completed))
    if chance.random() < 0.1:
        world.later(at + chance.uniform(0, 3) * SECOND, partial(world.cancel, job.name))
    if chance.random() < 0.15:
        again = _with_homes(chance, replace(job, epoch=2), list(world.agents))
        world.later(at + chance.uniform(0, 2) * SECOND, partial(world.submit, again))


def _plan_beside(world: World, job: JobSpec) -> None:
    """Often another job has the same stages, and mostly the same priority."""
    chance = random.Random(f"{world.seed} beside")  # noqa: S311 (not for secrets)
    if chance.random() < 0.4:
        items, priority = chance.choice((10, 40, 80)), chance.choice((0, 0, 0, 1))
        _plan_job(world, chance, replace(job, name="job-1", items=items, priority=priority))


def _plan_placements(world: World, jobs: list[JobSpec]) -> None:
    """Of some jobs the fragments are held, from before or after the job; some placements are
    replaced by others, which may be as they were."""
    chance = random.Random(f"{world.seed} placements")  # noqa: S311 (not for secrets)
    for job in jobs:
        if chance.random() > _HELD_SHARE:
            continue
        early = replace(
            job,
            name=f"placement/{job.name}",
            items=0,
            mode=Mode.STREAMING,
            priority=-1001,
            open_ended=True,
            holds=True,
        )
        at = chance.uniform(0, 2.5) * SECOND
        for _ in range(chance.choice((1, 1, 2))):
            world.later(at, partial(world.hold, _with_homes(chance, early, list(world.agents))))
            at += chance.uniform(0, 2.4) * SECOND


def _plan_faults(world: World, chance: random.Random) -> None:
    for _ in range(chance.choice((0, 1, 2, 4))):
        agent = chance.choice(list(world.agents.values()))
        away = chance.choice((0.2, 2, 15)) * SECOND
        faults: list[Callable[[], None]] = [
            partial(agent.kill, away),
            agent.break_session,
            partial(agent.hang, away),
            agent.drain,
            agent.give_up_fragment,
        ]
        world.later(chance.uniform(0.5, 8) * SECOND, chance.choice(faults))


def _plan_budgets(world: World) -> None:
    """Budgets of some devices change for a while, often several times."""
    chance = random.Random(f"{world.seed} budgets")  # noqa: S311 (not for secrets)
    for agent in world.agents.values():
        for _ in range(chance.choice((0, 0, 1, 2, 4))):
            size = chance.randint(agent.model.smallest, agent.model.budget)
            at = chance.uniform(0.5, 8) * SECOND
            world.later(at, partial(agent.change_budget, size))
            again = partial(agent.change_budget, agent.model.budget)
            world.later(at + chance.choice((0.01, 0.1, 2)) * SECOND, again)
