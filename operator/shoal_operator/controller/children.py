"""Children applied and removed, each only when there is something to do.

A child carries the digest of the manifest that made it (`shoal.dev/applied`), so that defaults
which the API server fills in are no difference. Of watched kinds the cache says what is there: when
one is first seen its spec is compared with the manifest, and from then on a generation that moved
without us says that somebody has edited it. Others are read once, then applied anew every
`REPAIR_SECONDS`, which changes nothing when nothing has changed.

A `batch/v1` Job is made and never changed: its template cannot be.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from shoal_api.schema import API_VERSION
from shoal_operator.controller.api import Api, ApplyConflict, Json, key_of_manifest
from shoal_operator.controller.cache import Cache, State, Topic, reduce
from shoal_operator.controller.drift import matches
from shoal_operator.controller.foreign import APPLIED, Identity, identity_of
from shoal_operator.controller.resources import JOB, WATCHED, resource_for
from shoal_operator.reconcile.decision import Manifest, ObjectKey
from shoal_operator.reconcile.names import MANAGED_BY, MANAGER

REPAIR_SECONDS: Final = 600.0
_WATCHED: Final = frozenset((each.api_version, each.kind) for each in WATCHED)


class NameTaken(Exception):
    """A child's name belongs to an object that the operator has not made."""

    def __init__(self, key: ObjectKey) -> None:
        super().__init__(
            f"{key.kind} {key.namespace}/{key.name} is there already and not of Shoal; "
            f"delete it or rename this object"
        )
        self.key = key


@dataclass(frozen=True, slots=True)
class _Applied:
    digest: str
    generation: int
    at: float


class Children:
    """`clock` counts seconds; `changed` is called with children that are not watched."""

    def __init__(
        self,
        api: Api,
        cache: Cache,
        clock: Callable[[], float],
        changed: Callable[[tuple[Topic, ...]], None],
    ) -> None:
        self._api = api
        self._cache = cache
        self._clock = clock
        self._changed = changed
        self._applied: dict[ObjectKey, _Applied] = {}
        self._removed: dict[ObjectKey, float] = {}

    async def apply(self, manifest: Manifest, owner: Identity, *, take_over: bool = False) -> bool:
        """Have a child be as the manifest says; whether something was written. `take_over`: even
        if somebody else has made it. Raises `NameTaken` or `ApiError`.
        """
        key = key_of_manifest(manifest)
        full, digest = _complete(manifest, owner)
        if (key.api_version, key.kind) in _WATCHED:
            wanted = self._differs_from_cache(key, manifest, digest)
        else:
            wanted = take_over or await self._differs_from_last(key, digest)
        if not wanted:
            return False
        # What the cache does not know, because it is not labelled as ours, may be somebody else's.
        unknown = (key.api_version, key.kind) in _WATCHED and self._find(key) is None
        try:
            answer = await self._api.apply(full, force=not unknown)
        except ApplyConflict as error:
            raise NameTaken(key) from error
        identity = identity_of(answer)
        if identity.leaving:
            return False  # What is being deleted is made anew once it is gone.
        self._applied[key] = _Applied(digest, identity.generation, self._clock())
        self._removed.pop(key, None)
        if (key.api_version, key.kind) in _WATCHED:
            self._cache.put(reduce({"apiVersion": key.api_version, "kind": key.kind, **answer}))
        else:
            self._changed(((key.kind, key.namespace, key.name),))
        return True

    async def remove(self, key: ObjectKey) -> bool:
        """Delete a child, if there is one; whether there was. An object that is not of Shoal stays.
        Raises `ApiError`.
        """
        if (key.api_version, key.kind) in _WATCHED:
            state = self._find(key)
            identity = None if state is None else state.identity
        elif self._clock() - self._removed.get(key, -REPAIR_SECONDS) < REPAIR_SECONDS:
            return False
        else:
            document = await self._api.get(resource_for(key), key.namespace, key.name)
            identity = None if document is None else identity_of(document)
        self._applied.pop(key, None)
        self._removed[key] = self._clock()
        if identity is None or not _is_ours(identity):
            return False
        return await self._api.delete(key, uid=identity.uid)

    def forget(self, key: ObjectKey) -> None:
        """A watched child is gone."""
        self._applied.pop(key, None)

    def expire(self) -> None:
        """Drop what is remembered for too long."""
        oldest = self._clock() - REPAIR_SECONDS
        for key, removed_at in tuple(self._removed.items()):
            if removed_at < oldest:
                del self._removed[key]
        for key, applied in tuple(self._applied.items()):
            watched = (key.api_version, key.kind) in _WATCHED
            if not watched and applied.at < 2 * oldest - self._clock():
                del self._applied[key]

    def _find(self, key: ObjectKey) -> State | None:
        return self._cache.state(key.kind, key.namespace, key.name)

    def _differs_from_cache(self, key: ObjectKey, manifest: Manifest, digest: str) -> bool:
        state = self._find(key)
        if state is None:
            return True
        identity = state.identity
        if not _is_ours(identity):
            raise NameTaken(key)
        if key.kind == JOB.kind:
            return False
        known = self._applied.get(key)
        if known is None and identity.applied == digest and matches(manifest, state):
            known = _Applied(digest, identity.generation, self._clock())
            self._applied[key] = known
        return (
            known is None or identity.applied != digest or identity.generation != known.generation
        )

    async def _differs_from_last(self, key: ObjectKey, digest: str) -> bool:
        known = self._applied.get(key)
        if known is not None:
            expired = self._clock() - known.at > REPAIR_SECONDS
            return expired or known.digest != digest
        document = await self._api.get(resource_for(key), key.namespace, key.name)
        if document is None:
            return True
        identity = identity_of(document)
        if not _is_ours(identity):
            raise NameTaken(key)
        if identity.applied != digest:
            return True
        self._applied[key] = _Applied(digest, identity.generation, self._clock())
        return False


def _complete(manifest: Manifest, owner: Identity) -> tuple[Json, str]:
    """The manifest with its owner, label and digest."""
    metadata = manifest["metadata"]
    assert isinstance(metadata, Mapping), "a manifest without metadata"
    reference = {
        "apiVersion": API_VERSION,
        "kind": owner.kind,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
    }
    whole = {
        **metadata,
        "ownerReferences": metadata.get("ownerReferences") or [reference],
        "labels": {**_table(metadata, "labels"), MANAGED_BY: MANAGER},
    }
    text = json.dumps({**manifest, "metadata": whole}, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    whole["annotations"] = {**_table(metadata, "annotations"), APPLIED: digest}
    return {**manifest, "metadata": whole}, digest


def _table(metadata: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = metadata.get(name)
    return value if isinstance(value, Mapping) else {}


def _is_ours(identity: Identity) -> bool:
    return any(owner.is_shoals for owner in identity.owners)
