"""Fragments in blocks: what they are granted, and what a refusal teaches."""

from dataclasses import replace

import pytest

from coordinator.dispatch.driving import MIB, Table, brief, chain, digest, job, only, some
from shoal_coordinator.dispatch.events import FailureKind, FragmentEvicted, JobSpec
from shoal_coordinator.dispatch.instructions import (
    Execute,
    FailItem,
    FinishItem,
    FinishJob,
    Load,
    Unload,
)
from shoal_protocol.units import Bytes


def planned(a_mib: int = 20, b_mib: int = 20) -> JobSpec:
    """Two fragments of 20 MiB that run in 8, both at home on d1, which grants them so much."""
    stages = chain("a", "b", mib=20, least_mib=8, homes={"a": ("d1",), "b": ("d1",)})
    grants = [(("d1", Bytes(mib * MIB)),) for mib in (a_mib, b_mib)]
    return job(
        tuple(replace(each, granted=grant) for each, grant in zip(stages, grants, strict=True))
    )


def granted_mib(load: Load) -> float:
    return load.granted / MIB


def test_a_fragment_is_loaded_with_what_the_plan_grants_it() -> None:
    table = Table()
    table.join("d1", 32)
    first = only(table.submit(planned(b_mib=12)), Load)
    assert granted_mib(first) == 20
    second = only(table.play(table.answer(first)), Load)
    assert (granted_mib(second), some(table.given, Unload)) == (12, [])
    assert table.state.ended["job"].succeeded == 1


def test_without_a_plan_a_fragment_gets_the_whole_budget_where_it_needs_more() -> None:
    table = Table()
    table.join("d1", 12)
    load = only(table.submit(job(chain("a", mib=20, least_mib=8))), Load)
    assert granted_mib(load) == 12


def test_a_fragment_gets_what_room_is_left_before_another_in_use_goes() -> None:
    table = Table()
    table.join("d1", 32)
    first = only(table.submit(planned()), Load)
    given = table.play(table.answer(first, resident_mib=21))
    assert granted_mib(only(given, Load)) == 11
    assert some(given, Unload) == []


def test_fragments_that_no_job_uses_go_before_one_is_squeezed() -> None:
    table = Table()
    table.join("d1", 32, resident=("x", "y"))
    given = table.submit(job(chain("a", mib=20, least_mib=8)))
    assert brief(given) == ["d1 unloads x"]
    assert granted_mib(only(table.answer(given[0]), Load)) == 20


def test_a_fragment_that_takes_more_than_its_budget_is_loaded_again_with_so_much_less() -> None:
    table = Table()
    table.join("d1", 24)
    load = only(table.submit(job(chain("a", mib=20, least_mib=8))), Load)
    again = only(table.fail(load, FailureKind.BUDGET, need_mib=26, have_mib=24), Load)
    assert granted_mib(again) == 18
    table.play(table.answer(again, resident_mib=24))
    assert table.state.ended["job"].succeeded == 1


def test_what_a_fragment_exceeds_its_grant_by_is_reckoned_when_it_is_loaded_again() -> None:
    table = Table()
    table.join("d1", 64)
    load = only(table.submit(job(chain("a", mib=20, least_mib=8))), Load)
    again = only(table.fail(load, FailureKind.BUDGET, need_mib=26, have_mib=25), Load)
    assert granted_mib(again) == 20
    table.play(table.answer(again, resident_mib=20))
    assert table.state.devices["d1"].memory.resident_bytes == 26 * MIB


def test_a_fragment_gets_what_others_leave_that_take_more_than_is_reckoned() -> None:
    table = Table()
    table.join("d1", 32)
    first = only(table.submit(planned(b_mib=12)), Load)
    given = table.answer(first)
    second = only(given, Load)
    again = only(table.fail(second, FailureKind.BUDGET, need_mib=12, have_mib=9), Load)
    assert (granted_mib(second), granted_mib(again)) == (12, 9)
    table.play([only(given, Execute), again])
    assert (some(table.given, Unload), table.state.ended["job"].succeeded) == ([], 1)


def test_a_task_that_was_measured_over_the_budget_runs_again_with_less() -> None:
    table = Table()
    table.join("d1", 24)
    spec = job(chain("a", mib=20, least_mib=8), backoff_limit=0)
    task = only(table.answer(only(table.submit(spec), Load)), Execute)
    table.feed(FragmentEvicted(at=table.at(), device="d1", session=1, digest=digest("a")))
    again = only(table.fail(task, FailureKind.BUDGET, need_mib=26, have_mib=24), Load)
    assert granted_mib(again) == 18
    table.play(table.answer(again))
    assert table.state.ended["job"].succeeded == 1


def test_a_fragment_refused_without_numbers_is_tried_with_the_least_then_given_up() -> None:
    table = Table()
    table.join("d1", 24)
    load = only(table.submit(job(chain("a", mib=20, least_mib=8))), Load)
    again = only(table.fail(load, FailureKind.BUDGET), Load)
    assert granted_mib(again) == 8
    failure = only(table.fail(again, FailureKind.BUDGET), FinishJob).failure
    assert failure is not None
    assert failure.kind is FailureKind.BUDGET


def test_a_fragment_that_does_not_fit_even_in_blocks_moves_to_another_device() -> None:
    table = Table()
    table.join("d1", 12)
    stages = chain("a", mib=20, least_mib=8, homes={"a": ("d1",)})
    load = only(table.submit(job(stages)), Load)
    table.join("d2", 24)
    moved = only(table.fail(load, FailureKind.BUDGET, need_mib=18, have_mib=12), Load)
    assert (moved.device, granted_mib(moved)) == ("d2", 20)


def test_a_refusal_says_what_a_fragment_needs_by_swapping_and_to_be_resident() -> None:
    table = Table()
    table.join("d1", 6)
    spec = job(chain("a", mib=20, least_mib=8), name="rec")
    failure = only(table.submit(spec), FinishJob).failure
    assert failure is not None
    assert failure.message == (
        "fragment 0 of rec needs at least 8 MiB in blocks, 20 MiB to be resident; "
        "d1 has 6 MiB; cut finer or raise the budget"
    )


def test_an_item_that_takes_more_room_than_others_leave_gets_it() -> None:
    table = Table()
    table.join("d1", 32)
    stages = chain("a", "b", mib=12, homes={"a": ("d1",), "b": ("d1",)})
    given = table.answer(only(table.submit(job(stages, backoff_limit=0)), Load))
    table.answer(only(given, Load))
    table.feed(FragmentEvicted(at=table.at(), device="d1", session=1, digest=digest("a")))
    failed = table.fail(only(given, Execute), FailureKind.BUDGET, need_mib=24, have_mib=20)
    assert brief(failed) == ["d1 unloads b"]
    again = only(table.answer(only(failed, Unload)), Load)
    assert again.digest == digest("a")
    table.play([again])
    assert table.state.ended["job"].succeeded == 1


def test_what_a_first_run_measures_counts_before_the_next_load() -> None:
    table = Table()
    table.join("d1", 32)
    first = only(table.answer(only(table.submit(job(chain("a", mib=12))), Load)), Execute)
    table.play(table.answer(first, resident_mib=24))
    assert brief(table.submit(job(chain("b", mib=12), name="other"))) == ["d1 unloads a"]
    assert table.state.devices["d1"].memory.excess == {digest("a"): 12 * MIB}


def test_an_item_for_which_no_budget_is_enough_fails_alone_where_others_have_run() -> None:
    table = Table()
    table.join("d1", 32)
    spec = replace(job(chain("a", mib=12), items=2, backoff_limit=0), parallelism=1)
    first = only(table.answer(only(table.submit(spec), Load)), Execute)
    second = only(table.answer(only(table.answer(first), FinishItem)), Execute)
    table.fail(second, FailureKind.BUDGET, need_mib=33, have_mib=32)
    ended = table.state.ended["job"]
    assert (ended.succeeded, ended.failed, ended.outgrown) == (1, 1, {0: 33 * MIB})


@pytest.mark.parametrize("need_mib", [33, None])
def test_items_that_are_too_large_delay_no_others(need_mib: float | None) -> None:
    """However many they are: that says nothing of fragment or device. Of an item that is larger
    than the plan covers nobody knows what it needs."""
    table = Table()
    table.join("d1", 32)
    spec = replace(job(chain("a", mib=12), items=12, backoff_limit=0), parallelism=1)
    first = only(table.answer(only(table.submit(spec), Load)), Execute)
    given = table.answer(only(table.answer(first), FinishItem))
    for _ in range(10):
        given = table.fail(only(given, Execute), FailureKind.BUDGET, need_mib=need_mib)
    table.answer(only(table.answer(only(given, Execute)), FinishItem))
    ended = table.state.ended["job"]
    assert (ended.succeeded, ended.failed) == (2, 10)


def test_where_no_finer_cut_is_possible_an_item_that_takes_too_much_fails_by_itself() -> None:
    table = Table()
    table.join("d1", 32)
    stages = chain("a", mib=12)
    spec = replace(job(stages, items=2, backoff_limit=0), parallelism=1, final_cut=True)
    first = only(table.answer(only(table.submit(spec), Load)), Execute)
    given = table.fail(first, FailureKind.BUDGET, need_mib=33, have_mib=32)
    assert only(given, FailItem).failure.need == 33 * MIB
    table.answer(only(table.answer(only(given, Execute)), FinishItem))
    ended = table.state.ended["job"]
    assert (ended.succeeded, ended.failed) == (1, 1)


def test_what_was_too_large_for_a_job_is_tried_again_in_its_final_cut() -> None:
    table = Table()
    table.join("d1", 32)
    spec = replace(job(chain("a", mib=12), items=2, backoff_limit=0), parallelism=1)
    first = only(table.answer(only(table.submit(spec), Load)), Execute)
    evicted = FragmentEvicted(at=table.at(), device="d1", session=1, digest=digest("a"))
    again = only(table.feed(evicted), Load)
    table.fail(first, FailureKind.BUDGET, need_mib=33, have_mib=32)
    ended = table.fail(again, FailureKind.BUDGET, need_mib=33, have_mib=32)
    assert only(ended, FinishJob).failure is not None
    given = table.submit(replace(spec, epoch=2, final_cut=True))
    final = table.play([*given, *table.wait(4_000)])  # it backs off
    assert only(final, FinishJob).failure is None
    assert table.state.ended["job"].succeeded == 2


def test_where_no_finer_cut_is_possible_an_item_that_a_larger_device_can_run_is_run_there() -> None:
    table = Table()
    table.join("d1", 32)
    table.join("d2", 32)
    table.join("d3", 48)
    homes = {"a": ("d1", "d2", "d3")}
    spec = replace(job(chain("a", mib=12, homes=homes), backoff_limit=0), final_cut=True)
    given = [each for load in some(table.submit(spec), Load) for each in table.answer(load)]
    for _ in range(2):
        execute = only(given, Execute)
        assert execute.device != "d3"
        given = table.fail(execute, FailureKind.BUDGET, need_mib=33, have_mib=32)
    execute = only(given, Execute)
    assert execute.device == "d3"
    table.answer(only(table.answer(execute), FinishItem))
    assert table.state.ended["job"].succeeded == 1


def test_the_largest_sizes_that_items_had_where_memory_was_too_little_are_kept() -> None:
    table = Table()
    table.join("d1", 32)
    spec = replace(job(chain("a", mib=12), items=3, backoff_limit=0), parallelism=1)
    given = table.answer(only(table.submit(spec), Load))
    given = table.answer(only(table.answer(only(given, Execute)), FinishItem))
    for sizes in ({"t": (4, 9), "u": (1,)}, {"t": (5, 8)}):
        given = table.fail(
            only(given, Execute), FailureKind.BUDGET, need_mib=33, have_mib=32, seen=sizes
        )
    ended = table.state.ended["job"]
    assert (ended.failed, ended.seen) == (2, {"t": (5, 9), "u": (1,)})


@pytest.mark.parametrize("need_mib", [32, 33])
def test_an_item_for_which_no_budget_is_enough_is_tried_twice_and_no_more(need_mib: int) -> None:
    table = Table()
    table.join("d1", 32)
    table.join("d2", 24)
    spec = replace(job(chain("a", mib=12, homes={"a": ("d1",)}), items=2), parallelism=1)
    first = only(table.answer(only(table.submit(spec), Load)), Execute)
    given = table.answer(only(table.answer(first), FinishItem))
    if need_mib == 32:  # that is asked for and granted, and found to be too little
        table.feed(FragmentEvicted(at=table.at(), device="d1", session=1, digest=digest("a")))
        given = table.fail(only(given, Execute), FailureKind.BUDGET, need_mib=32, have_mib=32)
        given = table.answer(only(given, Load))
    again = table.fail(only(given, Execute), FailureKind.BUDGET, need_mib=need_mib, have_mib=32)
    ended = table.fail(only(again, Execute), FailureKind.BUDGET, need_mib=need_mib, have_mib=32)
    failure = only(ended, FailItem).failure
    assert (failure.need, failure.have) == (need_mib * MIB, 32 * MIB)
    assert table.state.ended["job"].outgrown == {0: need_mib * MIB}


def test_an_item_that_a_larger_device_may_have_room_for_is_tried_there() -> None:
    table = Table()
    table.join("d1", 32)
    table.join("d2", 48)
    spec = replace(job(chain("a", mib=12, homes={"a": ("d1",)}), items=2), parallelism=1)
    first = only(table.answer(only(table.submit(spec), Load)), Execute)
    given = table.answer(only(table.answer(first), FinishItem))
    for _ in range(2):
        failed = only(given, Execute)
        given = table.fail(failed, FailureKind.BUDGET, need_mib=33, have_mib=32)
        assert some(given, FailItem) == []
        given = given if some(given, Execute) else table.wait(1000)
