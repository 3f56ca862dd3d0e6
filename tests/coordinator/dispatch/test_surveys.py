"""A survey leaves out devices on which nothing can be loaded: what is decided stays the same."""

from random import Random

import pytest

from coordinator.dispatch.driving import Table, chain, digest, job, some
from shoal_coordinator.dispatch import residency
from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.events import FailureKind, FragmentEvicted
from shoal_coordinator.dispatch.instructions import (
    Execute,
    FinishItem,
    Forward,
    Instruction,
    Load,
    Prefetch,
    Unload,
)
from shoal_coordinator.dispatch.machine import Limits
from shoal_coordinator.dispatch.state import Service, State
from shoal_coordinator.dispatch.surveys import Demand, Survey
from shoal_protocol.units import nanoseconds

ANSWERED = Load | Unload | Prefetch | Execute | Forward | FinishItem


def history(seed: int) -> list[Instruction]:
    """What is given in a pool of devices of several sizes, whose jobs come and end, and whose
    answers come in any order, or not at all for a while."""
    random = Random(seed)  # noqa: S311 - for tests
    table = Table(Limits(silence=nanoseconds(600)))
    pool = [f"d{number}" for number in range(random.randint(2, 7))]
    for name in pool:
        table.join(name, random.choice((8, 12, 24, 40)), single=random.random() < 0.2)
    waiting: list[Instruction] = []
    for number in range(80):
        kind = random.random()
        if kind < 0.15:
            names = random.sample("abcdef", random.randint(1, 3))
            homes = {
                each: tuple(random.sample(pool, random.randint(1, 2)))
                for each in names
                if random.random() < 0.3
            }
            least = random.choice((None, 3))
            stages = chain(*names, mib=random.choice((4, 7, 10)), least_mib=least, homes=homes)
            priority = random.choice((0, 0, 0, 5))
            spec = job(stages, random.randint(1, 30), name=f"j{number}", priority=priority)
            waiting += table.submit(spec)
        elif kind < 0.4:
            waiting += table.wait(random.choice((250, 500, 2_000)))
        elif kind < 0.45:
            name = random.choice(pool)
            device = table.state.devices[name]
            idle = [each for each in device.memory.resident if each not in device.work.in_use]
            for each in idle[:1]:
                waiting += table.feed(
                    FragmentEvicted(at=table.at(), device=name, session=device.session, digest=each)
                )
        else:
            waiting += answered(table, random, waiting)
    return table.given


def answered(table: Table, random: Random, waiting: list[Instruction]) -> list[Instruction]:
    given: list[Instruction] = []
    for _ in range(random.randint(1, 6)):
        asked = [each for each in waiting if isinstance(each, ANSWERED)]
        if not asked:
            break
        one = random.choice(asked)
        waiting.remove(one)
        if isinstance(one, Load) and random.random() < 0.1:
            given += table.fail(one, FailureKind.UNAVAILABLE)
        else:
            given += table.answer(one)
    return given


@pytest.fixture
def exhaustive(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Every device is asked about every fragment."""

    def all_devices(survey: Survey, service: Service) -> list[Device]:
        return list(survey.state.devices.values())

    def all_services(demand: Demand, device: Device) -> list[Service]:
        return list(demand.state.unmet)

    monkeypatch.setattr(Survey, "could_load", all_devices)
    monkeypatch.setattr(Survey, "could_preempt", all_devices)
    monkeypatch.setattr(Demand, "for_device", all_services)
    return monkeypatch


def test_what_is_decided_is_what_would_be_if_all_devices_were_asked(
    exhaustive: pytest.MonkeyPatch,
) -> None:
    slow = {seed: history(seed) for seed in range(30)}
    exhaustive.undo()
    assert sum(len(some(each, Unload)) for each in slow.values()) > 20, "something is exchanged"
    for seed, given in slow.items():
        assert history(seed) == given, f"of seed {seed}"


def test_a_tick_does_not_ask_every_device_about_every_fragment_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All devices work for one job, whose fragment cannot go, and many other jobs wait."""
    devices, jobs = 40, 60
    table = Table(Limits(silence=nanoseconds(60)))
    for number in range(devices):
        table.join(f"d{number}", 12)
    given = table.submit(job(chain("first"), 10_000, name="first"))
    for load in some(given, Load):
        table.answer(load)
    assert all(device.work.queued for device in table.state.devices.values())
    for number in range(jobs):
        table.submit(job(chain(f"{number:02}"), 10, name=f"{number}"))
    asked = 0

    def counted(state: State, service: Service, device: Device) -> object:
        nonlocal asked
        asked += 1
        return look(state, service, device)

    look = residency.tier_for
    monkeypatch.setattr(residency, "tier_for", counted)
    monkeypatch.setattr(residency, "_may_preempt", counted)
    table.wait(250)
    assert len(table.state.unmet) > jobs
    assert asked < devices + jobs
    assert digest("first") in table.state.devices["d0"].memory.resident
