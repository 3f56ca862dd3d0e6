"""Plans are made in a thread of their own, one after the other: the event loop does not wait.

A Placement whose plan is not made yet is not reconciled. It is enqueued again when there is a plan.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from shoal_operator.reconcile.planned_cuts import CutQuestion
from shoal_operator.reconcile.plans import Question as PlanQuestion
from shoal_operator.reconcile.snapshot import CutAnswer
from shoal_planner.outcome import Infeasible, Plan

REMEMBERED: Final = 128
"""Answers: a thousand jobs of one partition on one pool ask the same."""

Question = PlanQuestion | CutQuestion
Answer = Plan | Infeasible | CutAnswer


class Planning:
    """Answers questions. It is used from the event loop alone."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planning")
        self._answers: OrderedDict[Question, asyncio.Future[Answer]] = OrderedDict()
        self._waiting: dict[Question, list[Callable[[], None]]] = {}

    def answer(self, question: Question, when_made: Callable[[], None]) -> Answer | None:
        """The plan, or None while it is being made: then `when_made` is called later, once. Raises
        what planning raised; the next call tries again."""
        made = self._answers.get(question)
        if made is None:
            made = asyncio.get_running_loop().run_in_executor(self._thread, question.answer)
            self._answers[question] = made
            made.add_done_callback(partial(self._made, question))
        if not made.done():
            self._waiting.setdefault(question, []).append(when_made)
            return None
        self._answers.move_to_end(question)
        if made.exception() is not None:
            del self._answers[question]
        return made.result()

    def close(self) -> None:
        """Nobody waits for an answer any more."""
        self._waiting.clear()
        for made in self._answers.values():
            made.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _made(self, question: Question, _: asyncio.Future[Answer]) -> None:
        for when_made in self._waiting.pop(question, ()):
            when_made()
        finished = [each for each, made in self._answers.items() if made.done()]
        for each in finished[: max(0, len(finished) - REMEMBERED)]:
            del self._answers[each]
