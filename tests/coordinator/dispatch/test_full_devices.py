"""Devices without room for more activations: their items wait, fewer at a time, and none fails."""

from coordinator.dispatch.driving import MILLISECOND, Table, brief, chain, job, only, some
from shoal_coordinator.dispatch.events import FailureKind, Mode
from shoal_coordinator.dispatch.instructions import (
    Execute,
    FailItem,
    Instruction,
    Load,
    Release,
    Unload,
)

FULL = FailureKind.DISK_FULL


def begun(table: Table, *names: str, items: int = 4, mode: Mode = Mode.STREAMING) -> list[Execute]:
    """A job on one device that has its fragments, and what was given."""
    table.join("d1", 60, resident=names)
    homes = {name: ("d1",) for name in names}
    return some(table.submit(job(chain(*names, homes=homes), items, mode=mode)), Execute)


def test_a_task_that_finds_no_room_beside_others_is_no_try_and_waits_until_an_item_has_ended() -> (
    None
):
    table = Table()
    first, second, *_ = begun(table, "a", items=2)
    assert some(table.fail(second, FULL), FailItem) == []
    assert some(table.wait(1000), Execute) == [], "the first item still has something there"
    (done,) = [each for each in table.answer(first) if not isinstance(each, Release)]
    table.answer(done)
    assert brief(some(table.wait(250), Execute)) == ["d1 runs 1.0"]
    assert table.state.jobs["job"].active[1].failures == 0


def test_the_stage_behind_gets_the_device_when_what_waited_for_room_is_taken_back() -> None:
    table = Table()
    table.join("d1", 12, resident=("a",))
    given = table.submit(job(chain("a", "b", homes={"a": ("d1",), "b": ("d1",)}), 4))
    first, second = some(given, Execute)
    third = only(table.answer(first), Execute)
    seen: list[Instruction] = []
    for refused in (second, third):
        seen += table.fail(refused, FULL)
    while more := some(seen, Execute):
        seen = table.fail(more[0], FULL)
    seen += table.wait(2000)
    assert only(table.all(Unload), Unload).device == "d1"
    loads = [load.digest[7] for load in some(table.answer(table.all(Unload)[0]), Load)]
    assert loads == ["b"]


def test_fewer_items_are_under_way_after_each_refusal_and_slowly_more_again() -> None:
    table = Table()
    waiting = begun(table, "a", items=60)
    window = table.state.jobs["job"].window
    table.fail(waiting[1], FULL)
    least = table.state.jobs["job"].crowding.most
    assert 0 < least < window
    for _ in range(200):
        if "job" not in table.state.jobs:
            break
        for each in list(table.given):
            running = isinstance(each, Execute) and each.instruction in table.state.pending
            if running:
                table.play(table.answer(each))
        table.wait(250)
    assert table.state.ended["job"].succeeded == 60
    assert table.state.ended["job"].crowding.most > least


def test_the_first_item_keeps_what_it_has_and_the_others_give_theirs_up() -> None:
    table = Table()
    first, second = begun(table, "a", "b", items=2)[:2]
    stages = [each for one in (first, second) for each in some(table.answer(one), Execute)]
    behind = {each.item: each for each in stages if each.stage == 1}
    table.now += MILLISECOND
    given = table.fail(behind[1], FULL)
    assert [(each.item, each.stage) for each in some(given, Release)] == [(1, 0)]
    assert some(table.fail(behind[0], FULL), Release) == [], "it goes on with that"
    assert brief(some(table.wait(500), Execute)) == ["d1 runs 0.1"]


def test_what_has_no_room_by_itself_is_tried_once_more_and_fails_with_need_and_have() -> None:
    table = Table()
    (task,) = begun(table, "a", items=1)
    table.fail(task, FULL, need_mib=7, have_mib=4)
    again = only(table.wait(500), Execute)
    failure = only(table.fail(again, FULL, need_mib=7, have_mib=4), FailItem).failure
    assert (failure.kind, failure.need, failure.have) == (FULL, 7 << 20, 4 << 20)


def test_what_was_refused_alone_and_then_taken_is_asked_once_more_at_its_next_stage_too() -> None:
    table = Table()
    (task,) = begun(table, "a", "b", items=1)
    table.fail(task, FULL, need_mib=7, have_mib=4)
    behind = only(table.answer(only(table.wait(500), Execute)), Execute)
    assert some(table.fail(behind, FULL, need_mib=7, have_mib=4), FailItem) == []
    assert brief(some(table.wait(500), Execute)) == ["d1 runs 0.1"]


def test_what_finds_no_room_on_one_device_goes_to_another() -> None:
    table = Table()
    for name in ("d1", "d2"):
        table.join(name, 60, resident=("a",))
    given = some(table.submit(job(chain("a", homes={"a": ("d1", "d2")}), 4)), Execute)
    refused = next(each for each in given if each.item == 1)
    table.fail(refused, FULL)
    again = [each for each in some(table.wait(1000), Execute) if each.item == 1]
    for _ in range(8):
        for each in [*table.given]:
            if isinstance(each, Execute) and each.instruction in table.state.pending:
                again += [one for one in some(table.answer(each), Execute) if one.item == 1]
        again += [each for each in some(table.wait(500), Execute) if each.item == 1]
    assert again
    assert again[0].device != refused.device


def test_a_fragment_that_finds_no_room_beside_several_items_has_the_last_one_give_up_its() -> None:
    table = Table()
    table.join("d1", 12, resident=("a",))
    given = table.submit(job(chain("a", "b", homes={"a": ("d1",), "b": ("d1",)}), 2))
    for task in some(given, Execute):
        table.answer(task)
    table.wait(2000)
    load = only(table.answer(only(table.all(Unload), Unload)), Load)
    given = table.fail(load, FULL)
    assert [(each.item, each.stage) for each in some(given, Release)] == [(1, 0)]
    again = only([*given, *table.wait(250)], Load)
    assert again.digest == load.digest
    assert table.state.devices["d1"].health.backoffs == {}
    table.play(table.answer(again))
    for _ in range(20):
        table.play(table.wait(250))
    assert table.state.ended["job"].succeeded == 2


def test_barrier_mode_holds_what_all_items_made_and_counts_each_refusal_as_a_try() -> None:
    table = Table()
    first, *_ = begun(table, "a", "b", mode=Mode.BARRIER)
    table.fail(first, FULL)
    assert table.state.jobs["job"].active[first.item].failures == 1
