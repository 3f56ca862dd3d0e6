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
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from types import MappingProxyType
from typing import Final, assert_never

import grpc

from shoal_operator.controller.api import ApiError
from shoal_operator.controller.cache import Topic
from shoal_operator.controller.certificates import Certificates
from shoal_operator.controller.clock import now
from shoal_operator.controller.open_calls import CoordinatorFailed, OpenCalls
from shoal_operator.controller.telemetry import OperatorMetrics
from shoal_operator.controller.views import (
    View,
    device_of,
    differences,
    placed_of,
    placed_part,
    progress,
    run_differences,
    run_of,
    run_part,
    store_of,
    topic,
)
from shoal_operator.reconcile.decision import (
    CancelJob,
    CoordinatorCall,
    PlaceFragments,
    RemoveJob,
    SubmitJob,
)
from shoal_operator.reconcile.names import authority_secret, coordinator_host
from shoal_operator.reconcile.snapshot import CoordinatorView, Placed, Refusal, Run, Unreachable
from shoal_protocol.channels import open_channel, open_secured_channel
from shoal_protocol.choices import Mode, Policy
from shoal_protocol.coordinator_client import CallFailed, CoordinatorClient
from shoal_protocol.identities import OPERATOR
from shoal_protocol.pki.authority import CertificateRefused
from shoal_protocol.v1 import coordinator_pb2 as pb

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 2.0
IDLE_SECONDS: Final = 10.0
POLL_TIMEOUT_SECONDS: Final = 5.0
MIN_PAUSE_SECONDS: Final = 0.5
"""Between two polls, even when many calls wake the task."""
PROGRESS_AT_ONCE: Final = 40
"""Runs whose progress is reported at one poll."""
REDIAL_SECONDS: Final = 30.0
"""A coordinator that has not answered for so long is dialled with fresh credentials."""
_UNKNOWN: Final = Unreachable(reason="it was not polled yet")

Dial = Callable[[str, str, str], Awaitable[grpc.aio.Channel]]
"""Namespace, pool and target to a channel; raises `DialRefused` or `ApiError`."""


class DialRefused(Exception):
    """A coordinator cannot be dialled yet: its certificates are not there."""


async def dial(
    certificates: Certificates, namespace: str, pool: str, target: str
) -> grpc.aio.Channel:
    """A channel with mutual TLS as `shoal-operator`, whose certificate is made in memory; a Unix
    socket needs none. Raises `DialRefused`, or `ApiError`.
    """
    if target.startswith("unix:"):
        return open_channel(target)
    secret = authority_secret(pool)
    authority = await certificates.authority(namespace, secret)
    if authority is None:
        raise DialRefused(f"Secret {secret} holds no authority yet")
    try:
        issued = authority.issue(OPERATOR, now())
    except CertificateRefused as error:
        raise DialRefused(f"Secret {secret}: {error}") from error
    credentials = grpc.ssl_channel_credentials(
        authority.certificate, issued.key, issued.certificate
    )
    # The Service may be reached by an address that is not in the coordinator's certificate.
    host = coordinator_host(pool, namespace)
    return open_secured_channel(target, credentials, server_name=host)


@dataclass(slots=True)
class _Coordinator:
    """One pool's coordinator: what it said last, and the task that polls it.

    `called_jobs`: those with a call since the last poll began; `pending_progress`: runs whose
    progress waits for its turn; `wake` starts a poll early; `polled`: it has answered or failed to.
    """

    pool: str
    target: str
    dial: Callable[[], Awaitable[grpc.aio.Channel]] = field(kw_only=True)
    on_call: Callable[[str, grpc.StatusCode], None] = field(kw_only=True)
    has_work: Callable[[], bool] = field(kw_only=True)
    changed: Callable[[Iterable[str]], None] = field(kw_only=True)
    view: View = field(default=_UNKNOWN, init=False)
    refusals: dict[str, Refusal] = field(default_factory=dict, init=False)
    placed: dict[str, Placed] = field(default_factory=dict, init=False)
    client: CoordinatorClient | None = field(default=None, init=False)
    polled: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _calls: OpenCalls = field(init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _failures: int = 0
    _called_jobs: set[str] = field(default_factory=set)
    _pending_progress: dict[str, None] = field(default_factory=dict)
    task: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self._calls = OpenCalls(self.pool, self.changed)
        self.task = asyncio.create_task(self._keep_polling(), name=f"coordinator of {self.pool}")

    async def call(self, client: CoordinatorClient, call: CoordinatorCall) -> None:
        part = (
            placed_part(call.placement) if isinstance(call, PlaceFragments) else run_part(call.job)
        )
        await self._calls.make(type(call).__name__, part, partial(self._make, client, call))

    async def _make(self, client: CoordinatorClient, call: CoordinatorCall) -> None:
        with self._explained():
            match call:
                case SubmitJob():
                    await self._submit(client, call)
                case CancelJob():
                    self._update_run(call.job, await self._cancel(client, call))
                case RemoveJob():
                    await client.remove(call.job)
                    self._update_run(call.job, None)
                case PlaceFragments():
                    await self._place(client, call)
                    return
                case _:
                    assert_never(call)
        self._called_jobs.add(call.job)
        self._wake.set()

    async def _place(self, client: CoordinatorClient, call: PlaceFragments) -> None:
        request = pb.PlaceFragmentsRequest(
            name=call.placement,
            partition=call.partition,
            stages=[
                pb.StagePlacement(devices=devices, granted_bytes=granted)
                for devices, granted in zip(call.stages, call.granted_bytes, strict=True)
            ],
        )
        answer = await client.place(request)
        placed = placed_of(answer) if call.stages else None
        if self.placed.get(call.placement) != placed:
            self.changed([placed_part(call.placement)])
        if placed is None:
            self.placed.pop(call.placement, None)
        else:
            self.placed[call.placement] = placed

    async def _submit(self, client: CoordinatorClient, call: SubmitJob) -> None:
        request = pb.SubmitJobRequest(
            name=call.job,
            partition=call.partition,
            stages=[
                pb.StagePlacement(
                    devices=devices, granted_bytes=granted, predicted_seconds=predicted
                )
                for devices, granted, predicted in zip_longest(
                    call.stages, call.granted_bytes, call.predicted_seconds, fillvalue=()
                )
            ],
            epoch=call.plan,
            mode=Mode(call.mode).name,
            policy=Policy(call.policy).name,
            priority=call.terms.priority,
            backoff_limit=call.backoff_limit,
            lossy=call.lossy,
            batch=call.batch,
            parallelism=call.terms.parallelism,
            active_deadline_seconds=call.terms.active_deadline_seconds,
            follow=call.follow,
            end=call.terms.end,
            retry=pb.Retry(number=call.retry, items=call.retried_items),
            final_cut=call.final_cut,
        )
        try:
            answer = await client.submit(request)
        except CallFailed as error:
            if not error.refused:
                raise
            refusal = Refusal(
                plan=call.plan,
                terms=call.terms,
                message=error.reason,
                retry=call.retry,
                other_way=error.other_way,
            )
            if self.refusals.get(call.job) != refusal:
                self.refusals[call.job] = refusal
                self.changed([run_part(call.job)])
        else:
            self.refusals.pop(call.job, None)
            self._update_run(call.job, run_of(answer))

    async def _cancel(self, client: CoordinatorClient, call: CancelJob) -> Run | None:
        try:
            return run_of(await client.cancel(call.job, call.reason))
        except CallFailed as error:
            if not error.missing:
                raise
            return None

    def _update_run(self, job: str, run: Run | None) -> None:
        """Show in the view what a call has answered."""
        if not isinstance(self.view, CoordinatorView):
            return
        runs = dict(self.view.runs)
        before = runs.pop(job, None)
        if run is None:
            self.refusals.pop(job, None)
        else:
            runs[job] = run
        self.view = replace(self.view, runs=MappingProxyType(runs))
        # Only this run has changed; to compare all of them for each call would be their square.
        self.changed(run_differences(job, before, run))

    async def _keep_polling(self) -> None:
        loop = asyncio.get_running_loop()
        answered_at = loop.time()
        try:
            while True:
                self._wake.clear()
                self._called_jobs.clear()
                try:
                    self._publish(self._with_calls(await self._poll()))
                    self._failures, answered_at = 0, loop.time()
                except Exception as error:
                    self._failed(error)
                    if loop.time() - answered_at > REDIAL_SECONDS:
                        await self._close()
                        answered_at = loop.time()
                self.polled.set()
                await self._pause()
        finally:
            self.polled.set()
            await self._close()

    def _failed(self, error: Exception) -> None:
        """A fault that nobody was prepared for is one more reason, and no end of the polls: nobody
        else would notice that.
        """
        self._failures += 1
        if isinstance(error, DialRefused | CoordinatorFailed | ApiError):
            view = Unreachable(reason=str(error))
        else:
            view = Unreachable(reason=f"a fault of the operator: {error!r}")
            if self.view != view:
                logger.error("coordinator of %s: %s", self.pool, view.reason, exc_info=error)
        # One failure may be a hiccup; a coordinator that was never reached is not.
        if self._failures != 1 or isinstance(self.view, Unreachable):
            self._publish(view)

    async def _poll(self) -> CoordinatorView:
        """Ask for everything."""
        begun = asyncio.get_running_loop().time()
        if self.client is None:
            self.client = CoordinatorClient(await self.dial(), on_call=self.on_call)
        with self._explained():
            devices = await self.client.devices(seconds=POLL_TIMEOUT_SECONDS)
            stored = await self.client.fragments(seconds=POLL_TIMEOUT_SECONDS)
            jobs = await self.client.jobs(seconds=POLL_TIMEOUT_SECONDS)
        return CoordinatorView(
            begun=begun,
            devices=tuple(map(device_of, devices)),
            runs=MappingProxyType({job.name: run_of(job) for job in jobs}),
            fragments=frozenset(stored.digests),
            store=store_of(stored),
            unsubmitted=frozenset(stored.unsubmitted),
        )

    def _with_calls(self, polled: CoordinatorView) -> CoordinatorView:
        """What a poll says, but of jobs with a call meanwhile what the call says."""
        if not self._called_jobs or not isinstance(self.view, CoordinatorView):
            return polled
        known = self.view.runs
        runs = {job: run for job, run in polled.runs.items() if job not in self._called_jobs}
        runs |= {job: known[job] for job in self._called_jobs if job in known}
        return replace(polled, runs=MappingProxyType(runs))

    def _publish(self, view: View) -> None:
        before, self.view = self.view, view
        if isinstance(view, Unreachable):
            self.placed.clear()
            self.refusals.clear()  # The one that comes back may be of another version.
        self._pending_progress |= dict.fromkeys(progress(before, view))
        urgent = differences(before, view) - self._pending_progress.keys()
        turn = tuple(self._pending_progress)[:PROGRESS_AT_ONCE]
        for part in turn:
            del self._pending_progress[part]
        self.changed(urgent.union(turn))

    async def _pause(self) -> None:
        """Wait for the next poll. That there is work now may show after it has begun."""
        loop = asyncio.get_running_loop()
        latest = loop.time() + IDLE_SECONDS
        await asyncio.sleep(MIN_PAUSE_SECONDS)
        left = POLL_SECONDS - MIN_PAUSE_SECONDS
        while not self._wake.is_set() and loop.time() < latest:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()
            if self._is_polled_often():
                return
            left = POLL_SECONDS

    def _is_polled_often(self) -> bool:
        if self._failures or self.has_work():
            return True
        runs = self.view.runs.values() if isinstance(self.view, CoordinatorView) else ()
        return any(not run.state.is_over for run in runs)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except CallFailed as error:
            reason = f"{error.reason} ({self.target})"
            raise CoordinatorFailed(self.pool, error.method, reason) from error

    async def _close(self) -> None:
        if self.client is not None:
            client, self.client = self.client, None
            await client.close()


@dataclass(slots=True)
class Coordinators:
    """`has_work` says whether a pool (namespace, name) is to be polled often; `changed` receives
    the topics of what changed.
    """

    dial: Dial
    metrics: OperatorMetrics
    has_work: Callable[[str, str], bool] = field(kw_only=True)
    changed: Callable[[Iterable[Topic]], None] = field(kw_only=True)
    _all: dict[tuple[str, str], _Coordinator] = field(default_factory=dict)

    def view(self, namespace: str, pool: str) -> View:
        """What the coordinator said last."""
        coordinator = self._all.get((namespace, pool))
        return _UNKNOWN if coordinator is None else coordinator.view

    def refusal(self, namespace: str, pool: str, job: str) -> Refusal | None:
        """The coordinator's last refusal of a job."""
        coordinator = self._all.get((namespace, pool))
        return None if coordinator is None else coordinator.refusals.get(job)

    def placed(self, namespace: str, pool: str, placement: str) -> Placed | None:
        """Where the fragments of a Placement were that the coordinator was asked about."""
        coordinator = self._all.get((namespace, pool))
        return None if coordinator is None else coordinator.placed.get(placement)

    def follow(self, namespace: str, pool: str, target: str) -> None:
        """Poll a pool's coordinator at this target from now on."""
        coordinator = self._all.get((namespace, pool))
        if coordinator is not None and coordinator.target == target:
            return
        self.leave(namespace, pool)
        self._all[namespace, pool] = _Coordinator(
            pool,
            target,
            dial=partial(self.dial, namespace, pool, target),
            on_call=self._count,
            has_work=partial(self.has_work, namespace, pool),
            changed=partial(self._report, namespace, pool),
        )

    def leave(self, namespace: str, pool: str) -> None:
        """The pool is gone."""
        coordinator = self._all.pop((namespace, pool), None)
        if coordinator is not None:
            coordinator.task.cancel()

    async def close(self) -> None:
        """Close all connections."""
        tasks = [coordinator.task for coordinator in self._all.values()]
        for namespace, pool in tuple(self._all):
            self.leave(namespace, pool)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def all_polled(self, seconds: float) -> None:
        """Wait until every coordinator has answered or failed to once, but not longer than this.

        A new leader knows nothing yet, and must not report that as a change.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for coordinator in tuple(self._all.values()):
                    await coordinator.polled.wait()

    def measure(self) -> None:
        """Bring the gauge of coordinators up to date."""
        views = [coordinator.view for coordinator in self._all.values()]
        reachable = sum(isinstance(view, CoordinatorView) for view in views)
        self.metrics.coordinators.labels(state="reachable").set(reachable)
        self.metrics.coordinators.labels(state="unreachable").set(len(views) - reachable)

    async def call(self, namespace: str, call: CoordinatorCall) -> None:
        """Call a coordinator; a refusal is remembered. Raises `CoordinatorFailed`."""
        coordinator = self._all.get((namespace, call.pool))
        if coordinator is None or coordinator.client is None:
            raise CoordinatorFailed(call.pool, type(call).__name__, "it cannot be reached yet")
        await coordinator.call(coordinator.client, call)

    def _count(self, method: str, code: grpc.StatusCode) -> None:
        self.metrics.calls.labels(method=method, code=code.name).inc()

    def _report(self, namespace: str, pool: str, parts: Iterable[str]) -> None:
        self.changed({topic(namespace, pool, part) for part in parts})
