"""The coordinators of all pools: polled every two seconds, and called.

One channel and one task per pool. A pool without work is polled less often; a coordinator that does
not answer twice in a row is `Unreachable`. A call's answer is in the view at once, so that the next
decision knows what the last one did; a poll that was in progress meanwhile does not overwrite it.

A thousand running jobs report their progress in turns, some at each poll: what a person sees may be
a minute old then, but the API server does not write all of them every two seconds. The start and
the end of a run are reported at once.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, assert_never

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
from shoal_protocol.choices import Mode, Policy
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 2.0
IDLE_SECONDS: Final = 10.0
POLL_TIMEOUT_SECONDS: Final = 5.0
MIN_PAUSE_SECONDS: Final = 0.5
"""Between two polls, even when many calls wake the task."""
CALL_SECONDS: Final = 15.0
PROGRESS_AT_ONCE: Final = 40
"""Runs whose progress is reported at one poll."""
REDIAL_SECONDS: Final = 30.0
"""A coordinator that has not answered for so long is dialled with fresh credentials."""
_UNKNOWN: Final = Unreachable(reason="it was not polled yet")

_MODES: Final = {Mode.STREAMING: pb.Mode.STREAMING, Mode.BARRIER: pb.Mode.BARRIER}
_POLICIES: Final = {
    Policy.FIFO: pb.Policy.FIFO,
    Policy.LEAST_LOADED: pb.Policy.LEAST_LOADED,
    Policy.EDAS: pb.Policy.EDAS,
    Policy.ARAS: pb.Policy.ARAS,
    Policy.MABAC: pb.Policy.MABAC,
}
_REFUSALS: Final = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS})

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


class _Refused(CallFailed):
    """Asking again would bring the same answer."""


class _Missing(CallFailed):
    """The coordinator does not know what the call is about."""


@dataclass(slots=True)
class _Connection:
    """The connection to one coordinator. `called_jobs`: those with a call since the last poll
    began; `pending_progress`: runs whose progress waits for its turn; `wake`: starts a poll early;
    `polled`: it has answered or failed to.
    """

    namespace: str
    pool: str
    target: str
    view: View = _UNKNOWN
    refusals: dict[str, Refusal] = field(default_factory=dict)
    channel: grpc.aio.Channel | None = None
    stub: Any = None
    failures: int = 0
    answered_at: float = 0.0
    called_jobs: set[str] = field(default_factory=set)
    pending_progress: dict[Topic, None] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    polled: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Coordinators:
    """`has_work` says whether a pool (namespace, name) is to be polled often; `changed` is called
    with the topics of what changed.
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
        self._connections: dict[tuple[str, str], _Connection] = {}

    def view(self, namespace: str, pool: str) -> View:
        """What the coordinator said last."""
        connection = self._connections.get((namespace, pool))
        return _UNKNOWN if connection is None else connection.view

    def refusal(self, namespace: str, pool: str, job: str) -> Refusal | None:
        """The coordinator's last refusal of a job."""
        connection = self._connections.get((namespace, pool))
        return None if connection is None else connection.refusals.get(job)

    def follow(self, namespace: str, pool: str, target: str) -> None:
        """Poll a pool's coordinator at this target from now on."""
        connection = self._connections.get((namespace, pool))
        if connection is not None and connection.target == target:
            return
        self.leave(namespace, pool)
        connection = _Connection(namespace, pool, target)
        connection.task = asyncio.create_task(
            self._keep_polling(connection), name=f"coordinator of {pool}"
        )
        self._connections[namespace, pool] = connection

    def leave(self, namespace: str, pool: str) -> None:
        """The pool is gone."""
        connection = self._connections.pop((namespace, pool), None)
        if connection is not None and connection.task is not None:
            connection.task.cancel()

    async def close(self) -> None:
        """Close all connections."""
        tasks = [
            connection.task
            for connection in self._connections.values()
            if connection.task is not None
        ]
        for namespace, pool in tuple(self._connections):
            self.leave(namespace, pool)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def all_polled(self, seconds: float) -> None:
        """Wait until every coordinator has answered or failed to once, but not longer than this.

        A new leader knows nothing yet, and must not report that as a change.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for connection in tuple(self._connections.values()):
                    await connection.polled.wait()

    async def call(self, namespace: str, call: CoordinatorCall) -> None:
        """Call a coordinator. A refusal is remembered; raises `CallFailed` for other failures."""
        connection = self._connections.get((namespace, call.pool))
        if connection is None or connection.stub is None:
            raise CallFailed(call.pool, type(call).__name__, "it cannot be reached yet")
        match call:
            case SubmitJob():
                run = await self._submit(connection, call)
            case CancelJob():
                run = await self._cancel(connection, call)
            case RemoveJob():
                await self._ask(connection, "RemoveJob", pb.RemoveJobRequest(name=call.job))
                run = None
            case _:
                assert_never(call)
        connection.called_jobs.add(call.job)
        self._update_run(connection, call.job, run)
        connection.wake.set()

    async def _submit(self, connection: _Connection, call: SubmitJob) -> Run | None:
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
            answer: pb.JobStatus = await self._ask(connection, "SubmitJob", request)
        except _Refused as error:
            refusal = Refusal(plan=call.plan, terms=call.terms, message=error.reason)
            if connection.refusals.get(call.job) != refusal:
                connection.refusals[call.job] = refusal
                self._changed(
                    frozenset({run_topic(connection.namespace, connection.pool, call.job)})
                )
            return self._known(connection, call.job)
        connection.refusals.pop(call.job, None)
        return run_of(answer)

    async def _cancel(self, connection: _Connection, call: CancelJob) -> Run | None:
        request = pb.CancelJobRequest(name=call.job, reason=call.reason)
        try:
            answer: pb.JobStatus = await self._ask(connection, "CancelJob", request)
        except _Missing:
            return None
        return run_of(answer)

    def _known(self, connection: _Connection, job: str) -> Run | None:
        return (
            connection.view.runs.get(job) if isinstance(connection.view, CoordinatorView) else None
        )

    def _update_run(self, connection: _Connection, job: str, run: Run | None) -> None:
        """Show in the view what a call has answered."""
        if not isinstance(connection.view, CoordinatorView):
            return
        runs = dict(connection.view.runs)
        before = runs.pop(job, None)
        if run is None:
            connection.refusals.pop(job, None)
        else:
            runs[job] = run
        connection.view = replace(connection.view, runs=MappingProxyType(runs))
        # Only this run has changed; to compare all of them for each call would be their square.
        changed = frozenset(
            run_differences(connection.namespace, connection.pool, job, before, run)
        )
        if changed:
            self._changed(changed)

    def _publish(self, connection: _Connection, view: View) -> None:
        before, connection.view = connection.view, view
        if isinstance(view, Unreachable):
            connection.refusals.clear()  # The one that comes back may be of another version.
        changed = differences(connection.namespace, connection.pool, before, view)
        for each in progress(connection.namespace, connection.pool, before, view):
            connection.pending_progress[each] = None
        now = set(changed - connection.pending_progress.keys())
        for each in tuple(connection.pending_progress)[:PROGRESS_AT_ONCE]:
            del connection.pending_progress[each]
            now.add(each)
        if now:
            self._changed(frozenset(now))

    async def _keep_polling(self, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        connection.answered_at = loop.time()
        try:
            while True:
                connection.wake.clear()
                connection.called_jobs.clear()
                try:
                    view: View = _with_calls(
                        await self._poll(connection), connection.called_jobs, connection.view
                    )
                    connection.failures, connection.answered_at = 0, loop.time()
                except (DialRefused, CallFailed, ApiError) as error:
                    connection.failures += 1
                    view = Unreachable(reason=str(error))
                    if loop.time() - connection.answered_at > REDIAL_SECONDS:
                        await self._close(connection)
                        connection.answered_at = loop.time()
                # One failure may be a hiccup; a coordinator that was never reached is not.
                if connection.failures != 1 or isinstance(connection.view, Unreachable):
                    self._publish(connection, view)
                connection.polled.set()
                await asyncio.sleep(MIN_PAUSE_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause(connection) - MIN_PAUSE_SECONDS):
                        await connection.wake.wait()
        finally:
            connection.polled.set()
            await self._close(connection)

    def _pause(self, connection: _Connection) -> float:
        if connection.failures or self._has_work(connection.namespace, connection.pool):
            return POLL_SECONDS
        runs: Mapping[str, Run] = {}
        if isinstance(connection.view, CoordinatorView):
            runs = connection.view.runs
        busy = any(not run.state.is_over for run in runs.values())
        return POLL_SECONDS if busy else IDLE_SECONDS

    async def _poll(self, connection: _Connection) -> CoordinatorView:
        """Ask for everything; raises `CallFailed` or `DialRefused`."""
        begun = asyncio.get_running_loop().time()
        if connection.channel is None:
            connection.channel = await self._dial(
                connection.namespace, connection.pool, connection.target
            )
            # The stub is one class for synchronous and asynchronous channels.
            connection.stub = CoordinatorStub(connection.channel)
        devices: pb.ListDevicesResponse = await self._ask(
            connection, "ListDevices", pb.ListDevicesRequest(), POLL_TIMEOUT_SECONDS
        )
        fragments: pb.ListFragmentsResponse = await self._ask(
            connection, "ListFragments", pb.ListFragmentsRequest(), POLL_TIMEOUT_SECONDS
        )
        runs = await self._runs(connection)
        return CoordinatorView(
            begun=begun,
            devices=tuple(device_of(each) for each in devices.devices),
            runs=MappingProxyType({run.job: run for run in runs}),
            fragments=frozenset(fragments.digests),
        )

    async def _runs(self, connection: _Connection) -> list[Run]:
        try:
            stream = connection.stub.ListJobs(pb.ListJobsRequest(), timeout=POLL_TIMEOUT_SECONDS)
            runs = [run_of(each) async for each in stream]
        except grpc.aio.AioRpcError as error:
            raise self._failed(connection, "ListJobs", error) from error
        self._metrics.calls.labels(method="ListJobs", code="OK").inc()
        return runs

    async def _ask(
        self, connection: _Connection, method: str, request: object, seconds: float = CALL_SECONDS
    ) -> Any:
        try:
            answer = await getattr(connection.stub, method)(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise self._failed(connection, method, error) from error
        self._metrics.calls.labels(method=method, code="OK").inc()
        return answer

    def _failed(
        self, connection: _Connection, method: str, error: grpc.aio.AioRpcError
    ) -> CallFailed:
        code = error.code()
        self._metrics.calls.labels(method=method, code=code.name).inc()
        reason = error.details() or code.name
        if code in _REFUSALS:
            return _Refused(connection.pool, method, reason)
        if code is grpc.StatusCode.NOT_FOUND:
            return _Missing(connection.pool, method, reason)
        return CallFailed(connection.pool, method, f"{reason} ({connection.target})")

    async def _close(self, connection: _Connection) -> None:
        if connection.channel is not None:
            channel, connection.channel, connection.stub = connection.channel, None, None
            await channel.close(0)


def _with_calls(polled: CoordinatorView, called_jobs: Set[str], before: View) -> CoordinatorView:
    """What a poll says, but of jobs with a call meanwhile what the call says."""
    if not called_jobs or not isinstance(before, CoordinatorView):
        return polled
    runs = {job: run for job, run in polled.runs.items() if job not in called_jobs}
    runs |= {job: run for job in called_jobs if (run := before.runs.get(job)) is not None}
    return replace(polled, runs=MappingProxyType(runs))
