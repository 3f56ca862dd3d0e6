"""Devices that load the fragments of a job in turn: how they share its items."""

from collections import Counter, defaultdict
from dataclasses import replace
from heapq import heappop, heappush

from coordinator.dispatch.driving import MIB, MILLISECOND, Table, chain, job
from shoal_coordinator.dispatch.events import FailureKind, JobSpec, Mode, Stage
from shoal_coordinator.dispatch.instructions import (
    Execute,
    FinishItem,
    Forward,
    Instruction,
    Load,
    Prefetch,
    Unload,
)
from shoal_coordinator.dispatch.state import StageQueue
from shoal_protocol.turns import MOST_ITEMS
from shoal_protocol.units import Bytes

LOAD = 100
"""Milliseconds of a load."""


class Clock:
    """Devices that do one thing at a time: a load takes `LOAD`, a task what its device takes."""

    def __init__(self, table: Table, milliseconds: dict[str, int]) -> None:
        self.table = table
        self.milliseconds = milliseconds
        self.events: list[tuple[int, int, Instruction]] = []
        self.free: dict[str, int] = {}
        self.number = 0

    def start(self, given: list[Instruction]) -> None:
        """Devices begin with what they were given."""
        for one in given:
            match one:
                case Load(device=device):
                    self._begin(one, device, LOAD)
                case Execute(device=device):
                    self._begin(one, device, self.milliseconds[device])
                case Unload(device=device) | Prefetch(device=device) | Forward(device=device):
                    self._begin(one, "", 0)
                case FinishItem():
                    self._begin(one, "", 0)
                case _:
                    pass

    def run(self, until: int | None = None) -> int:
        """Until nothing is left to answer, or for so many milliseconds; a minute at most. The time
        then, in milliseconds."""
        latest = (60_000 if until is None else until) * MILLISECOND
        while self.events and self.events[0][0] <= latest:
            self.table.now, _, one = heappop(self.events)
            took = self.milliseconds[one.device] if isinstance(one, Execute) else 0
            self.start(self.table.answer(one, milliseconds=took))
        return self.table.now // MILLISECOND

    def tick(self, seconds: int) -> None:
        """Run for so long, with the clock of the coordinator ticking."""
        for _ in range(4 * seconds):
            self.start(self.table.wait(250))
            self.run(self.table.now // MILLISECOND)

    def drop(self, device: str) -> list[Load]:
        """A device does nothing more of what it was given; the loads that were among that."""
        gone = [each for each in self.events if getattr(each[2], "device", "") == device]
        self.events = sorted(each for each in self.events if each not in gone)
        return [one for _, _, one in gone if isinstance(one, Load)]

    def _begin(self, one: Instruction, device: str, milliseconds: int) -> None:
        begin = max(self.table.now, self.free.get(device, 0) if device else 0)
        end = begin + milliseconds * MILLISECOND
        if device:
            self.free[device] = end
        self.number += 1
        heappush(self.events, (end, self.number, one))


def shared(*devices: str, stages: str = "xyz") -> tuple[Stage, ...]:
    """Fragments of 10 MiB, of which each device is a home."""
    return chain(*stages, homes=dict.fromkeys(stages, devices))


def devices_of(table: Table) -> dict[int, list[str]]:
    """Where the tasks of each item were given, in order."""
    found: dict[int, list[str]] = defaultdict(list)
    for task in table.all(Execute):
        found[task.item].append(task.device)
    return found


def begun(table: Table) -> Counter[str]:
    """How many items each device has begun."""
    return Counter(devices[0] for devices in devices_of(table).values())


def kept(queue: StageQueue) -> dict[str, int]:
    """How many tasks of a stage wait for each device, and for no other."""
    return {device.name: tasks for device, tasks in queue.kept.items()}


def succeeded(table: Table) -> int:
    """Items of the job that has ended; 0: it has not."""
    ended = table.state.ended.get("job")
    return 0 if ended is None else ended.succeeded


def test_an_item_stays_on_the_device_where_it_began() -> None:
    table = Table()
    for name in ("one", "other"):
        table.join(name, 15)
    clock = Clock(table, {"one": 10, "other": 15})
    clock.start(table.submit(job(shared("one", "other"), 96)))
    clock.run(1500)
    went = [devices for devices in devices_of(table).values() if len(devices) == 3]
    assert len(went) > MOST_ITEMS
    assert all(len(set(devices)) == 1 for devices in went)
    assert not table.all(Forward)


def test_two_equal_devices_take_half_of_the_time_of_one() -> None:
    took = []
    for names in (("one",), ("one", "other")):
        table = Table()
        for name in names:
            table.join(name, 15)
        clock = Clock(table, {"one": 10, "other": 10})
        clock.start(table.submit(job(shared(*names), 192)))
        took.append(clock.run())
    assert took[1] < 0.55 * took[0]


def test_a_device_begins_no_more_items_than_share_a_load() -> None:
    """The other one, which is still loading, has as many when it is ready."""
    table = Table()
    for name in ("one", "other"):
        table.join(name, 15)
    clock = Clock(table, {"one": 10, "other": 10})
    given = table.submit(job(shared("one", "other"), 96))
    clock.start([each for each in given if not (isinstance(each, Load) and each.device == "other")])
    clock.run(LOAD + 20 * 10)
    assert begun(table) == {"one": MOST_ITEMS}
    assert table.state.jobs["job"].queues[0].waiting == MOST_ITEMS


def test_items_of_large_activations_are_fewer() -> None:
    table = Table()
    table.join("one", 15)
    large = tuple(
        Stage(
            digest=each.digest,
            resident_bytes=each.resident_bytes,
            least_bytes=each.least_bytes,
            predecessors=each.predecessors,
            takes_model_inputs=each.takes_model_inputs,
            gives_results=each.gives_results,
            homes=each.homes,
            output_bytes=Bytes(20 * MIB),
        )
        for each in shared("one")
    )
    table.submit(job(large, 96))
    assert len(table.state.jobs["job"].active) == 6, "128 MiB lie between two fragments at most"


def test_a_device_that_has_nothing_left_helps_the_other() -> None:
    """The slow one began with several items, and loads the next fragment for ever."""
    table = Table()
    for name in ("fast", "slow"):
        table.join(name, 15)
    clock = Clock(table, {"fast": 1, "slow": 10})
    clock.start(table.submit(job(shared("fast", "slow"), 16)))
    clock.run(LOAD + 45)
    assert clock.drop("slow"), "it loads"
    clock.run()
    assert begun(table)["slow"] > 1
    assert succeeded(table) == 16


def test_what_waits_for_a_device_that_cannot_load_the_next_fragment_goes_to_others() -> None:
    table = Table()
    for name in ("one", "other"):
        table.join(name, 15)
    clock = Clock(table, {"one": 1, "other": 100})
    clock.start(table.submit(job(shared("one", "other", stages="xy"), 96)))
    clock.run(LOAD + 50)
    queue = table.state.jobs["job"].queues[1]
    assert kept(queue) == {"one": MOST_ITEMS}
    (load,) = clock.drop("one")
    clock.start(table.fail(load, FailureKind.RUNTIME))
    clock.start(table.wait(250))
    assert kept(queue) == {}
    clock.run()
    assert succeeded(table) == 96


def test_a_device_that_has_room_for_all_fragments_keeps_no_items() -> None:
    table = Table()
    for name in ("one", "other"):
        table.join(name, 35)
    clock = Clock(table, {"one": 10, "other": 10})
    clock.start(table.submit(job(shared("one", "other"), 40)))
    clock.run(LOAD * 3 + 50)
    running = table.state.jobs["job"]
    assert running.started_at is not None
    assert list(running.in_turn) == []
    assert [device.name for device in running.staying] == []


def test_a_device_that_is_lost_keeps_nothing() -> None:
    table = Table()
    for name in ("one", "other"):
        table.join(name, 15)
    clock = Clock(table, {"one": 10, "other": 10})
    clock.start(table.submit(job(shared("one", "other"), 96)))
    clock.run(2 * LOAD + MOST_ITEMS * 10 + 15)
    queue, one = table.state.jobs["job"].queues[1], table.state.devices["one"]
    assert any(each is queue.service for each in one.listed)
    assert kept(queue)["one"] > 1
    lost = table.lose("one")
    clock.drop("one")
    assert "one" not in kept(queue)
    clock.start(lost)
    clock.run()
    assert succeeded(table) == 96


def test_a_newer_plan_in_barrier_mode_has_items_stay_nowhere() -> None:
    """The device enters at a stage that the newer plan has not got."""
    table = Table()
    table.join("first", 15)
    table.join("one", 15)
    homes = {"v": ("first",), "w": ("first",), "x": ("one",), "y": ("one",)}
    table.submit(job(chain("v", "w", "x", "y", homes=homes), 8))
    assert table.state.jobs["job"].in_turn == {"one": 2, "first": 0}
    newer = chain("x", "y", homes=homes)
    table.play(table.submit(job(newer, 8, epoch=2, mode=Mode.BARRIER)))
    assert succeeded(table) == 8


def alone(name: str, home: str, items: int, priority: int = 0) -> JobSpec:
    """A job of one fragment on one device."""
    return job(chain(name, homes={name: (home,)}), items, name=name, priority=priority)


def test_what_waits_for_a_device_that_a_higher_priority_takes_goes_to_one_that_is_busy() -> None:
    table = Table()
    for name in ("one", "other"):
        table.join(name, 15)
    clock = Clock(table, {"one": 10, "other": 10})
    clock.start(table.submit(job(shared("one", "other"), 40)))
    clock.start(table.wait(250))
    clock.run(250)
    clock.start(table.submit(alone("u", "one", 3000, priority=1)))
    clock.start(table.submit(alone("v", "other", 3000)))
    clock.tick(15)
    assert succeeded(table) == 40
    assert table.state.jobs.keys() == {"u", "v"}


def test_a_home_that_no_item_enters_shares_what_it_has_loaded() -> None:
    """All items enter on the first device, which loads four fragments in turn."""
    table = Table()
    for name in ("first", "second"):
        table.join(name, 25)
    clock = Clock(table, {"first": 10, "second": 10})
    homes = {"w": ("first",), "x": ("first",), "y": ("first", "second"), "z": ("first", "second")}
    clock.start(table.submit(job(chain("w", "x", "y", "z", homes=homes), 100)))
    assert clock.run() < 60 * LOAD
    assert succeeded(table) == 100


def test_no_busy_device_is_emptied_for_what_waits_for_another() -> None:
    """Its tasks take so long that the second stage seems to starve."""
    table = Table()
    for name in ("one", "other"):
        table.join(name, 15)
    clock = Clock(table, {"one": 1000, "other": 1000})
    clock.start(table.submit(alone("u", "other", 60)))
    clock.start(table.submit(job(shared("one", "other"), 32)))
    clock.tick(60)
    runs = Counter((task.device, task.digest) for task in table.all(Execute))
    loads = [load for load in table.all(Load) if load.device == "other"]
    assert all(runs[load.device, load.digest] for load in loads)


def with_held_fragments(mib: int) -> tuple[Table, Clock]:
    """Of two devices, the small one holds the first fragment, the other one all others."""
    table = Table()
    table.join("one", 15)
    table.join("other", mib)
    clock = Clock(table, {"one": 10, "other": 10})
    homes = {"w": ("one",), "x": ("other",), "y": ("other",), "z": ("other",)}
    early = job(chain("w", "x", "y", "z", homes=homes), 0, name="early", priority=-1001)
    clock.start(table.submit(replace(early, open_ended=True, holds=True)))
    clock.tick(2)
    return table, clock


def test_items_go_to_a_device_that_holds_the_next_fragment_and_has_nothing_to_do() -> None:
    table, clock = with_held_fragments(45)
    spec = job(shared("one", "other", stages="wxyz"), 40)
    clock.start(table.submit(replace(spec, parallelism=4)))
    clock.tick(15)
    assert succeeded(table) == 40


def test_a_held_fragment_goes_for_one_that_items_of_its_device_wait_for() -> None:
    """Also where another device has that one: it is busy, and they wait for this device alone."""
    table, clock = with_held_fragments(45)
    clock.start(table.submit(alone("u", "other", 3000)))
    clock.tick(1)
    clock.start(table.submit(job(shared("one", "other", stages="wxyz"), 40)))
    clock.tick(15)
    assert succeeded(table) == 40
