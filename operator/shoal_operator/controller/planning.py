"""Plans are made in a thread of their own, one after the other: the event loop does not wait.

A Placement whose plan is not made yet is not reconciled. It is enqueued again when there is a plan.

What is asked changes while it waits: with each poll, where a job runs on the devices. So

- each asker waits for its newest question only, in its place in the queue; what nobody asks any
  more is not planned;
- where there is no plan to run by, an answer is given once to a question that differs from the one
  that was asked only in what was measured meanwhile. Else nothing would be planned as long as
  measurements come faster than plans;
- a Placement without a plan goes before those that have one, and that of a job that has ended last.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Final

from shoal_operator.controller.cache import ObjectName
from shoal_operator.reconcile.planned_cuts import CutQuestion
from shoal_operator.reconcile.plans import Question as PlanQuestion
from shoal_operator.reconcile.snapshot import CutAnswer
from shoal_planner.outcome import Infeasible, Plan

REMEMBERED: Final = 128
"""Answers: a thousand jobs of one partition on one pool ask the same."""

Question = PlanQuestion | CutQuestion
Answer = Plan | Infeasible | CutAnswer


class Haste(IntEnum):
    """Who goes first."""

    UNPLANNED = 0
    """It has no plan that its job can run by."""
    PLANNED = 1
    ENDED = 2
    """No job will run by it any more."""


@dataclass(frozen=True, slots=True)
class Asker:
    """The object that a question is of, and what is called when there is an answer."""

    name: ObjectName
    haste: Haste
    when_made: Callable[[], None]


_Place = tuple[ObjectName, type[Question]]
"""An object may wait for a cut, and then for a plan."""


class Planning:
    """Answers questions. It is used from the event loop alone."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planning")
        self._answers: OrderedDict[Question, Answer | BaseException] = OrderedDict()
        self._wanted: dict[_Place, tuple[Question, Asker]] = {}
        """In the order in which their askers came."""
        self._running: Question | None = None
        self._told: dict[_Place, Asker] = {}
        """Those that asked what is being answered."""
        self._made: dict[_Place, tuple[Question, Answer]] = {}
        """Answers that their askers have not taken yet."""
        self._closed = False

    def answer(self, question: Question, asker: Asker) -> Answer | None:
        """The plan, or None while it is being made: then `when_made` is called later, once. Raises
        what planning raised; the next call tries again."""
        place = (asker.name, type(question))
        made = self._made.pop(place, None)
        found = self._answers.get(question)
        if found is not None:
            self._wanted.pop(place, None)
            self._answers.move_to_end(question)
            if isinstance(found, BaseException):
                del self._answers[question]
                raise found
            return found
        if question == self._running:
            self._wanted.pop(place, None)
            self._told[place] = asker
        else:
            self._wanted[place] = (question, asker)
            self._begin()
        waits = asker.haste is Haste.UNPLANNED
        return made[1] if waits and made is not None and question.is_like(made[0]) else None

    def forget(self, name: ObjectName) -> None:
        """An object is gone."""
        for places in (self._wanted, self._told, self._made):
            for place in [each for each in places if each[0] == name]:
                del places[place]

    def close(self) -> None:
        """Nobody waits for an answer any more."""
        self._closed = True
        self._wanted.clear()
        self._told.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        """Have the next question answered, unless one is."""
        if self._closed or self._running is not None or not self._wanted:
            return
        # The first of the most urgent ones.
        place = min(self._wanted, key=lambda each: self._wanted[each][1].haste)
        self._running = question = self._wanted[place][0]
        same = [each for each, (asked, _) in self._wanted.items() if asked == question]
        self._told = {each: self._wanted.pop(each)[1] for each in same}
        made = asyncio.get_running_loop().run_in_executor(self._thread, question.answer)
        made.add_done_callback(partial(self._answered, question))

    def _answered(self, question: Question, made: asyncio.Future[Answer]) -> None:
        told, self._told, self._running = self._told, {}, None
        if self._closed or made.cancelled():
            return
        error = made.exception()
        self._answers[question] = made.result() if error is None else error
        while len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)
        self._begin()
        for place, asker in told.items():
            if error is None:
                self._made[place] = (question, made.result())
            asker.when_made()
