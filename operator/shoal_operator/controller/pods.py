"""What only pods, claims and events say: a worker's answer, why it failed, why something is not
ready.

They are not watched, but read when a decision needs it. One that waits causes no event, so an
object with such a pod or claim is requeued after `REQUEUE_SECONDS`. Why there is no pod at all (a
quota, an admission rule), only the events of a Job or a DaemonSet say.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shoal_operator.controller.api import Api, NotFound, Rejected
from shoal_operator.controller.foreign import (
    Identity,
    JobState,
    Raw,
    WorkloadState,
    identity_of,
)
from shoal_operator.controller.watches import OURS
from shoal_operator.reconcile.bounded_json import MOST_BYTES, is_bounded
from shoal_operator.reconcile.names import AGENTS, OWNER_UID
from shoal_operator.reconcile.resources import CLAIM, EVENT, POD
from shoal_operator.reconcile.snapshot import Worker, WorkerPhase, Workload
from shoal_operator.reconcile.volumes import Claim
from shoal_operator.reconcile.workers import BY_SHOAL, NO_ROOM_STATUS, REFUSED_STATUS
from shoal_protocol.units import Bytes, parse_quantity

REQUEUE_SECONDS: Final = 5.0
CLAIM_SECONDS: Final = 60.0
"""How long a bound claim is taken for what it is."""
LISTED_SECONDS: Final = 3.0
"""How long a list of pods, or of events, is taken for what there is."""
MAX_KEPT_BYTES: Final = 8 << 20
MAX_SEEN: Final = 16_384
_BOUND: Final = "Bound"
_JOB: Final = "batch.kubernetes.io/job-name"
_UNREADY: Final = "status.phase!=Running,status.phase!=Succeeded"
_USUAL: Final = frozenset({"ContainerCreating", "PodInitializing"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkerEnd:
    """What was found out about a worker that has ended; it does not change any more."""

    output: bytes | None = None
    message: str = ""
    refused: bool = False
    no_room: bool = False

    @property
    def size(self) -> int:
        return len(self.output or b"") + len(self.message)


class Pods:
    """Reads pods and their logs, each worker's end once."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._ended: OrderedDict[str, _WorkerEnd] = OrderedDict()
        self._end_seen: OrderedDict[str, float] = OrderedDict()
        self._behind_at: OrderedDict[str, float] = OrderedDict()
        self._kept_bytes = 0
        self._listing = asyncio.Lock()
        self._waiting: dict[str, tuple[float, Mapping[str, Sequence[Raw]]]] = {}
        self._warned: dict[tuple[str, str], tuple[float, Mapping[str, str]]] = {}

    async def worker(self, job: JobState, *, answers: bool = True) -> Worker:
        """A worker with what its pod says. Without `answers` nobody asks for what it has printed,
        which is two requests less for each that has ended well.
        """
        identity = job.identity
        ended, message = _WorkerEnd(), ""
        match job.phase:
            case WorkerPhase.SUCCEEDED if not answers:
                pass
            case WorkerPhase.SUCCEEDED | WorkerPhase.FAILED:
                ended = self._ended.get(identity.uid) or await self._read_end(job)
                message = ended.message
            case WorkerPhase.PENDING:
                pods = (await self._unready(identity.namespace)).get(identity.name, ())
                message = problem(pods) if pods else await self._warning(identity)
            case WorkerPhase.RUNNING:
                pass
        return Worker(
            name=identity.name,
            phase=job.phase,
            output=ended.output,
            message=message,
            refused=ended.refused,
            no_room=ended.no_room,
            ended_at=job.ended_at,
            end_seen=self._when_end_seen(job),
        )

    def _when_end_seen(self, job: JobState) -> float | None:
        if job.phase not in (WorkerPhase.SUCCEEDED, WorkerPhase.FAILED):
            return None
        seen = self._end_seen.get(job.identity.uid, asyncio.get_running_loop().time())
        _keep(self._end_seen, job.identity.uid, seen)
        return seen

    async def workload(self, state: WorkloadState) -> Workload:
        """A Deployment, with the reason when it is not ready."""
        workload, uid = state.workload, state.identity.uid
        if workload.is_behind:
            _keep(self._behind_at, uid, asyncio.get_running_loop().time())
            found = await self._pods(state.identity.namespace, state.selector)
            workload = _explained(workload, found)
        return replace(workload, behind_at=self._behind_at.get(uid))

    async def agents(self, states: Sequence[WorkloadState]) -> tuple[Workload, ...]:
        """The DaemonSets of one pool. Their pods are listed once, however many of them there are:
        each node may have one.
        """
        behind = next((state.identity for state in states if state.workload.is_behind), None)
        found: dict[str, list[Raw]] = {}
        if behind is not None:
            labels = f"{OWNER_UID}={behind.owner_uid}"
            found = await self._pods_by(AGENTS, behind.namespace, labels)
        return tuple(
            [await self._agent(each, found.get(each.identity.name, ())) for each in states]
        )

    async def _agent(self, state: WorkloadState, pods: Sequence[Raw]) -> Workload:
        workload = _explained(state.workload, pods)
        if not workload.is_behind or workload.message or len(pods) >= workload.wanted:
            return workload
        return replace(workload, message=await self._warning(state.identity))

    async def _unready(self, namespace: str) -> Mapping[str, Sequence[Raw]]:
        """The workers' pods of a namespace that neither run nor have ended well, by worker, newest
        first. A thousand workers that wait ask for them once every few seconds together.
        """
        async with self._listing:
            at, known = self._waiting.get(namespace, (-LISTED_SECONDS, {}))
            now = asyncio.get_running_loop().time()
            if now - at < LISTED_SECONDS:
                return known
            found = await self._pods_by(_JOB, namespace, f"{OURS},{_JOB}", _UNREADY)
            self._waiting[namespace] = (now, found)
            return found

    async def _warning(self, of: Identity) -> str:
        """What was last found wrong with an object that has no pods. Such warnings are asked for by
        all that wait together, as pods are.
        """
        async with self._listing:
            at, known = self._warned.get((of.namespace, of.kind), (-LISTED_SECONDS, {}))
            now = asyncio.get_running_loop().time()
            if now - at >= LISTED_SECONDS:
                fields = f"involvedObject.kind={of.kind},type=Warning"
                known = await _last_events(self._api, of.namespace, fields)
                self._warned[of.namespace, of.kind] = (now, known)
            return known.get(of.uid, "")

    async def _pods(self, namespace: str, labels: str, fields: str = "") -> list[Raw]:
        """The pods with these labels, newest first."""
        listed = self._api.list(POD, namespace, labels=labels, fields=fields)
        return sorted([Raw(each) async for each in listed], key=_made_at, reverse=True)

    async def _pods_by(
        self, label: str, namespace: str, labels: str, fields: str = ""
    ) -> dict[str, list[Raw]]:
        """Such pods by their value of one label."""
        found: dict[str, list[Raw]] = {}
        for pod in await self._pods(namespace, labels, fields):
            found.setdefault(pod.table("metadata", "labels").text(label), []).append(pod)
        return found

    async def _read_end(self, job: JobState) -> _WorkerEnd:
        identity = job.identity
        pods = await self._pods(identity.namespace, f"{_JOB}={identity.name}")
        if job.phase is WorkerPhase.SUCCEEDED:
            pods = [pod for pod in pods if pod.table("status").text("phase") == "Succeeded"]
            ended = await self._read_answer(identity.namespace, pods)
        else:
            ended = _read_failure(job, pods)
        self._ended[identity.uid] = ended
        self._kept_bytes += ended.size
        while self._kept_bytes > MAX_KEPT_BYTES and len(self._ended) > 1:
            self._kept_bytes -= self._ended.popitem(last=False)[1].size
        return ended

    async def _read_answer(self, namespace: str, pods: Sequence[Raw]) -> _WorkerEnd:
        if not pods:
            return _WorkerEnd(message="its pod is gone")
        name = pods[0].table("metadata").text("name")
        try:
            log = await self._api.log(namespace, name, limit_bytes=MOST_BYTES)
        except NotFound:
            return _WorkerEnd(message="its log is gone")
        return _WorkerEnd(output=last_answer(log))


class Claims:
    """Reads claims, a bound one for each pool now and then: it may be resized, and a pool that is
    made again has another."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._bound: dict[tuple[str, str], tuple[str, float, Claim]] = {}

    async def claim(self, namespace: str, name: str, pool: str, size: int) -> Claim | None:
        """The claim of the pool with this uid, which wants one of this size; None if it is not
        there."""
        uid, read_at, known = self._bound.get((namespace, name), ("", 0.0, None))
        now = asyncio.get_running_loop().time()
        fresh = known is not None and now - read_at < CLAIM_SECONDS and known.is_of(size)
        if fresh and uid == pool:
            return known
        document = await self._api.get(CLAIM, namespace, name)
        self._bound.pop((namespace, name), None)
        if document is None:
            return None
        raw = Raw(document)
        status, spec = raw.table("status"), raw.table("spec")
        bound = status.text("phase") == _BOUND
        # A volume may be larger than its claim.
        asked = spec.table("resources", "requests").text("storage")
        claim = Claim(
            name=name,
            bound=bound,
            size=_bytes(asked),
            capacity=_bytes(status.table("capacity").text("storage")),
            storage_class=spec.text("storageClassName") or None,
            message="" if bound else await self._problem(namespace, identity_of(document).uid),
            leaving=identity_of(document).leaving,
        )
        if bound and not claim.leaving:
            self._bound[namespace, name] = (pool, now, claim)
        return claim

    async def _problem(self, namespace: str, uid: str) -> str:
        """The last event of a claim that is not bound."""
        fields = f"involvedObject.kind=PersistentVolumeClaim,involvedObject.uid={uid}"
        return (await _last_events(self._api, namespace, fields)).get(uid, "")


async def _last_events(api: Api, namespace: str, fields: str) -> dict[str, str]:
    """What the last event of each object says, by uid."""
    try:
        events = [Raw(each) async for each in api.list(EVENT, namespace, fields=fields)]
    except Rejected:
        return {}  # A role may not allow it; only the reason is lost.
    events.sort(key=lambda event: event.text("lastTimestamp"))
    return {event.table("involvedObject").text("uid"): _reason_text(event) for event in events}


def _keep(moments: OrderedDict[str, float], uid: str, moment: float) -> None:
    """Keep a moment of an object; those of which was asked longest ago are forgotten."""
    moments[uid] = moment
    moments.move_to_end(uid)
    if len(moments) > MAX_SEEN:
        moments.popitem(last=False)


def _bytes(quantity: str) -> Bytes:
    return Bytes(int(parse_quantity(quantity)) if quantity else 0)


def _explained(workload: Workload, pods: Sequence[Raw]) -> Workload:
    """A workload that is behind, with what its pods say of that."""
    if not workload.is_behind or workload.message:
        return workload
    return replace(workload, message=problem(pods))


def problem(pods: Sequence[Raw]) -> str:
    """Why pods, newest first, do not get ready; empty where nothing is known to be wrong."""
    for pod in pods:
        why = _problem(pod)
        if why:
            return f"pod {pod.table('metadata').text('name')}: {why}"
    return ""


def _problem(pod: Raw) -> str:
    for container in _containers(pod):
        state = container.table("state")
        for ended in (container.table("lastState", "terminated"), state.table("terminated")):
            if ended.text("reason") not in ("", "Completed"):
                times = container.number("restartCount")
                return f"{_end_text(ended)}, {times} times" if times > 1 else _end_text(ended)
        if state.table("waiting").text("reason") not in ("", *_USUAL):
            return _reason_text(state.table("waiting"))
    scheduled, status = pod.condition("PodScheduled"), pod.table("status")
    if scheduled.text("status") == "False":
        return _reason_text(scheduled)
    return _reason_text(status) if status.text("phase") == "Failed" else ""


def _read_failure(job: JobState, pods: Sequence[Raw]) -> _WorkerEnd:
    """Why the newest pod that says so has ended; else what the Job controller says."""
    for pod in pods:
        for container in _containers(pod):
            ended = container.table("state", "terminated")
            if "exitCode" not in ended.value:
                continue
            status = ended.number("exitCode")
            refused, no_room = status == REFUSED_STATUS, status == NO_ROOM_STATUS
            said = _last_words(ended)
            message = said if said and (refused or no_room) else _end_text(ended)
            return _WorkerEnd(message=message, refused=refused, no_room=no_room)
        if pod.table("status").text("reason"):
            return _WorkerEnd(message=_reason_text(pod.table("status")))
    return _WorkerEnd(message=job.message)


def _reason_text(table: Raw) -> str:
    return f"{table.text('reason')}: {table.text('message')}"


def _end_text(ended: Raw) -> str:
    text = f"{ended.text('reason')} (exit status {ended.number('exitCode')})"
    said = _last_words(ended)
    return f"{text}: {said}" if said else text


def _last_words(ended: Raw) -> str:
    """The end of what a container said; where Shoal says what is wrong, not how far it was."""
    said = ended.text("message").strip()
    _, found, error = said.rpartition(f"\n{BY_SHOAL}")
    return BY_SHOAL + error if found else said


def _containers(pod: Raw) -> tuple[Raw, ...]:
    status = pod.table("status")
    return (*status.items("initContainerStatuses"), *status.items("containerStatuses"))


def _made_at(pod: Raw) -> str:
    return pod.table("metadata").text("creationTimestamp")


def last_answer(log: bytes) -> bytes | None:
    """The last line that is JSON; a pod's log mixes both of its outputs."""
    for line in reversed(log.splitlines()):
        if line.strip() and is_bounded(line):
            try:
                json.loads(line)
            except (ValueError, RecursionError):
                continue
            return line.strip()
    return None
