"""What a loss, a silence or a failure undoes, and how far trying again goes."""

import pytest

from coordinator.dispatch.driving import MIB, Table, brief, chain, digest, job, only, some
from shoal_coordinator.dispatch.events import (
    DeviceDraining,
    DeviceLost,
    Failure,
    FailureKind,
    FragmentEvicted,
    InputUnreadable,
    ProbeAnswered,
    Stage,
)
from shoal_coordinator.dispatch.instructions import (
    Cancel,
    Disconnect,
    Execute,
    FailItem,
    FinishJob,
    ForgetJob,
    Forward,
    Load,
    PeerLost,
    Probe,
    Release,
    Unload,
)
from shoal_protocol.units import Bytes

HOMES = {"a": ("d1",), "b": ("d2", "d3")}


def three_devices(items: int = 1, backoff_limit: int = 3) -> Table:
    """Stage a on d1; stage b on d2 and d3."""
    table = Table()
    table.join("d1", resident=("a",))
    table.join("d2", resident=("b",))
    table.join("d3", resident=("b",))
    table.submit(job(chain("a", "b", homes=HOMES), items, backoff_limit=backoff_limit))
    return table


def test_a_lost_device_s_task_runs_elsewhere_from_the_kept_activation() -> None:
    table = three_devices()
    given = table.answer(only(table.given, Execute))
    assert brief(given) == ["d2 runs 0.1"]
    assert brief(table.lose("d2")) == ["d3 runs 0.1", "d1 sends 0.0 to d3"]


@pytest.mark.parametrize("ahead", [True, False])
def test_whoever_sends_to_a_lost_device_is_told(ahead: bool) -> None:
    table = three_devices()
    execute = only(table.given, Execute)
    if ahead:
        ((_, target),) = execute.routes
    else:
        target = only(table.answer(execute, delivered=False), Forward).target
    (warning,) = some(table.lose(target), PeerLost)
    assert (warning.device, warning.peer) == ("d1", target)


def test_whoever_may_fetch_from_a_lost_device_is_told() -> None:
    table = Table()
    table.join("d1", cached=("a",))
    table.join("d2")
    given = table.submit(job(chain("a", homes={"a": ("d2",)}), 1))
    load = only(given, Load)
    assert (load.device, load.peers) == ("d2", ("d1",))
    assert only(table.lose("d1"), PeerLost).device == "d2"


def test_who_does_not_send_to_a_lost_device_hears_nothing_of_it() -> None:
    table = three_devices()
    ((_, target),) = only(table.given, Execute).routes
    other = ({"d2", "d3"} - {target}).pop()
    assert table.lose(other) == []


def test_without_the_activation_the_item_starts_again_from_the_model_s_input() -> None:
    table = three_devices()
    consumer = only(table.answer(only(table.given, Execute)), Execute)
    assert table.lose("d1") == []
    # The task that has its input already goes on; the loss is felt only when that one is lost too.
    given = table.lose(consumer.device)
    assert brief(given) == ["d3 loads a (tier 3)"]
    assert brief(table.play(given))[1:3] == ["d3 runs 0.0", "d3 runs 0.1"]
    assert table.state.ended["job"].succeeded == 1


def test_a_task_whose_input_was_on_its_way_from_a_lost_device_is_given_up() -> None:
    table = three_devices()
    given = table.answer(only(table.given, Execute), delivered=False)
    execute, _ = only(given, Execute), only(given, Forward)
    cancel = only(table.lose("d1"), Cancel)
    assert (cancel.device, cancel.cancelled) == (execute.device, execute.instruction)
    given = table.fail(execute, FailureKind.CANCELLED)
    assert table.state.jobs["job"].active[0].failures == 0
    table.play([*given, *table.join("d1", resident=("a",))])
    table.play(table.all(Load)[-1:])
    assert table.state.ended["job"].succeeded == 1


def test_answers_of_a_lost_session_are_ignored() -> None:
    table = three_devices()
    execute = only(table.given, Execute)
    table.lose("d1")
    assert table.answer(execute) == []


def test_a_late_word_about_an_old_session_does_not_hurt_the_new_one() -> None:
    table = three_devices()
    session = table.state.devices["d1"].session
    table.join("d1", resident=("a",))
    assert table.feed(DeviceLost(at=table.at(), device="d1", session=session)) == []
    assert "d1" in table.state.devices


def test_a_device_that_returns_has_what_it_says_and_no_tasks() -> None:
    table = three_devices(items=3)
    given = table.join("d1", resident=("a",))
    assert [line for line in brief(given) if "d1" in line] == [
        "d1 runs 0.0, to d2",
        "d1 runs 1.0, to d3",
    ]
    assert all(execute.attempt == 2 for execute in some(given, Execute))


def test_when_the_homes_are_gone_any_device_that_fits_serves_until_one_is_back() -> None:
    table = Table()
    table.join("home", resident=("a",))
    table.join("other")
    table.submit(job(chain("a", homes={"a": ("home",)}), 40))
    load = only(table.lose("home"), Load)
    assert load.device == "other"
    assert {one.device for one in some(table.answer(load), Execute)} == {"other"}
    given = table.join("home", resident=("a",))
    assert {one.device for one in some(given, Execute)} == {"home"}
    given = table.answer(table.all(Execute)[-3])
    assert {one.device for one in some(given, Execute)} <= {"home"}


def test_silence_is_followed_by_a_probe_and_then_by_the_loss() -> None:
    table = three_devices()
    limits = table.state.limits
    given = table.wait(limits.silence // 1_000_000)
    assert {probe.device for probe in some(given, Probe)} == {"d1", "d2", "d3"}
    for name in ("d2", "d3"):
        session = table.state.devices[name].session
        table.feed(ProbeAnswered(at=table.at(), device=name, session=session))
    given = table.wait(limits.probe_patience // 1_000_000)
    assert [gone.device for gone in some(given, Disconnect)] == ["d1"]
    assert "loads a" in " ".join(brief(given))


def test_a_device_that_lives_but_never_answers_is_given_up() -> None:
    table = three_devices()
    for _ in range(200):
        table.wait(4000)
        for name, device in list(table.state.devices.items()):
            table.feed(ProbeAnswered(at=table.at(), device=name, session=device.session))
        if table.all(Disconnect):
            break
    assert table.all(Disconnect)[0].reason == "instruction 4 was not answered"


def live(table: Table, name: str, seconds: int, mib_per_second: float) -> None:
    """Time passes, and the device reports every four seconds how much it has fetched."""
    start = table.state.devices[name].health.fetched / MIB
    for passed in range(4, seconds + 1, 4):
        table.wait(4000)
        if name in table.state.devices:
            table.measure(name, fetched_mib=start + passed * mib_per_second)


def test_a_device_that_fetches_a_large_fragment_is_not_given_up_while_bytes_come() -> None:
    table = Table()
    table.join("d1")
    load = only(table.submit(job(chain("a"))), Load)
    live(table, "d1", 2000, mib_per_second=0.5)
    assert not table.all(Disconnect)
    live(table, "d1", 580, mib_per_second=0)
    assert not table.all(Disconnect)
    assert only(table.answer(load), Execute).device == "d1"


def test_a_device_to_which_no_bytes_come_any_more_is_given_up() -> None:
    table = Table()
    table.join("d1")
    load = only(table.submit(job(chain("a"))), Load)
    live(table, "d1", 800, mib_per_second=0.5)
    live(table, "d1", 640, mib_per_second=0)
    gone = table.all(Disconnect)[0]
    assert gone.reason == f"instruction {load.instruction} was not answered"


def test_a_fetch_that_breaks_off_and_gets_on_is_tried_for_as_long_as_it_takes() -> None:
    table = Table()
    table.join("d1")
    table.submit(job(chain("a")))
    for _ in range(3 * table.state.limits.load_tries):
        live(table, "d1", 8, mib_per_second=0.5)
        table.fail(table.all(Load)[-1], FailureKind.UNAVAILABLE)
        table.wait(500)
    assert only(table.answer(table.all(Load)[-1]), Execute).device == "d1"


def test_a_draining_device_gets_nothing_new_and_finishes_what_it_has() -> None:
    table = three_devices(items=9)
    device = table.state.devices["d2"]
    table.feed(DeviceDraining(at=table.at(), device="d2", session=device.session))
    seen = table.play(list(table.given))
    assert {one.device for one in some(seen, Execute) if one.stage == 1} == {"d3"}
    assert table.state.ended["job"].succeeded == 9


def test_a_failed_task_is_tried_on_another_device() -> None:
    table = three_devices()
    first = only(table.answer(only(table.given, Execute)), Execute)
    second = only(table.fail(first, FailureKind.RUNTIME), Execute)
    assert (first.device, second.device) == ("d2", "d3")


@pytest.mark.parametrize(
    "kind",
    [
        FailureKind.RUNTIME,
        FailureKind.MISSING_ACTIVATION,
        FailureKind.UNREACHABLE,
        FailureKind.DEADLINE,
    ],
)
@pytest.mark.parametrize("backoff_limit", [0, 2])
def test_an_item_is_tried_so_often_and_no_more(kind: FailureKind, backoff_limit: int) -> None:
    table = three_devices(backoff_limit=backoff_limit)
    for _ in range(60):
        waiting = [one for one in table.all(Execute) if one.instruction in table.state.pending]
        for one in waiting:
            table.fail(one, kind)
        table.wait(250)
    assert len(table.all(Execute)) == backoff_limit + 1
    assert only(table.given, FailItem).failure.kind is kind
    assert only(table.given, FinishJob).failure is None


def test_an_input_that_does_not_suit_the_model_fails_without_another_try() -> None:
    table = three_devices(items=2)
    bad, good = table.all(Execute)
    given = table.fail(bad, FailureKind.INVALID_INPUT)
    assert only(given, FailItem).item == bad.item
    table.play([good])
    assert table.state.ended["job"].succeeded == 1


def test_an_input_that_cannot_be_read_fails_and_its_task_is_given_up() -> None:
    table = three_devices(items=1)
    failure = Failure(kind=FailureKind.INVALID_INPUT, message="not an array")
    given = table.feed(InputUnreadable(at=table.at(), job="job", item=0, failure=failure))
    assert only(given, FailItem).failure.message == "not an array"
    assert only(given, Cancel).device == "d1"
    # The answer comes all the same, and what was made is dropped.
    given = table.answer(only(table.given, Execute))
    assert {(one.device, one.stage) for one in some(given, Release)} == {("d1", 0), ("d2", 0)}


def test_an_item_that_kills_devices_is_given_up() -> None:
    table = Table()
    table.submit(job(chain("a"), 1, backoff_limit=1))
    for _ in range(table.state.limits.kills + 2):
        table.join("d1", resident=("a",))
        table.lose("d1")
    failure = only(table.given, FailItem).failure
    assert failure.message.startswith("its device was lost 5 times")


def test_the_loss_of_a_device_is_no_try_of_the_item() -> None:
    table = Table()
    table.submit(job(chain("a"), 1, backoff_limit=0))
    for _ in range(table.state.limits.kills):
        table.join("d1", resident=("a",))
        table.lose("d1")
    table.play(table.join("d1", resident=("a",)))
    assert table.state.ended["job"].succeeded == 1


def test_a_fragment_that_a_device_gave_up_is_loaded_again() -> None:
    table = three_devices()
    session = table.state.devices["d1"].session
    event = FragmentEvicted(at=table.at(), device="d1", session=session, digest=digest("a"))
    table.feed(event)
    assert table.state.devices["d1"].memory.resident == {}
    given = table.fail(only(table.given, Execute), FailureKind.NOT_RESIDENT)
    assert table.state.jobs["job"].active[0].failures == 0
    table.play([*table.all(Load), *given])
    assert table.state.ended["job"].succeeded == 1


def test_a_device_that_fails_every_task_is_left_alone_for_a_while() -> None:
    table = Table()
    table.join("bad", resident=("a",))
    table.join("good", resident=("a",))
    queue = list(table.submit(job(chain("a"), 60)))
    bad = 0
    while queue:
        one = queue.pop(0)
        if isinstance(one, Execute) and one.device == "bad":
            bad += 1
            queue += table.fail(one, FailureKind.RUNTIME)
        elif not isinstance(one, ForgetJob | FinishJob):
            queue += table.answer(one)
    assert table.state.ended["job"].succeeded == 60
    assert bad <= 6


def test_what_both_branches_need_is_made_again_once() -> None:
    table = Table()
    stages = tuple(
        Stage(
            digest=digest(name),
            resident_bytes=Bytes(10 * MIB),
            least_bytes=Bytes(10 * MIB),
            predecessors=before,
            homes=homes,
        )
        for name, before, homes in (
            ("a", (), ("d1", "d4")),
            ("b", (0,), ("d2",)),
            ("c", (0,), ("d3",)),
        )
    )
    table.join("d1", resident=("a",))
    table.join("d4", resident=("a",))
    given = table.submit(job(stages))
    table.answer(only(given, Execute))
    table.lose("d1")
    loads = [*table.join("d2"), *table.join("d3")]
    seen = table.play(loads)
    assert (
        brief(some(seen, Execute)).count("d4 runs 0.0, to d3")
        + brief(some(seen, Execute)).count("d4 runs 0.0")
        <= 1
    )
    assert table.state.ended["job"].succeeded == 1


def test_all_devices_gone_and_back_the_job_goes_on() -> None:
    table = three_devices(items=8)
    for name in ("d1", "d2", "d3"):
        table.lose(name)
    assert table.wait(60_000) == []
    given = table.join("d1") + table.join("d2")
    table.play(given)
    assert table.state.ended["job"].succeeded == 8


def test_a_full_disk_is_cleared_of_what_no_job_uses_any_more() -> None:
    table = Table()
    table.join("d1", resident=("z",))
    load = only(table.submit(job(chain("a"), 1)), Load)
    given = table.fail(load, FailureKind.DISK_FULL)
    assert brief(given) == ["d1 unloads z"]
    again = only(table.answer(only(given, Unload)), Load)
    assert again.digest == digest("a")
    # With nothing left to clear, the device is left alone for a while.
    assert table.fail(again, FailureKind.DISK_FULL) == []
