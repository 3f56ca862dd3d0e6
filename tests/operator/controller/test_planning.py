"""Plans are made beside the event loop, each once."""

import asyncio
import threading
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from fragment_pools import MIB, device, partition, placed
from shoal_operator.controller.planning import REMEMBERED, Answer, Asker, Haste, Planning
from shoal_operator.reconcile.plans import Question, Site, Stage
from shoal_planner.goal import Goal
from shoal_planner.outcome import Plan
from shoal_protocol.choices import Objective


@dataclass(frozen=True)
class HeldQuestion:
    """A question whose answer takes as long as the test wants."""

    real: Question
    number: int = 0
    alike: str = ""
    may_end: threading.Event = field(default_factory=threading.Event, compare=False)
    asked: list[str] = field(default_factory=list, compare=False)
    fails: bool = field(default=False, compare=False)

    def answer(self) -> Answer:
        self.asked.append(threading.current_thread().name)
        assert self.may_end.wait(60)
        if self.fails:
            raise RuntimeError("no luck")
        return self.real.answer()

    def is_like(self, other: object) -> bool:
        return isinstance(other, HeldQuestion) and bool(self.alike) and self.alike == other.alike


REAL = Question(
    site=Site(document=partition([10**8], [10 * MIB]), devices=(device("a"),)),
    goal=Goal(Objective.LATENCY),
    pins=(),
)


def held(number: int = 0, *, fails: bool = False, alike: str = "") -> HeldQuestion:
    return HeldQuestion(REAL, number, alike, fails=fails)


def ask(
    planning: Planning,
    question: HeldQuestion,
    made: asyncio.Event,
    asker: str = "ocr",
    haste: Haste = Haste.PLANNED,
) -> Answer | None:
    asked = Asker(("Placement", "reading", asker), haste, made.set)
    return planning.answer(cast("Question", question), asked)


async def test_the_loop_goes_on_while_a_plan_is_made_and_all_that_wait_hear_of_it() -> None:
    planning, question = Planning(), held()
    first, second = asyncio.Event(), asyncio.Event()
    assert ask(planning, question, first) is None
    assert ask(planning, question, second, "another") is None
    await asyncio.sleep(0)
    assert not first.is_set()
    question.may_end.set()
    await first.wait()
    await second.wait()
    answer = ask(planning, question, first)
    assert isinstance(answer, Plan)
    assert placed(answer).homes() == (("a",),)
    assert len(question.asked) == 1
    assert question.asked[0] != threading.current_thread().name
    planning.close()


async def test_a_plan_that_failed_is_tried_again() -> None:
    planning, question, made = Planning(), held(fails=True), asyncio.Event()
    question.may_end.set()
    assert ask(planning, question, made) is None
    await made.wait()
    with pytest.raises(RuntimeError, match="no luck"):
        ask(planning, question, made)
    assert ask(planning, question, made) is None
    planning.close()


async def test_only_so_many_answers_are_remembered() -> None:
    planning, first = Planning(), held()
    for number in range(REMEMBERED + 2):
        question, made = first if number == 0 else held(number), asyncio.Event()
        question.may_end.set()
        assert ask(planning, question, made) is None
        await made.wait()
    assert ask(planning, first, asyncio.Event()) is None, "the oldest was forgotten"
    planning.close()


async def test_what_is_being_made_when_it_closes_disturbs_nobody() -> None:
    planning, question, made = Planning(), held(), asyncio.Event()
    assert ask(planning, question, made) is None
    planning.close()
    question.may_end.set()
    await asyncio.sleep(0)
    assert not made.is_set()


async def test_what_nobody_asks_any_more_is_not_planned() -> None:
    """While a job runs, what its devices were measured to do changes with each poll."""
    planning, first, made = Planning(), held(), asyncio.Event()
    asked = [held(number) for number in range(1, 5)]
    for question in (first, *asked):
        assert ask(planning, question, made) is None
        question.may_end.set()
    while ask(planning, asked[-1], made) is None:
        made.clear()
        await made.wait()
    assert [len(each.asked) for each in asked] == [0, 0, 0, 1]
    planning.close()


async def test_who_asks_anew_keeps_the_place_in_the_queue() -> None:
    planning, running, made = Planning(), held(), asyncio.Event()
    assert ask(planning, running, made, "running") is None
    old, new, other = held(1), held(2), held(3)
    assert ask(planning, old, made, "ocr") is None
    assert ask(planning, other, made, "other") is None
    assert ask(planning, new, made, "ocr") is None
    for each in (old, new, running):
        each.may_end.set()
    while ask(planning, new, made, "ocr") is None:
        made.clear()
        await made.wait()
    assert old.asked == []
    assert ask(planning, other, made, "other") is None
    other.may_end.set()
    planning.close()


async def test_a_placement_without_a_plan_goes_first_and_that_of_a_job_that_has_ended_last() -> (
    None
):
    planning, running, made = Planning(), held(), asyncio.Event()
    order: list[str] = []
    assert ask(planning, running, made) is None
    questions = {}
    for number, haste in enumerate((Haste.ENDED, Haste.PLANNED, Haste.UNPLANNED)):
        question = questions[haste] = replace(held(number + 1), asked=order)
        assert ask(planning, question, made, haste.name, haste) is None
    running.may_end.set()
    for haste in (Haste.UNPLANNED, Haste.PLANNED, Haste.ENDED):
        questions[haste].may_end.set()
        while ask(planning, questions[haste], made, haste.name, haste) is None:
            made.clear()
            await made.wait()
        waiting = [each for each in Haste if each > haste]
        assert all(
            ask(planning, questions[each], made, each.name, each) is None for each in waiting
        )
    planning.close()


async def test_an_answer_suits_a_question_that_differs_in_what_was_measured_meanwhile() -> None:
    """Else no plan would be made as long as measurements come faster than plans."""
    planning, made, haste = Planning(), asyncio.Event(), Haste.UNPLANNED
    asked, measured = held(1, alike="ocr"), held(2, alike="ocr")
    assert ask(planning, asked, made, haste=haste) is None
    assert ask(planning, measured, made, haste=haste) is None
    asked.may_end.set()
    await made.wait()
    again = held(3, alike="ocr")
    assert isinstance(ask(planning, again, made, haste=haste), Plan)
    assert ask(planning, again, made, haste=haste) is None, "it was given once"
    for each in (measured, again):
        each.may_end.set()
    planning.close()


async def test_an_answer_does_not_suit_another_question() -> None:
    planning, made, haste = Planning(), asyncio.Event(), Haste.UNPLANNED
    asked, other = held(1, alike="ocr"), held(2, alike="another cut")
    assert ask(planning, asked, made, haste=haste) is None
    asked.may_end.set()
    await made.wait()
    assert ask(planning, other, made, haste=haste) is None
    other.may_end.set()
    planning.close()


async def test_who_has_a_plan_to_run_by_waits_for_the_answer_to_what_it_asks_now() -> None:
    planning, made = Planning(), asyncio.Event()
    asked, measured = held(1, alike="ocr"), held(2, alike="ocr")
    assert ask(planning, asked, made) is None
    asked.may_end.set()
    await made.wait()
    assert ask(planning, measured, made) is None
    measured.may_end.set()
    planning.close()


async def test_nothing_is_planned_for_what_is_gone() -> None:
    planning, running, gone, made = Planning(), held(), held(1), asyncio.Event()
    last = held(2)
    assert ask(planning, running, made) is None
    assert ask(planning, gone, made, "gone") is None
    assert ask(planning, last, made, "last") is None
    planning.forget(("Placement", "reading", "gone"))
    for each in (running, gone, last):
        each.may_end.set()
    while ask(planning, last, made, "last") is None:
        made.clear()
        await made.wait()
    assert gone.asked == []
    planning.close()


def test_plans_for_other_measurements_are_alike_and_those_for_other_budgets_are_not() -> None:
    def on(name: str = "a", budget: int = 10 * MIB, flops: int = 10**9) -> Question:
        used = replace(device(name, budget=budget), flops_per_second=flops)
        return replace(REAL, site=replace(REAL.site, devices=(used,)))

    assert on().is_like(on(flops=2 * 10**9))
    assert not on().is_like(on(budget=9 * MIB))
    assert not on().is_like(on("b"))
    assert not on().is_like(replace(on(), previous=(Stage((0,), ("a",)),)))
