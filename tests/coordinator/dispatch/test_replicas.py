"""Several devices at one stage: faster ones get more, and a slow one does not hold up the end."""

from heapq import heappop, heappush

import pytest

from coordinator.dispatch.driving import Table, chain, job, only, some
from shoal_coordinator.dispatch.events import Policy
from shoal_coordinator.dispatch.instructions import Execute, FinishItem, Instruction


def run(table: Table, given: list[Instruction], milliseconds: dict[str, int]) -> dict[str, int]:
    """Devices that compute one task after the other; who did how many, and in how long (`""`)."""
    events: list[tuple[int, int, Execute]] = []
    free: dict[str, int] = {}
    done: dict[str, int] = {}

    def start(instructions: list[Instruction]) -> None:
        for one in instructions:
            if isinstance(one, Execute):
                begin = max(free.get(one.device, 0), table.now)
                free[one.device] = begin + milliseconds[one.device] * 1_000_000
                heappush(events, (free[one.device], one.instruction, one))
            elif isinstance(one, FinishItem):
                start(table.answer(one))

    start(given)
    while events:
        table.now, _, execute = heappop(events)
        done[execute.device] = done.get(execute.device, 0) + 1
        start(table.answer(execute, milliseconds=milliseconds[execute.device]))
    done[""] = table.now // 1_000_000
    return done


@pytest.mark.parametrize("policy", list(Policy))
def test_faster_devices_get_more(policy: Policy) -> None:
    table = Table()
    for name in ("slow", "fast"):
        table.join(name, resident=("a",))
    given = table.submit(job(chain("a"), 120, policy=policy))
    done = run(table, given, {"slow": 50, "fast": 10})
    assert done["fast"] + done["slow"] == 120
    assert done["fast"] >= 4 * done["slow"]
    # Both together need 1,000 ms; a whole slow task at the end would be 50 more.
    assert done[""] <= 1060


def test_a_slow_device_does_not_take_the_last_task() -> None:
    table = Table()
    for name in ("slow", "fast"):
        table.join(name, resident=("a",))
    run(table, table.submit(job(chain("a"), 4, name="learn")), {"slow": 1000, "fast": 10})
    before = table.now
    given = table.submit(job(chain("a"), 5))
    done = run(table, given, {"slow": 1000, "fast": 10})
    assert done == {"fast": 5, "": before // 1_000_000 + 50}


def test_a_slow_device_takes_what_the_fast_one_has_no_time_for() -> None:
    table = Table()
    table.join("slow", 100, resident=("a",))
    table.join("fast", 100, resident=("a", "h"))
    learn = table.submit(job(chain("a"), 4, name="learn"))
    run(table, learn, {"slow": 1000, "fast": 10})
    table.submit(job(chain("h", homes={"h": ("fast",)}), 100, name="high", priority=1))
    given = table.submit(job(chain("a"), 3, name="low"))
    assert not some(given, Execute)
    assert not some(table.wait(1000), Execute)  # as long as a task takes there
    taken = only(table.wait(250), Execute)
    assert (taken.job, taken.device) == ("low", "slow")


def test_a_pipeline_of_replicas_is_as_fast_as_its_slowest_stage_allows() -> None:
    table = Table()
    homes = {"a": ("a1",), "b": ("b1", "b2", "b3"), "c": ("c1",)}
    for stage, names in homes.items():
        for name in names:
            table.join(name, resident=(stage,))
    times = {"a1": 10, "b1": 20, "b2": 40, "b3": 40, "c1": 9}
    done = run(table, table.submit(job(chain("a", "b", "c", homes=homes), 200)), times)
    # Stage b takes one item each 10 ms, as does stage a.
    assert done[""] <= 2000 * 1.05 + 100


def test_an_item_stays_on_the_replica_that_has_begun_it() -> None:
    """Its activations would go over a link. At the end alone the fast one takes what is left."""
    table = Table()
    names = ("slow", "fast", "middle")
    for name in names:
        table.join(name, resident=("a", "b"))
    homes = dict.fromkeys(("a", "b"), names)
    places: dict[int, set[str]] = {}
    milliseconds = {"slow": 50, "fast": 10, "middle": 25}
    waiting = [*table.submit(job(chain("a", "b", homes=homes), 100))]
    running: list[tuple[int, int, Execute]] = []
    free = dict.fromkeys(names, 0)
    while waiting or running:
        for one in waiting:
            if isinstance(one, Execute):
                places.setdefault(one.item, set()).add(one.device)
                free[one.device] = max(free[one.device], table.now)
                free[one.device] += milliseconds[one.device] * 1_000_000
                heappush(running, (free[one.device], one.instruction, one))
        finished = [each for each in waiting if isinstance(each, FinishItem)]
        waiting = [each for done in finished for each in table.answer(done)]
        if not waiting and running:
            table.now, _, execute = heappop(running)
            waiting = table.answer(execute, milliseconds=milliseconds[execute.device])
    moved = sorted(item for item, devices in places.items() if len(devices) > 1)
    assert len(places) == 100
    assert all(item >= 90 for item in moved), moved
