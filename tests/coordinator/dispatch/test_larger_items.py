"""Items that are larger than the plan covers: each device is asked once, until it changes."""

from coordinator.dispatch.driving import Table, brief, chain, digest, job, only, some
from shoal_coordinator.dispatch.events import FailureKind, FragmentEvicted
from shoal_coordinator.dispatch.instructions import (
    Execute,
    FailItem,
    FinishItem,
    Instruction,
    Load,
)


def begun(table: Table, *homes: str, items: int = 1) -> list[Instruction]:
    """A job of one fragment, resident on all of its homes, and what was given then."""
    given = table.submit(job(chain("a", mib=12, homes={"a": homes}), items=items))
    return [each for load in some(given, Load) for each in table.answer(load)]


def refuse(table: Table, given: list[Instruction]) -> list[Instruction]:
    """As an agent does that has let go of all it may: nobody knows what the item needs."""
    return table.fail(only(given, Execute), FailureKind.BUDGET)


def test_where_one_device_can_run_it_an_item_is_tried_once() -> None:
    table = Table()
    table.join("d1", 32)
    table.join("d2", 24)
    ended = refuse(table, begun(table, "d1"))
    assert only(ended, FailItem).failure.kind is FailureKind.BUDGET
    assert len(table.all(Execute)) == 1


def test_many_such_items_cost_one_try_each_and_those_between_them_run() -> None:
    table = Table()
    table.join("d1", 32)
    waiting = some(begun(table, "d1", items=20), Execute)
    while waiting:
        execute = waiting.pop(0)
        if execute.item % 2:
            given = table.fail(execute, FailureKind.BUDGET)
        else:
            finished = table.answer(execute)
            given = [*finished, *table.answer(only(finished, FinishItem))]
        waiting += some(given, Execute)
    ended = table.state.ended["job"]
    assert (ended.succeeded, ended.failed, ended.retries) == (10, 10, 0)


def test_every_device_with_as_large_a_budget_is_asked_and_none_twice() -> None:
    table = Table()
    for name in ("d1", "d2", "d3"):
        table.join(name, 32)
    given = begun(table, "d1", "d2", "d3")
    while some(given, Execute):
        given = refuse(table, given)
        given = given or table.wait(1_000)
    assert sorted(each.device for each in table.all(Execute)) == ["d1", "d2", "d3"]
    assert some(given, FailItem)


def test_a_device_with_a_smaller_budget_is_not_asked() -> None:
    table = Table()
    table.join("d2", 48)
    table.join("d1", 32)
    given = begun(table, "d2", "d1")
    assert only(given, Execute).device == "d2"
    assert some(refuse(table, given), FailItem)


def test_a_device_with_a_larger_budget_is_asked() -> None:
    table = Table()
    table.join("d1", 32)
    table.join("d2", 48)
    given = begun(table, "d1", "d2")
    assert only(given, Execute).device == "d1"
    table.play(refuse(table, given))
    assert [each.device for each in table.all(Execute)] == ["d1", "d2"]
    assert table.state.ended["job"].succeeded == 1


def beside_another(table: Table) -> list[Instruction]:
    """The item on a device that has another job's fragment as well."""
    table.join("d1", 32)
    table.play(table.submit(job(chain("b", mib=12, homes={"b": ("d1",)}), name="other")))
    return begun(table, "d1")


def test_an_item_is_tried_again_where_other_fragments_have_gone() -> None:
    table = Table()
    assert brief(refuse(table, beside_another(table))) == []
    table.feed(FragmentEvicted(at=table.at(), device="d1", session=1, digest=digest("b")))
    table.play(table.wait(1_000))
    assert table.state.ended["job"].succeeded == 1


def test_an_item_is_tried_again_where_the_budget_has_grown() -> None:
    table = Table()
    assert brief(refuse(table, beside_another(table))) == []
    table.change_budget("d1", 48, a=12, b=12)
    table.play(table.wait(1_000))
    assert table.state.ended["job"].succeeded == 1


def test_an_item_fails_without_another_try_where_nothing_has_changed_meanwhile() -> None:
    table = Table()
    refuse(table, beside_another(table))
    tries = len(table.all(Execute))
    assert only(table.wait(1_000), FailItem).failure.kind is FailureKind.BUDGET
    assert len(table.all(Execute)) == tries
