"""Plans are made beside the event loop, each once."""

import asyncio
import threading
from dataclasses import dataclass, field
from typing import cast

import pytest

from fragment_pools import MIB, device, partition, placed
from shoal_operator.controller.planning import REMEMBERED, Answer, Planning
from shoal_operator.reconcile.plans import Question, Site
from shoal_planner.goal import Goal
from shoal_planner.outcome import Plan
from shoal_protocol.choices import Objective


@dataclass(frozen=True)
class HeldQuestion:
    """A question whose answer takes as long as the test wants."""

    real: Question
    number: int = 0
    may_end: threading.Event = field(default_factory=threading.Event, compare=False)
    asked: list[str] = field(default_factory=list, compare=False)
    fails: bool = field(default=False, compare=False)

    def answer(self) -> Answer:
        self.asked.append(threading.current_thread().name)
        assert self.may_end.wait(60)
        if self.fails:
            raise RuntimeError("no luck")
        return self.real.answer()


REAL = Question(
    site=Site(document=partition([10**8], [10 * MIB]), devices=(device("a"),)),
    goal=Goal(Objective.LATENCY),
    pins=(),
)


def held(number: int = 0, *, fails: bool = False) -> HeldQuestion:
    return HeldQuestion(REAL, number, fails=fails)


def ask(planning: Planning, question: HeldQuestion, made: asyncio.Event) -> Answer | None:
    return planning.answer(cast("Question", question), made.set)


async def test_the_loop_goes_on_while_a_plan_is_made_and_all_that_wait_hear_of_it() -> None:
    planning, question = Planning(), held()
    first, second = asyncio.Event(), asyncio.Event()
    assert ask(planning, question, first) is None
    assert ask(planning, question, second) is None
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
