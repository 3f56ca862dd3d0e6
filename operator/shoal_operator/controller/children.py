"""Children applied and removed, each only when there is something to do.

A child carries the digest of the manifest that made it (`shoal.dev/applied`), so that defaults
which the API server fills in are no difference. Of watched kinds the cache says what is there: when
one is first seen its spec must include what the manifest says (`matches`), and from then on a
generation that moved without us says that somebody has edited it. Others are looked at when they
are wanted again, each at most every `LOOK_SECONDS`: what is gone, or of a version that is not ours,
is applied. To watch them would bring the documents of all Partitions into memory. What was edited
while no operator ran is found by applying all anew every `REPAIR_SECONDS`, which changes nothing
when nothing has changed.

A `batch/v1` Job is made and never changed: its template cannot be. So one that was made for an
object of the same name that is gone is waited for, until Kubernetes has collected it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from shoal_api.kinds import KINDS
from shoal_api.schema import API_VERSION, parse
from shoal_operator.controller.api import Api, ApplyConflict, Conflict, Json
from shoal_operator.controller.cache import Cache, Own, State, Topic, reduce
from shoal_operator.controller.foreign import APPLIED, Identity, Raw, WorkloadState, identity_of
from shoal_operator.reconcile.decision import Manifest, ObjectKey
from shoal_operator.reconcile.names import MANAGED_BY, MANAGER
from shoal_operator.reconcile.resources import JOB, WATCHED, key_of, resource_for

REPAIR_SECONDS: Final = 600.0
LOOK_SECONDS: Final = 20.0
"""Less than what a pool waits before it is reconciled again."""
_WATCHED: Final = frozenset((each.api_version, each.kind) for each in WATCHED)


class NameTaken(Exception):
    """A child's name belongs to an object that the operator has not made."""

    def __init__(self, key: ObjectKey) -> None:
        super().__init__(
            f"{key.kind} {key.namespace}/{key.name} is there already and not of Shoal; "
            f"delete it or rename this object"
        )
        self.key = key


class StillThere(Conflict):
    """What is to be made anew is on its way out, and gone soon."""

    def __init__(self, key: ObjectKey) -> None:
        asked = f"apply {key.kind} {key.namespace}/{key.name}"
        super().__init__(asked, 409, "AlreadyExists", "the one before is still being removed")


@dataclass(frozen=True, slots=True)
class _Applied:
    """The digest of a manifest as it was applied, the object that this made, when that was, and
    when it was last looked at."""

    digest: str
    identity: Identity
    at: float
    seen_at: float

    def is_of(self, identity: Identity, *, watched: bool) -> bool:
        """Whether nobody has edited the object since. Of what is not watched not every kind counts
        generations; its version moves with its status as well, which costs one request."""
        before, now = self.identity, identity
        if watched:
            return (before.uid, before.generation) == (now.uid, now.generation)
        return (before.uid, before.version) == (now.uid, now.version)


@dataclass(slots=True)
class Children:
    """`clock` counts seconds; `changed` is called with children that are not watched."""

    api: Api
    cache: Cache
    clock: Callable[[], float]
    changed: Callable[[tuple[Topic, ...]], None]
    _applied: dict[ObjectKey, _Applied] = field(default_factory=dict)
    _removed: dict[ObjectKey, float] = field(default_factory=dict)

    async def apply(self, manifest: Manifest, owner: Identity, *, take_over: bool = False) -> bool:
        """Have a child be as the manifest says; whether something was written. `take_over`: even
        if somebody else has made it. Raises `NameTaken`, `StillThere` or another `ApiError`.
        """
        key = key_of(manifest)
        full, digest = _complete(manifest, owner)
        if not take_over and await self._is_current(key, full, digest):
            return False
        # What the cache does not know, because it is not labelled as ours, may be somebody else's.
        unknown = _is_watched(key) and self._find(key) is None
        try:
            answer = await self.api.apply(full, force=not unknown)
        except ApplyConflict as error:
            raise NameTaken(key) from error
        identity = identity_of(answer)
        if identity.leaving:
            # What is being deleted is made anew once it is gone, which only a watch would tell.
            if _is_watched(key):
                return False
            raise StillThere(key)
        self._remember(key, digest, identity)
        self._removed.pop(key, None)
        if _is_watched(key):
            self.cache.put(reduce({"apiVersion": key.api_version, "kind": key.kind, **answer}))
        else:
            self.changed(((key.kind, key.namespace, key.name),))
        return True

    async def remove(self, key: ObjectKey) -> bool:
        """Delete a child, if there is one; whether there was. An object that is not of Shoal stays.
        Raises `ApiError`.
        """
        removed_at = self._removed.get(key, -REPAIR_SECONDS)
        if not _is_watched(key) and self.clock() - removed_at < REPAIR_SECONDS:
            return False
        identity = await self._look_up(key)
        self._applied.pop(key, None)
        self._removed[key] = self.clock()
        if identity is None or not identity.shoal_owner:
            return False
        return await self.api.delete(key, uid=identity.uid)

    def expire(self) -> None:
        """Forget watched children that are gone, and others after a while."""
        oldest = self.clock() - REPAIR_SECONDS
        self._removed = {key: at for key, at in self._removed.items() if at >= oldest}
        self._applied = {
            key: applied
            for key, applied in self._applied.items()
            if (self._find(key) if _is_watched(key) else applied.at >= oldest - REPAIR_SECONDS)
        }

    def _remember(self, key: ObjectKey, digest: str, identity: Identity) -> None:
        self._applied[key] = _Applied(digest, identity, self.clock(), self.clock())

    def _find(self, key: ObjectKey) -> State | None:
        return self.cache.state(key.kind, key.namespace, key.name)

    async def _look_up(self, key: ObjectKey) -> Identity | None:
        if _is_watched(key):
            state = self._find(key)
            return None if state is None else state.identity
        document = await self.api.get(resource_for(key), key.namespace, key.name)
        return None if document is None else identity_of(document)

    async def _is_current(self, key: ObjectKey, manifest: Manifest, digest: str) -> bool:
        """Whether a child is as its whole manifest says. Raises as `apply` does."""
        known, watched, now = self._applied.get(key), _is_watched(key), self.clock()
        if known is not None and not watched:
            if known.digest != digest or now - known.at > REPAIR_SECONDS:
                return False
            if now - known.seen_at < LOOK_SECONDS:
                return True
            known = self._applied[key] = replace(known, seen_at=now)
        identity = await self._look_up(key)
        if identity is None:
            return False
        if not identity.shoal_owner:
            raise NameTaken(key)
        if key.kind == JOB.kind:
            if identity.shoal_owner != identity_of(manifest).shoal_owner:
                raise StillThere(key)
            return True
        if known is not None:
            return identity.applied == digest and known.is_of(identity, watched=watched)
        state = self._find(key)
        current = identity.applied == digest and (state is None or matches(manifest, state))
        if current:
            self._remember(key, digest, identity)
        return current


def _complete(manifest: Manifest, owner: Identity) -> tuple[Json, str]:
    """The manifest with its owner, label and digest."""
    metadata = Raw(manifest).table("metadata")
    reference = {
        "apiVersion": API_VERSION,
        "kind": owner.kind,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
    }
    whole = {
        **metadata.value,
        "ownerReferences": metadata.value.get("ownerReferences") or [reference],
        "labels": {**metadata.table("labels").value, MANAGED_BY: MANAGER},
    }
    text = json.dumps({**manifest, "metadata": whole}, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    whole["annotations"] = {**metadata.table("annotations").value, APPLIED: digest}
    return {**manifest, "metadata": whole}, digest


def matches(manifest: Manifest, state: State) -> bool:
    """Whether a watched object's spec is still as in its manifest."""
    match state:
        case WorkloadState(spec=spec):
            return includes(json.loads(spec), manifest.get("spec"))
        case Own(value=value) if value is not None:
            wanted = parse(KINDS[state.identity.kind].cls, manifest)
            return not isinstance(wanted, tuple) and wanted.spec == value.spec
        case _:
            return False


def includes(there: object, wanted: object) -> bool:
    """Whether JSON includes all that is wanted. The API server leaves out what is empty, 0 or
    false.
    """
    match wanted:
        case Mapping():
            table: Mapping[object, object] = there if isinstance(there, Mapping) else {}
            return all(includes(table.get(name), value) for name, value in wanted.items())
        case list():
            items = there if isinstance(there, list) else []
            same = len(items) == len(wanted)
            return same and all(
                includes(item, each) for item, each in zip(items, wanted, strict=True)
            )
        case _:
            return there == wanted or (there is None and not wanted)


def _is_watched(key: ObjectKey) -> bool:
    return (key.api_version, key.kind) in _WATCHED
