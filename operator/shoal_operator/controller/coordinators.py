"""The coordinators of all pools: polled every two seconds, and called.

One channel and one task per pool. A pool without work is polled less often; one that does not
answer twice in a row is `Unreachable`. What a call answers is in the view at once, so that the next
decision knows what the last one did; a poll that was under way meanwhile does not change that job.

The progress of a thousand running jobs is reported in turns, so many at each poll: what a person
sees may be a minute old then, but the API server does not write all of them every two seconds. How
a run begins and ends is reported at once.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, assert_never

import grpc

from shoal_operator.controller.api import ApiError
from shoal_operator.controller.cache import Topic
from shoal_operator.controller.metrics import OperatorMetrics
from shoal_operator.controller.views import (
    View,
    device_of,
    differences,
    progress,
    run_differences,
    run_of,
    run_topic,
)
from shoal_operator.reconcile.decision import CancelJob, CoordinatorCall, RemoveJob, SubmitJob
from shoal_operator.reconcile.snapshot import CoordinatorView, Refusal, Run, Unreachable
from shoal_protocol import coordinator_client
from shoal_protocol.choices import Mode, Policy
from shoal_protocol.coordinator_client import CoordinatorClient
from shoal_protocol.v1 import coordinator_pb2 as pb

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 2.0
IDLE_SECONDS: Final = 10.0
LOOK_SECONDS: Final = 5.0
LEAST_SECONDS: Final = 0.5
"""Between two looks, even when many calls ask for one."""
PROGRESS_AT_ONCE: Final = 40
"""Runs whose progress is told of at one look."""
REDIAL_SECONDS: Final = 30.0
"""A coordinator that has not answered for so long is dialled with fresh credentials."""
_UNKNOWN: Final = Unreachable(reason="it was not asked yet")

_MODES: Final = {Mode.STREAMING: pb.Mode.STREAMING, Mode.BARRIER: pb.Mode.BARRIER}
_POLICIES: Final = {
    Policy.FIFO: pb.Policy.FIFO,
    Policy.LEAST_LOADED: pb.Policy.LEAST_LOADED,
    Policy.EDAS: pb.Policy.EDAS,
    Policy.ARAS: pb.Policy.ARAS,
    Policy.MABAC: pb.Policy.MABAC,
}

Dial = Callable[[str, str, str], Awaitable[grpc.aio.Channel]]
"""Namespace, pool and target to a channel; raises `DialRefused` or `ApiError`."""


class DialRefused(Exception):
    """A coordinator cannot be dialled yet: its certificates are not there."""


class CallFailed(Exception):
    """A call of a coordinator that is to be tried again: which pool, what, why."""

    def __init__(self, pool: str, method: str, reason: str) -> None:
        super().__init__(f"{method} at the coordinator of {pool}: {reason}")
        self.pool = pool
        self.method = method
        self.reason = reason


@dataclass(slots=True)
class _Line:
    """The line to one coordinator. `told`: jobs that a call was about since the last look began;
    `owed`: runs whose progress is to be told of, in turns; `asked`: it has answered or failed to.
    """

    namespace: str
    pool: str
    target: str
    view: View = _UNKNOWN
    refusals: dict[str, Refusal] = field(default_factory=dict)
    client: CoordinatorClient | None = None
    failures: int = 0
    answered_at: float = 0.0
    told: set[str] = field(default_factory=set)
    owed: dict[Topic, None] = field(default_factory=dict)
    look: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Coordinators:
    """`has_work` says whether a pool (namespace, name) is to be asked often; `changed` is told the
    topics of what changed.
    """

    def __init__(
        self,
        dial: Dial,
        metrics: OperatorMetrics,
        *,
        has_work: Callable[[str, str], bool],
        changed: Callable[[frozenset[Topic]], None],
    ) -> None:
        self._dial = dial
        self._metrics = metrics
        self._has_work = has_work
        self._changed = changed
        self._lines: dict[tuple[str, str], _Line] = {}

    def view(self, namespace: str, pool: str) -> View:
        """What the coordinator said last."""
        line = self._lines.get((namespace, pool))
        return _UNKNOWN if line is None else line.view

    def refusal(self, namespace: str, pool: str, job: str) -> Refusal | None:
        """The coordinator's last refusal of a job."""
        line = self._lines.get((namespace, pool))
        return None if line is None else line.refusals.get(job)

    def follow(self, namespace: str, pool: str, target: str) -> None:
        """Have a pool's coordinator asked at this target from now on."""
        line = self._lines.get((namespace, pool))
        if line is not None and line.target == target:
            return
        self.leave(namespace, pool)
        line = _Line(namespace, pool, target)
        line.task = asyncio.create_task(self._follow(line), name=f"coordinator of {pool}")
        self._lines[namespace, pool] = line

    def leave(self, namespace: str, pool: str) -> None:
        """The pool is gone."""
        line = self._lines.pop((namespace, pool), None)
        if line is not None and line.task is not None:
            line.task.cancel()

    async def close(self) -> None:
        """End all lines."""
        tasks = [line.task for line in self._lines.values() if line.task is not None]
        for namespace, pool in tuple(self._lines):
            self.leave(namespace, pool)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def all_asked(self, seconds: float) -> None:
        """Wait until every coordinator has answered or failed to once, but not longer than this.

        Who has just begun knows nothing, and must not tell that as if it were news.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for line in tuple(self._lines.values()):
                    await line.asked.wait()

    async def call(self, namespace: str, call: CoordinatorCall) -> None:
        """Submit, cancel or remove a job. A refusal is kept; raises `CallFailed` for the rest."""
        method = type(call).__name__
        line = self._lines.get((namespace, call.pool))
        if line is None or line.client is None:
            raise CallFailed(call.pool, method, "it cannot be reached yet")
        try:
            match call:
                case SubmitJob():
                    run = await self._submit(line, line.client, call)
                case CancelJob():
                    run = await self._cancel(line.client, call)
                case RemoveJob():
                    await line.client.remove(call.job)
                    run = None
                case _:
                    assert_never(call)
        except coordinator_client.CallFailed as error:
            raise _failed(line, error) from error
        line.told.add(call.job)
        self._note(line, call.job, run)
        line.look.set()

    async def _submit(self, line: _Line, client: CoordinatorClient, call: SubmitJob) -> Run | None:
        request = pb.SubmitJobRequest(
            name=call.job,
            partition=call.partition,
            stages=[pb.StagePlacement(devices=stage) for stage in call.stages],
            epoch=call.plan,
            mode=_MODES[Mode(call.mode)],
            policy=_POLICIES[Policy(call.policy)],
            priority=call.terms.priority,
            backoff_limit=call.backoff_limit,
            lossy=call.lossy,
            parallelism=call.terms.parallelism,
            active_deadline_seconds=call.terms.active_deadline_seconds,
        )
        try:
            answer = await client.submit(request)
        except coordinator_client.CallFailed as error:
            if not error.refused:
                raise
            refusal = Refusal(plan=call.plan, terms=call.terms, message=error.reason)
            if line.refusals.get(call.job) != refusal:
                line.refusals[call.job] = refusal
                self._changed(frozenset({run_topic(line.namespace, line.pool, call.job)}))
            return self._known(line, call.job)
        line.refusals.pop(call.job, None)
        return run_of(answer)

    async def _cancel(self, client: CoordinatorClient, call: CancelJob) -> Run | None:
        try:
            return run_of(await client.cancel(call.job, call.reason))
        except coordinator_client.CallFailed as error:
            if not error.missing:
                raise
            return None

    def _known(self, line: _Line, job: str) -> Run | None:
        return line.view.runs.get(job) if isinstance(line.view, CoordinatorView) else None

    def _note(self, line: _Line, job: str, run: Run | None) -> None:
        """Show in the view what a call has answered."""
        if not isinstance(line.view, CoordinatorView):
            return
        runs = dict(line.view.runs)
        before = runs.pop(job, None)
        if run is None:
            line.refusals.pop(job, None)
        else:
            runs[job] = run
        line.view = replace(line.view, runs=MappingProxyType(runs))
        # Only this run has changed; to compare all of them for each call would be their square.
        changed = frozenset(run_differences(line.namespace, line.pool, job, before, run))
        if changed:
            self._changed(changed)

    def _show(self, line: _Line, view: View) -> None:
        before, line.view = line.view, view
        if isinstance(view, Unreachable):
            line.refusals.clear()  # The one that comes back may be of another version.
        changed = differences(line.namespace, line.pool, before, view)
        for each in progress(line.namespace, line.pool, before, view):
            line.owed[each] = None
        now = set(changed - line.owed.keys())
        for each in tuple(line.owed)[:PROGRESS_AT_ONCE]:
            del line.owed[each]
            now.add(each)
        if now:
            self._changed(frozenset(now))

    async def _follow(self, line: _Line) -> None:
        loop = asyncio.get_running_loop()
        line.answered_at = loop.time()
        try:
            while True:
                line.look.clear()
                line.told.clear()
                try:
                    view: View = _without(await self._look(line), line.told, line.view)
                    line.failures, line.answered_at = 0, loop.time()
                except (DialRefused, CallFailed, ApiError) as error:
                    line.failures += 1
                    view = Unreachable(reason=str(error))
                    if loop.time() - line.answered_at > REDIAL_SECONDS:
                        await self._hang_up(line)
                        line.answered_at = loop.time()
                # One failure may be a hiccup; a coordinator that was never reached is not.
                if line.failures != 1 or isinstance(line.view, Unreachable):
                    self._show(line, view)
                line.asked.set()
                await asyncio.sleep(LEAST_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause(line) - LEAST_SECONDS):
                        await line.look.wait()
        finally:
            line.asked.set()
            await self._hang_up(line)

    def _pause(self, line: _Line) -> float:
        if line.failures or self._has_work(line.namespace, line.pool):
            return POLL_SECONDS
        runs: Mapping[str, Run] = {}
        if isinstance(line.view, CoordinatorView):
            runs = line.view.runs
        busy = any(not run.state.is_over for run in runs.values())
        return POLL_SECONDS if busy else IDLE_SECONDS

    async def _look(self, line: _Line) -> CoordinatorView:
        """Ask for everything; raises `CallFailed` or `DialRefused`."""
        begun = asyncio.get_running_loop().time()
        if line.client is None:
            channel = await self._dial(line.namespace, line.pool, line.target)
            line.client = CoordinatorClient(channel, on_call=self._count)
        try:
            devices = await line.client.devices(seconds=LOOK_SECONDS)
            fragments = await line.client.fragments(seconds=LOOK_SECONDS)
            runs = [run_of(each) for each in await line.client.jobs(seconds=LOOK_SECONDS)]
        except coordinator_client.CallFailed as error:
            raise _failed(line, error) from error
        return CoordinatorView(
            begun=begun,
            devices=tuple(device_of(each) for each in devices),
            runs=MappingProxyType({run.job: run for run in runs}),
            fragments=frozenset(fragments),
        )

    def _count(self, method: str, code: grpc.StatusCode) -> None:
        self._metrics.calls.labels(method=method, code=code.name).inc()

    async def _hang_up(self, line: _Line) -> None:
        if line.client is not None:
            client, line.client = line.client, None
            await client.close()


def _failed(line: _Line, error: coordinator_client.CallFailed) -> CallFailed:
    return CallFailed(line.pool, error.method, f"{error.reason} ({line.target})")


def _without(look: CoordinatorView, told: Set[str], before: View) -> CoordinatorView:
    """What a look says, but of jobs that a call was about meanwhile: those are as the call says."""
    if not told or not isinstance(before, CoordinatorView):
        return look
    runs = {job: run for job, run in look.runs.items() if job not in told}
    runs |= {job: run for job in told if (run := before.runs.get(job)) is not None}
    return replace(look, runs=MappingProxyType(runs))
