"""What the operator measures about itself, and what HTTP requests to the API server show, ours and
kopf's. No object is named in any label.

An open connection does not prove that a watch is alive: its age is counted from the API server's
last response to a watch request, or from the last event. kopf renews a watch after
`server_timeout`, so a quiet watch stays young, and a frozen one grows old.
"""

import asyncio
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

import aiohttp
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.process_collector import ProcessCollector
from yarl import URL

from shoal_api.conditions import JobWord, holds, waits_since
from shoal_api.fields import Status
from shoal_api.kinds import InferenceJob
from shoal_api.kinds.inference_job import InferenceJobStatus
from shoal_api.kinds.placement import Cost, PlacementStatus
from shoal_operator.reconcile.resources import WATCHED, Resource
from shoal_operator.reconcile.times import seconds_since
from shoal_protocol.exposition import Reading

_BY_PLURAL: Final = {each.plural: each for each in WATCHED}
_VERBS: Final = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_NAMESPACE: Final = "shoal_operator"
_ENDS: Final = ("Complete", "Failed")
_WAITING: Final = (JobWord.PENDING, JobWord.PLANNED)
_RATIOS: Final = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class OperatorMetrics:
    """All metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter = partial(Counter, namespace=_NAMESPACE, registry=self.registry)
        gauge = partial(Gauge, namespace=_NAMESPACE, registry=self.registry)
        histogram = partial(Histogram, namespace=_NAMESPACE, registry=self.registry)
        self.reconcile_seconds = histogram(
            "reconcile_seconds",
            "Time to reconcile an object, with its actions.",
            ["kind"],
            buckets=_SECONDS,
        )
        self.reconcile_failures = counter(
            "reconcile_failures", "Reconciliations that failed.", ["kind"]
        )
        self.queue_seconds = histogram(
            "queue_wait_seconds", "Time that an object waited for a worker.", buckets=_SECONDS
        )
        ended = counter("jobs_ended", "InferenceJobs that ended, by how.", ["outcome"])
        self._jobs_ended = {each: ended.labels(outcome=each.lower()) for each in _ENDS}
        self.plan_rate_ratio = histogram(
            "plan_rate_ratio",
            "Measured items per second of a Placement, as a share of the planner's prediction.",
            buckets=_RATIOS,
        )
        self.requests = counter("api_requests", "Requests to the API server.", ["verb", "code"])
        self.events = counter("watch_events", "Events of watches.", ["kind"])
        self.calls = counter("coordinator_calls", "Calls of coordinators.", ["method", "code"])
        self.queue_depth = gauge("queue_depth", "Objects that wait for a worker.")
        self.queue_waiting = gauge("queue_waiting", "Objects to be reconciled later.")
        self.workers = gauge("workers_busy", "Workers that reconcile an object.")
        self.leader = gauge("leader", "1 while this operator leads.")
        self.loop_lag = gauge("loop_lag_seconds", "How late the event loop was last.")
        self.objects = gauge("objects", "Objects by kind.", ["kind"])
        jobs = gauge("jobs", "InferenceJobs by status.", ["status"])
        self._jobs = {word: jobs.labels(status=word.value) for word in JobWord}
        text = "How long the InferenceJob has waited that has this status for longest."
        waits = gauge("longest_wait_seconds", text, ["status"])
        self._waits = {word: waits.labels(status=word.value) for word in _WAITING}
        self.coordinators = gauge("coordinators", "Coordinators of pools, by state.", ["state"])
        self.authority_expiration: float | None = None
        self.registry.register(
            Reading(
                f"{_NAMESPACE}_certificate_expiration_timestamp_seconds",
                "When the operator's own authority expires, in seconds since 1970.",
                lambda: self.authority_expiration,
            )
        )
        self.watch_age = gauge(
            "watch_age_seconds", "Since the watch of a kind was last known to be alive.", ["kind"]
        )

    def status_written(self, before: Status | None, after: Status) -> None:
        """Count what a status reports for the first time: the end of a job, a measured rate."""
        match after:
            case InferenceJobStatus():
                known = () if before is None else before.conditions
                for end in _ENDS:
                    if holds(after.conditions, end) and not holds(known, end):
                        self._jobs_ended[end].inc()
            case PlacementStatus(
                predicted=Cost(items_per_second=float(predicted)),
                measured=Cost(items_per_second=float(measured)),
            ) if predicted > 0 and getattr(before, "measured", None) != after.measured:
                self.plan_rate_ratio.observe(measured / predicted)

    def count_jobs(self, jobs: Iterable[InferenceJob], now: str) -> None:
        """All jobs that there are."""
        counts, longest = Counts[JobWord](), dict.fromkeys(_WAITING, 0.0)
        for job in jobs:
            word = _word_of(job)
            counts[word] += 1
            if word in longest:
                longest[word] = max(longest[word], _waited_seconds(job, word, now))
        for word, gauge in self._jobs.items():
            gauge.set(counts[word])
        for word, gauge in self._waits.items():
            gauge.set(longest[word])


def _word_of(job: InferenceJob) -> JobWord:
    columns = None if job.status is None else job.status.columns
    return JobWord.PENDING if columns is None or columns.status is None else columns.status


def _waited_seconds(job: InferenceJob, word: JobWord, now: str) -> float:
    """One that follows a folder to which nothing has come yet waits for nobody."""
    created = job.metadata.creation_timestamp
    if created is None or (word is JobWord.PLANNED and job.spec.inputs.follow):
        return 0.0
    conditions = () if job.status is None else job.status.conditions
    return seconds_since(waits_since(conditions, created), now)


class Telemetry:
    """What is measured about requests and watches. `clock` counts seconds and never goes back.
    `relists` has each kind that kopf has listed again.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.metrics = OperatorMetrics()
        self.relists: asyncio.Queue[Resource] = asyncio.Queue()
        self._clock = clock
        self._listed: set[tuple[Resource, str]] = set()
        self._alive_at: dict[tuple[str, str], float] = {}

    def expect_watch(self, kind: str, namespace: str) -> None:
        """A watch is about to start in a namespace ("" for all); its age counts from this call."""
        self._alive_at.setdefault((kind, namespace), self._clock())

    def renew_watch(self, kind: str, namespace: str) -> None:
        """The API server has responded to this watch."""
        for key in ((kind, namespace), (kind, "")):
            if key in self._alive_at:
                self._alive_at[key] = self._clock()

    def watch_ages(self) -> Mapping[str, float]:
        """By kind, the age of its oldest watch in seconds."""
        now, ages = self._clock(), dict[str, float]()
        for (kind, _), alive_at in tuple(self._alive_at.items()):
            ages[kind] = max(ages.get(kind, 0.0), now - alive_at)
        return ages

    def silent_namespaces(self, seconds: float) -> frozenset[str]:
        """Those of which a watch is older, where each has its own."""
        now = self._clock()
        watches = tuple(self._alive_at.items())
        return frozenset(name for (_, name), at in watches if name and now - at > seconds)

    def listed(self, resource: Resource, namespace: str) -> None:
        """kopf begins to list a kind in a namespace."""
        if (resource, namespace) in self._listed:
            self.relists.put_nowait(resource)
        self._listed.add((resource, namespace))


def make_trace(telemetry: Telemetry, *, of_kopf: bool) -> aiohttp.TraceConfig:
    """Counts a session's requests; of kopf's session it also renews ages and records relists."""
    requests = telemetry.metrics.requests

    async def ended(_: object, __: object, request: aiohttp.TraceRequestEndParams) -> None:
        resource, namespace, verb = _target(request.method, request.url)
        requests.labels(verb=verb, code=str(request.response.status)).inc()
        if not of_kopf or resource is None or request.response.status != 200:
            return
        if verb == "watch":
            telemetry.renew_watch(resource.kind, namespace)
        elif "continue" not in request.url.query:
            telemetry.listed(resource, namespace)

    async def failed(_: object, __: object, request: aiohttp.TraceRequestExceptionParams) -> None:
        requests.labels(verb=_target(request.method, request.url)[2], code="error").inc()

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(ended)
    trace.on_request_exception.append(failed)
    return trace


def _target(method: str, url: URL) -> tuple[Resource | None, str, str]:
    """The watched kind that a list or a watch is of, its namespace, and the request's verb."""
    *rest, last = url.path.strip("/").split("/")
    resource = _BY_PLURAL.get(last)
    if (
        method != "GET"
        or resource is None
        or not url.path.startswith(resource.path().rsplit("/", 1)[0])
    ):
        return None, "", _VERBS.get(method, method.lower())
    namespace = rest[-1] if len(rest) > 1 and rest[-2] == "namespaces" else ""
    return resource, namespace, "watch" if url.query.get("watch") == "true" else "list"
