"""Carries out a decision: status, certificates, children, removals, calls, Events, in this order.

Every step writes only what differs, so carrying out the same decision again writes nothing. A step
that fails does not keep the others from being done, except for the status: where that is out of
date, so is the decision. What failed is raised at the end; what will fail again is remembered, so
that the next decision reports it in the object's conditions. In a namespace that is being deleted
nothing is to be done.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from shoal_api.schema import API_VERSION
from shoal_api.writing import write
from shoal_operator.controller.api import (
    Api,
    ApiError,
    Conflict,
    Gone,
    NamespaceLeaving,
    NotFound,
    Rejected,
    Unavailable,
)
from shoal_operator.controller.cache import Cache, ObjectName, Own, reduce
from shoal_operator.controller.certificates import Certificates
from shoal_operator.controller.children import Children, NameTaken
from shoal_operator.controller.clock import now_text
from shoal_operator.controller.coordinators import Coordinators
from shoal_operator.controller.events import Events
from shoal_operator.controller.foreign import Identity
from shoal_operator.controller.open_calls import CoordinatorFailed
from shoal_operator.controller.telemetry import OperatorMetrics
from shoal_operator.reconcile.deciding import APPLYING, NOT_APPLIED, refused_status
from shoal_operator.reconcile.decision import (
    Applied,
    CoordinatorCall,
    Decision,
    DeviceChild,
    Manifest,
    Note,
    ObjectKey,
    Resize,
    TellBudget,
)
from shoal_operator.reconcile.names import BUDGET
from shoal_operator.reconcile.resources import BY_KIND, POD, key_of

logger = logging.getLogger(__name__)

Failure = ApiError | CoordinatorFailed | NameTaken
_Step = tuple[str, Callable[[], Awaitable[bool]]]


class NotLeading(Exception):
    """Another operator leads: nothing may be written any more."""


@dataclass(slots=True)
class Actions:
    """Carries out decisions as long as `leads` says so."""

    api: Api
    cache: Cache
    children: Children
    certificates: Certificates
    coordinators: Coordinators
    metrics: OperatorMetrics
    leads: Callable[[], bool] = field(kw_only=True)
    _events: Events = field(init=False)
    _applied: dict[ObjectName, tuple[str, Applied]] = field(default_factory=dict)
    _not_resized: dict[str, tuple[int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._events = Events(self.api)

    def applied(self, own: Own) -> Applied | None:
        """What came of the last decision about an object; None where there was none yet."""
        uid, applied = self._applied.get(own.name, ("", None))
        return applied if uid == own.identity.uid else None

    def forget(self, name: ObjectName) -> None:
        """An object is gone."""
        uid, _ = self._applied.pop(name, ("", None))
        self._not_resized.pop(uid, None)

    async def carry_out(self, own: Own, decision: Decision) -> bool:
        """Do what was decided about an object; whether something but its status has changed.

        Raises the first `ApiError`, `CoordinatorFailed` or `NameTaken`, or `NotLeading`.
        """
        identity = own.identity
        assert own.value is not None, "a decision about an object that does not parse"
        if decision.status != own.value.status:
            identity = await self._apply_status(identity, write(decision.status))
            self.metrics.status_written(own.value.status, decision.status)
        changed, failures, refused = False, list[Failure](), list[str]()
        for what, step in self._steps(identity, decision):
            self._check()
            try:
                changed |= await step()
            except Unavailable:
                raise
            except NamespaceLeaving as error:
                logger.debug("%s/%s: %s", identity.namespace, identity.name, error)
            except (ApiError, CoordinatorFailed, NameTaken) as error:
                failures.append(error)
                if isinstance(error, Rejected | NameTaken):
                    refused.append(_refusal(what, error))
        changed |= self._remember(own, decision, tuple(refused))
        await self._events.post(identity, decision.notes)
        if decision.delete_self and not failures:
            self._check()
            key = ObjectKey(
                api_version=API_VERSION,
                kind=identity.kind,
                namespace=identity.namespace,
                name=identity.name,
            )
            version = str(identity.version)
            await self.api.delete(key, uid=identity.uid, resource_version=version)
        if failures:
            raise failures[0]
        return changed

    async def refuse(self, own: Own) -> None:
        """Say in the status of an object that does not parse what is wrong with it."""
        message = "; ".join(str(error) for error in own.errors)[:4096]
        status = refused_status(
            own.identity.kind, own.status, message, own.identity.generation, now_text()
        )
        if status is None or status == own.status:
            return
        await self._apply_status(own.identity, status)
        note = Note(reason="Invalid", message=message, warning=True)
        await self._events.post(own.identity, [note])

    def _remember(self, own: Own, decision: Decision, refused: tuple[str, ...]) -> bool:
        """Remember what was refused; whether the next decision will report something else."""
        before = self.applied(own)
        asked, why_not = self._not_resized.get(own.identity.uid, (0, ""))
        generation = own.identity.generation
        applied = Applied(
            generation=generation,
            refused=refused,
            not_resized=why_not if asked == generation else "",
        )
        self._applied[own.name] = (own.identity.uid, applied)
        reasons = {each.reason for each in decision.status.conditions}
        return applied != before and bool(refused or reasons & {APPLYING, NOT_APPLIED})

    def _check(self) -> None:
        if not self.leads():
            raise NotLeading

    def _steps(self, identity: Identity, decision: Decision) -> Iterator[_Step]:
        """What a decision asks for besides the status, in order; each with what it is about."""
        for wanted in decision.certificates:
            yield f"Secret {wanted.secret}", partial(self.certificates.want, wanted, identity)
        for child in decision.children:
            yield _named(key_of(child)), partial(self.children.apply, child, identity)
        for each in decision.devices:
            yield _named(key_of(each.device)), partial(self._device, each, identity)
        for budget in decision.budgets:
            yield f"Pod {budget.pod}", partial(self.tell, identity.namespace, budget)
        if decision.resizes:
            yield "to resize pods", partial(self._resize, identity, decision.resizes)
        for key in decision.removals:
            yield f"to delete {_named(key)}", partial(self.children.remove, key)
        for call in decision.calls:
            yield type(call).__name__, partial(self._call, identity.namespace, call)

    async def _call(self, namespace: str, call: CoordinatorCall) -> bool:
        await self.coordinators.call(namespace, call)
        return True

    async def _device(self, child: DeviceChild, owner: Identity) -> bool:
        """A Device, its status, which says nothing as long as it is the same, and its Events."""
        changed = await self.children.apply(child.device, owner)
        key = key_of(child.device)
        state = self.cache.state(key.kind, key.namespace, key.name)
        assert isinstance(state, Own), "a Device that was applied is in the cache"
        if state.value is None or state.value.status != child.status:
            await self._apply_status(state.identity, write(child.status))
            changed = True
        if child.notes:
            await self._events.post(state.identity, child.notes)
        return changed

    async def tell(self, namespace: str, budget: TellBudget) -> bool:
        """Write a budget where its agent reads it, unless somebody has written there meanwhile."""
        metadata = {
            "name": budget.pod,
            "namespace": namespace,
            "uid": budget.uid,
            "resourceVersion": budget.version,
            "annotations": {BUDGET: str(budget.budget_bytes)},
        }
        try:
            await self.api.apply(POD.manifest(metadata))
        except Conflict:
            return False  # it is read again
        return True

    async def _resize(self, owner: Identity, resizes: Sequence[Resize]) -> bool:
        """Resize pods in place, up to the first that the cluster refuses: it may be too old for
        that (Kubernetes lowers memory limits from 1.34 on).
        """
        changed, namespace, why_not = False, owner.namespace, ""
        for each in resizes:
            memory = {"memory": str(each.memory_bytes)}
            resources = {"limits": memory, "requests": memory}
            manifest = POD.manifest(
                {"name": each.pod, "namespace": namespace, "uid": each.uid},
                spec={"containers": [{"name": each.container, "resources": resources}]},
            )
            try:
                await self.api.apply(manifest, "resize")
                changed = True
            except (NotFound, Rejected) as error:
                if isinstance(error, NotFound) and each.pod in error.message:
                    continue  # it is gone
                logger.info("memory limits stay as they are: %s", error)
                why_not = error.message
                break
        said = (owner.generation, why_not)
        changed |= self._not_resized.get(owner.uid, (0, "")) != said
        self._not_resized[owner.uid] = said
        return changed

    async def _apply_status(self, identity: Identity, status: Manifest) -> Identity:
        """Apply a status to exactly the object that was read; `Conflict` if it has changed, or is
        gone."""
        self._check()
        metadata = {
            "name": identity.name,
            "namespace": identity.namespace,
            "resourceVersion": str(identity.version),
        }
        manifest = BY_KIND[identity.kind].manifest(metadata, status=status)
        try:
            answer = await self.api.apply(manifest, "status")
        except NamespaceLeaving:
            raise
        except NotFound as error:
            raise Gone(error.asked, error.status, error.reason, error.message) from error
        state = reduce(answer)
        self.cache.put(state, by_us=True)
        return state.identity


def _named(key: ObjectKey) -> str:
    return f"{key.kind} {key.name}"


def _refusal(what: str, error: Rejected | NameTaken) -> str:
    """What is in the way, and what to do."""
    if isinstance(error, NameTaken):
        return str(error)
    return f"{what} is refused: {error.message}; undo what asks for it, or allow it"
