"""Fragments that are held before a job has items for them, and items that stay failed."""

from collections.abc import Mapping
from dataclasses import replace

from coordinator.dispatch.driving import Table, chain, job, only, some
from shoal_coordinator.dispatch.events import Failure, FailureKind, JobSpec, JobSubmitted
from shoal_coordinator.dispatch.instructions import Execute, FinishJob, Load, Unload
from shoal_coordinator.dispatch.state import JobPhase

HOMES = {"a": ("d1",), "b": ("d2",)}


def held(homes: Mapping[str, tuple[str, ...]] = HOMES) -> JobSpec:
    spec = job(chain("a", "b", homes=homes), 0, name="placement/early")
    return replace(spec, open_ended=True, holds=True, priority=-1001)


def test_held_fragments_are_loaded_on_their_homes_without_an_item() -> None:
    table = Table()
    for name in ("d1", "d2", "other"):
        table.join(name)
    loads = some(table.play(table.submit(held())), Load)
    assert {(each.device, each.digest[7]) for each in loads} == {("d1", "a"), ("d2", "b")}
    assert table.all(Execute) == []


def test_a_home_that_joins_late_loads_then_and_no_other_device_instead() -> None:
    table = Table()
    table.join("d1")
    table.play(table.submit(held()))
    seen = [each for _ in range(40) for each in table.play(table.wait(500))]
    assert "b" not in {each.digest[7] for each in some(seen, Load)}
    joined = table.play([*table.join("d2"), *table.wait(500)])
    assert [(each.device, each.digest[7]) for each in some(joined, Load)] == [("d2", "b")]


def test_a_job_takes_the_memory_of_what_is_only_held() -> None:
    table = Table()
    table.join("d1", 12)
    homes = {"a": ("d1",), "b": ("d1",)}
    table.play(table.submit(held(homes)))
    seen = table.play(table.submit(job(chain("c", homes={"c": ("d1",)}), 2)))
    assert some(seen, Unload)
    assert only(seen, FinishJob).failure is None
    assert table.state.jobs["placement/early"].phase is JobPhase.PENDING


def test_what_gave_way_to_a_job_is_loaded_again_when_that_has_ended() -> None:
    table = Table()
    table.join("d1", 12)
    table.join("d2", 12)
    table.play(table.submit(held()))
    table.play(table.submit(job(chain("a", "c", homes={"a": ("d1",), "c": ("d1",)}), 2)))
    table.play(table.wait(500))
    assert {digest[7] for digest in table.state.devices["d1"].memory.resident} == {"a"}


def test_what_is_held_elsewhere_gives_way_to_what_is_held_here() -> None:
    table = Table()
    for name in ("d1", "d2"):
        table.join(name, 12)
    table.play(table.submit(job(chain("b", homes={"b": ("d1",)}), 1)))
    table.play(table.submit(held()))
    table.play(table.wait(500))
    resident = {name: set(each.memory.resident) for name, each in table.state.devices.items()}
    assert {name: {digest[7] for digest in each} for name, each in resident.items()} == {
        "d1": {"a"},
        "d2": {"b"},
    }


def test_items_that_stay_failed_are_counted_and_not_tried() -> None:
    table = Table()
    table.join("d1")
    why = Failure(kind=FailureKind.OUTPUT, message="it failed before")
    event = JobSubmitted(
        at=table.at(), job=job(chain("a"), 5), completed=frozenset({0}), failed={2: why, 3: why}
    )
    seen = table.play(table.feed(event))
    assert {each.item for each in some(seen, Execute)} == {1, 4}
    ended = table.state.ended["job"]
    assert (ended.succeeded, ended.failed, len(ended.completed)) == (2, 2, 1)
    assert [item for item, _ in ended.failures] == [2, 3]


def test_a_job_with_nothing_left_to_try_ends_at_once() -> None:
    table = Table()
    table.join("d1")
    why = Failure(kind=FailureKind.OUTPUT, message="it failed before")
    event = JobSubmitted(at=table.at(), job=job(chain("a"), 1), failed={0: why})
    assert only(table.feed(event), FinishJob).failure is None
