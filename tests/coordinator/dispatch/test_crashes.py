"""A fragment that takes down the devices that load it, or run it for the first time."""

import pytest

from coordinator.dispatch.driving import Table, chain, job, only, some
from shoal_coordinator.dispatch.events import DeviceDraining, FailureKind
from shoal_coordinator.dispatch.instructions import Execute, FailItem, FinishItem, FinishJob, Load


def crash_while_loading(table: Table, name: str, fragment: str = "b") -> None:
    """The device joins, does all that it is asked for, and dies at the load of one fragment."""
    given = table.join(name, cached=("a", "b"))
    while given:
        one = given.pop(0)
        if isinstance(one, Load) and one.digest[7] == fragment:
            table.lose(name)
            return
        if not isinstance(one, FinishJob):
            given += table.answer(one)


def test_a_fragment_that_kills_whoever_loads_it_fails_its_job_and_no_other() -> None:
    table = Table()
    table.submit(job(chain("b"), 5, name="bad"))
    table.submit(job(chain("a"), 5, name="good"))
    for _ in range(table.state.limits.load_losses):
        assert "bad" in table.state.jobs
        crash_while_loading(table, "d1")
    failure = table.state.ended["bad"].failure
    assert failure is not None
    assert failure.kind is FailureKind.RUNTIME
    assert failure.message == (
        "fragment 0 of bad ended agents 4 times in a row, on 1 device, while they loaded it or ran "
        "it for the first time, at last on d1: give it more memory, which they may have lacked; if "
        "that is no help, see the log of its agent, and load the model with ONNX Runtime there"
    )
    table.play(table.join("d1"))
    assert table.state.ended["good"].succeeded == 5


def test_a_fragment_that_kills_whoever_runs_it_first_fails_its_job_after_the_items() -> None:
    table = Table()
    table.submit(job(chain("a"), 300, backoff_limit=0))
    losses = 0
    while "job" in table.state.jobs:
        losses += 1
        table.join("d1", resident=("a",))
        table.lose("d1")
    # One bad item is given up before its job is: other items are no better here.
    assert some(table.given, FailItem)
    limits = table.state.limits
    assert losses == limits.kills + 1 + limits.load_losses
    failure = table.state.ended["job"].failure
    assert failure is not None
    assert "ended agents 8 times in a row, on 1 device" in failure.message


def test_a_bad_item_alone_does_not_fail_the_job() -> None:
    table = Table()
    table.submit(job(chain("a"), 20))
    while "job" in table.state.jobs:
        given = table.join("d1", resident=("a",))
        while given:
            one = given.pop(0)
            if isinstance(one, Execute) and one.item == 7:
                stored = some(given, FinishItem)
                table.lose("d1")
                given = [more for each in stored for more in table.answer(each)]
            elif isinstance(one, Execute | FinishItem):
                given += table.answer(one)
    ended = table.state.ended["job"]
    assert ended.failure is None
    # Item 8 was given together with item 7 each time, and lost with it.
    assert {index for index, _ in ended.failures} <= {7, 8}


def test_a_fragment_that_ran_once_is_not_blamed_for_the_losses_before() -> None:
    table = Table()
    table.submit(job(chain("b"), 50))
    for _ in range(3):
        for _ in range(table.state.limits.load_losses - 1):
            crash_while_loading(table, "d1")
        load = only(table.join("d1", cached=("b",)), Load)
        table.answer(only(table.answer(load)[:1], Execute))
        table.lose("d1")
    assert "job" in table.state.jobs


def test_many_devices_that_are_lost_at_once_count_as_one_loss() -> None:
    table = Table()
    table.submit(job(chain("a"), 50))
    names = [f"d{index}" for index in range(10)]
    for name in names:
        table.join(name)
    table.now += 1_000_000_000
    for name in names:
        table.lose(name)
    assert "job" in table.state.jobs


def test_a_device_that_leaves_in_order_is_no_loss() -> None:
    table = Table()
    table.submit(job(chain("a"), 50))
    for _ in range(20):
        table.join("d1")
        session = table.state.devices["d1"].session
        table.feed(DeviceDraining(at=table.at(), device="d1", session=session))
        table.lose("d1")
        table.now += 1_000_000_000
    assert "job" in table.state.jobs


def test_two_fragments_are_tried_together_where_neither_is_suspect() -> None:
    table = Table()
    table.submit(job(chain("a"), 50, name="first"))
    table.submit(job(chain("b"), 50, name="second"))
    table.answer(only(table.join("d1", 100), Load))
    assert len(some(table.wait(250), Load)) == 1


@pytest.mark.parametrize("suspect", ["a", "b"])
def test_a_suspect_and_another_fragment_are_not_tried_together(suspect: str) -> None:
    table = Table()
    table.submit(job(chain(suspect), 50, name="first"))
    for _ in range(2):
        table.join("d1", cached=("a", "b"))
        table.lose("d1")
    table.submit(job(chain("b" if suspect == "a" else "a"), 50, name="second"))
    load = only(table.join("d1", 100, cached=("a", "b")), Load)
    execute = some(table.answer(load), Execute)[0]
    assert some(table.wait(250), Load) == []
    table.answer(execute)
    assert len(some(table.wait(250), Load)) == 1


def test_a_device_that_reconnects_did_not_crash() -> None:
    table = Table()
    table.submit(job(chain("a"), 50))
    for _ in range(20):
        for name in ("d1", "d2", "d3"):
            table.join(name, incarnation=1)
            table.now += 1_000_000_000
            table.lose(name)
    assert "job" in table.state.jobs


def test_a_session_that_replaces_another_of_the_same_process_is_no_crash() -> None:
    table = Table()
    table.submit(job(chain("a"), 50))
    for _ in range(table.state.limits.load_losses - 1):
        table.join("d1")
        table.lose("d1")
        table.now += 1_000_000_000
    table.join("d2", incarnation=1)
    table.now += 1_000_000_000
    table.join("d2", incarnation=1)
    assert "job" in table.state.jobs
    table.now += 1_000_000_000
    table.join("d2", incarnation=2)
    assert "job" not in table.state.jobs
