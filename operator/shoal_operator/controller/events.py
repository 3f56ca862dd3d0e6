"""Events on our objects.

The Event's name says what it says, so that what another operator has told is not told again. A
decision tells the same at each look as long as it stands; that is news when it comes, and again
when it had gone.
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
from shoal_operator.reconcile.decision import Note
from shoal_operator.reconcile.names import MANAGER

logger = logging.getLogger(__name__)

MAX_MESSAGE: Final = 1024
MAX_TOLD: Final = 16_384
_MAX_NAME: Final = 253


class Story:
    """What was told of each object, by uid, and what of that stands still."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, None] = OrderedDict()
        self._standing: OrderedDict[str, frozenset[str]] = OrderedDict()

    def news(self, uid: str, notes: Sequence[Note], now: str) -> list[tuple[str, Note]]:
        """The notes that are to be told now, each with the mark that names it."""
        standing = self._standing.get(uid, frozenset())
        marked = [(_mark(uid, note.reason, note.message, note.since), note) for note in notes]
        self._standing[uid] = frozenset(mark for mark, _ in marked)
        self._standing.move_to_end(uid)
        found = [
            (_mark(mark, now) if mark in self._told else mark, note)
            for mark, note in marked
            if mark not in standing and not (note.since and mark in self._told)
        ]
        for mark, _ in marked:
            self._told[mark] = None
            self._told.move_to_end(mark)
        for memory in (self._told, self._standing):
            while len(memory) > MAX_TOLD:
                memory.popitem(last=False)
        return found

    def lost(self, uid: str, mark: str) -> None:
        """What was told has not arrived; if it stands, it is news at the next look."""
        self._told.pop(mark, None)
        self._standing.pop(uid, None)


class Events:
    """Posts Events; they never keep a decision from being done."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._story = Story()

    async def tell(self, identity: Identity, notes: Sequence[Note]) -> None:
        """Post what is news."""
        for mark, note in self._story.news(identity.uid, notes, now_text()):
            try:
                await self._api.create(_event(identity, note, mark))
            except (Conflict, NotFound):
                pass  # It was told already; or there is no object any more that it could be about.
            except ApiError as error:
                logger.warning("%s/%s: %s", identity.namespace, identity.name, error)
                self._story.lost(identity.uid, mark)


def _mark(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _event(identity: Identity, note: Note, mark: str) -> dict[str, object]:
    message = note.message
    if len(message) > MAX_MESSAGE:
        message = f"{message[: MAX_MESSAGE - 3]}..."
    now = now_text()
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{identity.name[: _MAX_NAME - 17]}.{mark}",
            "namespace": identity.namespace,
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": identity.kind,
            "namespace": identity.namespace,
            "name": identity.name,
            "uid": identity.uid,
            "resourceVersion": str(identity.version),
        },
        "reason": note.reason,
        "message": message,
        "type": "Warning" if note.warning else "Normal",
        "source": {"component": MANAGER},
        "reportingComponent": MANAGER,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
