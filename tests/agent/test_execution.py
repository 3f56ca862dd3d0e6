"""The queue of tasks: order, waiting, cancelling, epochs, and a random history against a model."""

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_agent.execution.queue import (
    DELIVERING_LIMIT,
    SMALL_LIMIT,
    UNCLAIMED_INPUTS_LIFETIME,
    UNCLAIMED_LIFETIME,
    TaskQueue,
)
from shoal_agent.execution.values import (
    Assignment,
    Drop,
    Effect,
    Made,
    Need,
    Reason,
    Refused,
    Start,
    Stop,
)
from shoal_protocol.tensors import ActivationKey
from shoal_protocol.units import Nanoseconds

NOW = Nanoseconds(0)


def made(item: int, stage: int = 1, epoch: int = 1, job: str = "j") -> Made:
    return Made(job, epoch, item, stage)


def assignment(
    instruction: int,
    item: int,
    *producers: int,
    epoch: int = 1,
    digest: str = "d",
    deadline: int | None = None,
    batch: int = 1,
) -> Assignment:
    return Assignment(
        instruction=instruction,
        task=made(item, epoch=epoch),
        digest=digest,
        needs=tuple(Need(producer=p, tensors=frozenset({f"t{p}"})) for p in producers),
        deadline=None if deadline is None else Nanoseconds(deadline),
        batch=batch,
    )


def sent(item: int, producer: int = 0, epoch: int = 1) -> ActivationKey:
    return ActivationKey("j", epoch, item, producer, 1)


def started(effects: Iterable[Effect] | None) -> list[int]:
    assert effects is not None
    return [e.assignment.instruction for e in effects if isinstance(e, Start)]


def together(effects: Iterable[Effect] | None) -> list[list[int]]:
    """What starts at once."""
    assert effects is not None
    starts = [each for each in effects if isinstance(each, Start)]
    return [[part.assignment.instruction for part in (each, *each.joined)] for each in starts]


def ran(
    queue: TaskQueue,
    instruction: int,
    kept: Iterable[str] = (),
    *,
    in_the_way: bool = False,
    small: bool = False,
) -> list[Effect]:
    effects = queue.computed(instruction, kept, in_the_way=in_the_way, small=small)
    return effects + queue.settled(instruction)


def ended(queue: TaskQueue, instruction: int) -> list[Effect]:
    return ran(queue, instruction) + queue.delivered(instruction)


def refused(effects: Iterable[Effect]) -> list[tuple[int, Reason]]:
    return [(e.instruction, e.reason) for e in effects if isinstance(e, Refused)]


def dropped(effects: Iterable[Effect]) -> set[object]:
    return {key for e in effects if isinstance(e, Drop) for key in e.keys}


def test_a_task_starts_when_its_last_input_has_come() -> None:
    queue = TaskQueue()
    assert started(queue.submit(assignment(1, 0, 0, -1))) == []
    assert started(queue.arrive(NOW, sent(0), ["t0"])) == []
    (start,) = queue.arrive(NOW, sent(0, -1), ["t-1", "more"]) or []
    assert isinstance(start, Start)
    assert set(start.inputs) == {
        (sent(0), frozenset({"t0"})),
        (sent(0, -1), frozenset({"t-1"})),
    }


def test_inputs_may_come_before_the_task() -> None:
    queue = TaskQueue()
    queue.arrive(NOW, sent(0), ["t0"])
    assert started(queue.submit(assignment(1, 0, 0))) == [1]


def test_a_waiting_task_does_not_hold_up_a_ready_one_and_ready_ones_run_in_order() -> None:
    queue = TaskQueue()
    assert started(queue.submit(assignment(1, 0, 0))) == []
    assert started(queue.submit(assignment(2, 1))) == [2]
    queue.submit(assignment(3, 2))
    queue.arrive(NOW, sent(0), ["t0"])
    assert started(ran(queue, 2)) == [1]
    assert started(ran(queue, 1)) == [3]


def test_what_was_made_here_serves_any_number_of_consumers_until_it_is_released() -> None:
    queue = TaskQueue()
    queue.submit(assignment(1, 0))
    ran(queue, 1, ["t1"])
    later = Assignment(
        instruction=2,
        task=made(0, stage=2),
        digest="d",
        needs=(Need(producer=1, tensors=frozenset({"t1"})),),
    )
    (start,) = queue.submit(later)
    assert isinstance(start, Start)
    assert start.inputs == ((made(0), frozenset({"t1"})),)
    assert dropped(ran(queue, 2)) == set()
    assert dropped(queue.release([made(0)])) == {made(0)}
    assert not queue.holds(made(0))


def test_nothing_runs_before_what_a_task_took_has_a_place_of_its_own() -> None:
    queue = TaskQueue()
    queue.submit(assignment(1, 0))
    assert started(queue.computed(1)) == []
    assert started(queue.submit(assignment(2, 1))) == []
    queue.arrive(NOW, sent(2), ["t0"])
    assert started(queue.submit(assignment(3, 2, 0))) == []
    assert started(queue.settled(1)) == [2]


def test_what_was_sent_here_is_used_up_by_its_task() -> None:
    queue = TaskQueue()
    queue.arrive(NOW, sent(0), ["t0"])
    queue.submit(assignment(1, 0, 0))
    assert dropped(ran(queue, 1)) == {sent(0)}


def test_release_also_lets_unclaimed_copies_go_but_not_those_that_a_task_waits_with() -> None:
    queue = TaskQueue()
    queue.arrive(NOW, sent(0), ["t0"])
    queue.arrive(NOW, sent(1), ["t0"])
    queue.submit(assignment(1, 1, 0, -1))
    assert dropped(queue.release([made(0, stage=0), made(1, stage=0)])) == {sent(0)}


def test_at_most_so_many_tasks_deliver_at_once() -> None:
    queue = TaskQueue()
    for instruction in range(DELIVERING_LIMIT + 1):
        queue.submit(assignment(instruction, instruction))
    for instruction in range(DELIVERING_LIMIT - 1):
        assert started(ran(queue, instruction)) == [instruction + 1]
    assert started(ran(queue, DELIVERING_LIMIT - 1)) == []
    assert started(queue.delivered(0)) == [DELIVERING_LIMIT]


def test_small_outputs_hold_up_nothing_until_many_are_on_their_way() -> None:
    queue = TaskQueue()
    for instruction in range(SMALL_LIMIT + DELIVERING_LIMIT + 1):
        queue.submit(assignment(instruction, instruction))
    for instruction in range(SMALL_LIMIT - 1):
        assert started(ran(queue, instruction, small=True)) == [instruction + 1]
    for instruction in range(SMALL_LIMIT - 1, SMALL_LIMIT + DELIVERING_LIMIT - 2):
        assert started(ran(queue, instruction)) == [instruction + 1]
    last = SMALL_LIMIT + DELIVERING_LIMIT - 2
    assert started(ran(queue, last, small=True)) == [], "as many as there may be of both"
    assert started(queue.delivered(0)) == [last + 1]
    assert started(ran(queue, last + 1)) == []
    assert started(queue.delivered(1)) == [], "of the large ones there are enough"
    assert started(queue.delivered(last + 1)) == [last + 2]


def test_a_cancelled_task_is_answered_once_wherever_it_is() -> None:
    queue = TaskQueue()
    queue.submit(assignment(1, 0))
    queue.submit(assignment(2, 1))
    queue.submit(assignment(3, 2, 0))
    assert refused(queue.cancel(3)) == [(3, Reason.CANCELLED)]
    assert refused(queue.cancel(2)) == [(2, Reason.CANCELLED)]
    assert queue.cancel(1) == [Stop(instruction=1)]
    assert queue.cancel(1) == []
    assert queue.stopped_because(1) is Reason.CANCELLED
    assert ran(queue, 1) == []
    assert queue.cancel(1) == []
    assert queue.cancel(99) == []


def test_an_older_epoch_is_refused_and_a_newer_one_voids_what_is_older() -> None:
    queue = TaskQueue()
    queue.submit(assignment(1, 0, epoch=1))
    queue.submit(assignment(2, 1, 0, epoch=1))
    queue.arrive(NOW, sent(2), ["t0"])
    effects = queue.submit(assignment(3, 0, epoch=2))
    assert Stop(instruction=1) in effects
    assert refused(effects) == [(2, Reason.CANCELLED)]
    assert dropped(effects) == {sent(2)}
    (old,) = queue.submit(assignment(4, 0, epoch=1))
    assert isinstance(old, Refused)
    assert old.message == "epoch 1 of job j is over; it is 2 now"
    assert queue.arrive(NOW, sent(0, epoch=1), ["t0"]) is None
    assert started(ran(queue, 1, ["t1"])) == [3]
    assert not queue.holds(made(0))


def test_a_deadline_answers_a_waiting_task_with_what_it_lacked_and_stops_a_running_one() -> None:
    queue = TaskQueue()
    queue.submit(assignment(1, 0, deadline=10))
    queue.submit(assignment(2, 1, 0, -1, deadline=20))
    assert queue.next_deadline() == 10
    assert queue.tick(Nanoseconds(9)) == []
    assert queue.tick(Nanoseconds(10)) == [Stop(instruction=1)]
    assert queue.next_deadline() == 20
    (late,) = queue.tick(Nanoseconds(20))
    assert isinstance(late, Refused)
    assert late.reason is Reason.DEADLINE
    assert "activations of stage 0, the model's inputs" in late.message
    assert queue.next_deadline() is None


def test_a_task_whose_time_went_by_in_the_queue_is_not_to_blame() -> None:
    queue = TaskQueue()
    queue.submit(assignment(1, 0, deadline=10))
    queue.submit(assignment(2, 1, deadline=10))
    late, stop = queue.tick(Nanoseconds(10))
    assert stop == Stop(instruction=1)
    assert isinstance(late, Refused)
    assert (late.instruction, late.reason) == (2, Reason.CANCELLED)
    assert late.message == "the deadline passed in the queue"


def test_tensors_that_nobody_claims_expire() -> None:
    queue = TaskQueue()
    queue.arrive(NOW, sent(0), ["t0"])
    assert queue.tick(Nanoseconds(UNCLAIMED_LIFETIME - 1)) == []
    assert dropped(queue.tick(UNCLAIMED_LIFETIME)) == {sent(0)}


def test_a_models_inputs_that_come_after_the_end_of_their_task_expire_soon() -> None:
    queue = TaskQueue()
    queue.arrive(NOW, sent(0), ["t0"])
    queue.arrive(NOW, sent(0, producer=-1), ["x"])
    assert dropped(queue.tick(UNCLAIMED_INPUTS_LIFETIME)) == {sent(0, producer=-1)}


def test_tensors_that_a_waiting_task_takes_do_not_expire() -> None:
    queue = TaskQueue()
    queue.submit(assignment(1, 0, -1, 4))
    queue.arrive(NOW, sent(0, producer=-1), ["t-1"])
    assert queue.tick(UNCLAIMED_INPUTS_LIFETIME) == []


def test_tasks_of_a_fragment_that_goes_are_answered() -> None:
    queue = TaskQueue()
    queue.submit(assignment(1, 0, digest="a"))
    queue.submit(assignment(2, 1, digest="a"))
    queue.submit(assignment(3, 2, digest="b"))
    assert refused(queue.unload("a")) == [(2, Reason.NOT_RESIDENT)]
    assert started(ran(queue, 1)) == [3]


def test_tasks_of_one_fragment_that_wait_start_at_once_up_to_the_batch_of_each() -> None:
    queue = TaskQueue()
    queue.submit(assignment(1, 0, batch=8))
    for number, digest, batch in ((2, "d", 8), (3, "e", 8), (4, "d", 3), (5, "d", 8), (6, "d", 1)):
        queue.submit(assignment(number, number, digest=digest, batch=batch))
    queue.submit(assignment(7, 7, 0, batch=8))
    assert together(ended(queue, 1)) == [[2, 4, 5]], "7 waits for its input"
    assert queue.running == (2, 4, 5)
    assert [together(ended(queue, each)) for each in (2, 4, 5)] == [[], [], [[3]]]
    assert together(ended(queue, 3)) == [[6]]


def test_what_did_not_run_with_others_waits_where_it_was_and_may_run_with_others_later() -> None:
    queue = TaskQueue()
    for number in range(1, 6):
        queue.submit(assignment(number, number, batch=3))
    assert together(ended(queue, 1)) == [[2, 3, 4]]
    assert queue.put_back([3, 4]) == []
    assert together(ended(queue, 2)) == [[3, 4, 5]]


def test_the_tasks_of_a_run_that_failed_run_by_themselves() -> None:
    queue = TaskQueue()
    for number in range(1, 5):
        queue.submit(assignment(number, number, batch=3))
    assert together(ended(queue, 1)) == [[2, 3, 4]]
    assert together(queue.put_back([2, 3, 4], alone=True)) == [[2]]
    queue.submit(assignment(5, 5, batch=3))
    assert together(ended(queue, 2)) == [[3]]
    assert together(ended(queue, 3)) == [[4]]
    assert together(ended(queue, 4)) == [[5]]


def test_one_that_is_cancelled_in_a_run_with_others_stops_it_and_only_it_is_answered() -> None:
    queue = TaskQueue()
    queue.arrive(NOW, sent(3), ["t0"])
    queue.submit(assignment(1, 1, batch=3))
    queue.submit(assignment(2, 2, batch=3))
    queue.submit(assignment(3, 3, 0, batch=3, deadline=10))
    assert together(ran(queue, 1)) == [[2, 3]]
    assert queue.tick(Nanoseconds(10)) == [Stop(instruction=3)]
    effects = queue.put_back([2, 3], alone=True)
    assert refused(effects) == [(3, Reason.CANCELLED)], "others had the processor too"
    assert dropped(effects) == {sent(3)}
    assert together(effects) == [[2]]


actions = st.lists(
    st.tuples(
        st.sampled_from(
            ["submit", "arrive", "finish", "put back", "deliver", "cancel", "release", "epoch"]
        ),
        st.integers(0, 5),
        st.integers(0, 1),
    ),
    max_size=60,
)


class Device:
    """Does what a queue says, and notes how each task is answered."""

    def __init__(self) -> None:
        self.queue = TaskQueue()
        self.answers: dict[int, str] = {}
        self.running: dict[int, Assignment] = {}
        self.settling: list[int] = []
        self.delivering: list[int] = []
        self.here: set[object] = set()
        self.epoch, self.submitted = 1, 0

    def follow(self, effects: list[Effect] | None) -> None:
        for effect in effects or []:
            match effect:
                case Start():
                    assert not self.running
                    assert not self.settling, "what it took has no place yet"
                    for each in (effect, *effect.joined):
                        assert all(key in self.here for key, _ in each.inputs)
                        assert len(each.inputs) == len(each.assignment.needs)
                        self.running[each.assignment.instruction] = each.assignment
                    most = min(each.batch for each in self.running.values())
                    assert len(self.running) == 1 or len(self.running) <= most
                case Refused(instruction=instruction):
                    assert instruction not in self.answers
                    self.answers[instruction] = "refused"
                case Drop(keys=keys):
                    assert self.here >= set(keys)
                    self.here.difference_update(keys)
                case Stop(instruction=instruction):
                    assert instruction in self.running

    def finish(self) -> None:
        """The first task that runs has computed."""
        task = self.running.pop(next(iter(self.running)))
        self.delivering.append(task.instruction)
        # Before the effects: the next task may start on what this one made.
        if not self.queue.stale(task.task.job, task.task.epoch):
            self.here.add(task.task)
        self.settling.append(task.instruction)
        self.follow(self.queue.computed(task.instruction, ["t1"]))

    def deliver(self) -> None:
        """What the oldest computed task took has a place of its own; then, it has handed its
        outputs on."""
        if self.settling:
            self.follow(self.queue.settled(self.settling.pop()))
            return
        instruction = self.delivering.pop(0)
        assert instruction not in self.answers
        self.answers[instruction] = "executed"
        self.follow(self.queue.delivered(instruction))

    def act(self, action: str, item: int, producer: int) -> None:
        """One thing that can happen; nothing where it cannot happen now."""
        match action:
            case "submit":
                self.submitted += 1
                batch = 1 + self.submitted % 4
                task = assignment(self.submitted, item, producer - 1, epoch=self.epoch, batch=batch)
                self.follow(self.queue.submit(task))
            case "arrive":
                key = sent(item, producer - 1, self.epoch)
                self.here.add(key)
                self.follow(self.queue.arrive(NOW, key, [f"t{producer - 1}"]))
            case "finish" if self.running:
                self.finish()
            case "put back" if len(self.running) > 1:
                back = [*self.running][1 - producer :]
                for instruction in back:
                    del self.running[instruction]
                self.follow(self.queue.put_back(back, alone=producer == 1))
            case "deliver" if self.delivering:
                self.deliver()
            case "cancel":
                self.follow(self.queue.cancel(item))
            case "release":
                self.follow(self.queue.release([made(item, epoch=self.epoch)]))
            case "epoch":
                self.epoch += 1
                self.follow(self.queue.void("j", self.epoch))


@settings(max_examples=300, deadline=None)
@given(actions)
def test_every_task_is_answered_exactly_once_and_starts_only_with_all_its_inputs(
    history: list[tuple[str, int, int]],
) -> None:
    device = Device()
    for action, item, producer in history:
        device.act(action, item, producer)
    for instruction in range(1, device.submitted + 1):
        device.follow(device.queue.cancel(instruction))
    while device.running or device.delivering:
        if device.running:
            device.finish()
        else:
            device.deliver()
    assert sorted(device.answers) == list(range(1, device.submitted + 1))
    assert device.queue.idle
    assert device.queue.queued == 0
