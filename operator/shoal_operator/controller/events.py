"""Events on our objects.

The Event's name is a digest of its content, so that an operator does not repeat what another one
has posted. A decision has a note as long as it is true; it is posted when it becomes true, and
again when that happens again. What happens again and again to one object is posted `BURST` times,
and then once in `REFILL_SECONDS`, as Kubernetes' own client has it.
"""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from shoal_api.schema import API_VERSION
from shoal_operator.controller.api import Api, ApiError, Conflict, NotFound
from shoal_operator.controller.clock import now_text
from shoal_operator.controller.foreign import Identity
from shoal_operator.reconcile.conditions import shortened
from shoal_operator.reconcile.decision import Note
from shoal_operator.reconcile.names import MANAGER
from shoal_operator.reconcile.resources import EVENT
from shoal_operator.reconcile.times import instant

logger = logging.getLogger(__name__)

BURST: Final = 25
REFILL_SECONDS: Final = 300
MAX_MESSAGE: Final = 1024
MAX_REMEMBERED: Final = 16_384
_MAX_NAME: Final = 253


class NoteHistory:
    """The notes that were posted about each object, by uid, and those that are still true."""

    def __init__(self) -> None:
        self._posted: OrderedDict[str, None] = OrderedDict()
        self._current: OrderedDict[str, frozenset[str]] = OrderedDict()
        self._full_at: OrderedDict[str, float] = OrderedDict()
        """When an object has its whole burst again, in seconds since 1970."""

    def new(self, uid: str, notes: Sequence[Note], now: str) -> list[tuple[str, Note]]:
        """The notes to post now, each with the key that names its Event."""
        current = self._current.get(uid, frozenset())
        keyed = [(_key(uid, note.reason, note.message, note.since), note) for note in notes]
        self._current[uid] = frozenset(key for key, _ in keyed)
        self._current.move_to_end(uid)
        found = [
            (_key(key, now) if key in self._posted else key, note)
            for key, note in keyed
            if key not in current and not (note.since and key in self._posted)
        ]
        for key, _ in keyed:
            self._posted[key] = None
            self._posted.move_to_end(key)
        admitted = [each for each in found if self._admit(uid, instant(now))]
        for memory in (self._posted, self._current, self._full_at):
            while len(memory) > MAX_REMEMBERED:
                memory.popitem(last=False)
        return admitted

    def _admit(self, uid: str, now: float) -> bool:
        """Whether one more may be posted about an object."""
        full_at = max(now, self._full_at.pop(uid, now))
        admitted = full_at - now <= (BURST - 1) * REFILL_SECONDS
        self._full_at[uid] = full_at + admitted * REFILL_SECONDS
        return admitted

    def forget(self, uid: str, key: str) -> None:
        """A note was not posted: if it is still true at the next reconciliation, it is new."""
        self._posted.pop(key, None)
        self._current.pop(uid, None)


class Events:
    """Posts Events; a failure does not stop a decision."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._history = NoteHistory()

    async def post(self, identity: Identity, notes: Sequence[Note]) -> None:
        """Post the notes that are new."""
        for key, note in self._history.new(identity.uid, notes, now_text()):
            try:
                await self._api.create(_event(identity, note, key))
            except (Conflict, NotFound):
                pass  # It was posted already, or the object is gone.
            except ApiError as error:
                logger.warning("%s/%s: %s", identity.namespace, identity.name, error)
                self._history.forget(identity.uid, key)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _event(identity: Identity, note: Note, key: str) -> dict[str, object]:
    now = now_text()
    return EVENT.manifest(
        {
            "name": f"{identity.name[: _MAX_NAME - 17]}.{key}",
            "namespace": identity.namespace,
        },
        involvedObject={
            "apiVersion": API_VERSION,
            "kind": identity.kind,
            "namespace": identity.namespace,
            "name": identity.name,
            "uid": identity.uid,
            "resourceVersion": str(identity.version),
        },
        reason=note.reason,
        message=shortened(note.message, MAX_MESSAGE),
        type="Warning" if note.warning else "Normal",
        source={"component": MANAGER},
        reportingComponent=MANAGER,
        firstTimestamp=now,
        lastTimestamp=now,
        count=1,
    )
