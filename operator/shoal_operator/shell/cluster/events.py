"""Events on our objects. What was told is told once: the Event's name says what it says."""

import hashlib
from collections import OrderedDict
from typing import Final

from shoal_operator.api.schema import API_VERSION
from shoal_operator.reconcile.decision import Note
from shoal_operator.shell.cluster.api import FIELD_MANAGER, Api, Conflict
from shoal_operator.shell.cluster.clock import now_text
from shoal_operator.shell.cluster.foreign import Identity

MAX_MESSAGE: Final = 1024
MAX_TOLD: Final = 16_384
_MAX_NAME: Final = 253


class Events:
    """Posts Events; `told` remembers which, so that the API server is not asked again and again."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._told: OrderedDict[bytes, None] = OrderedDict()

    async def tell(self, identity: Identity, note: Note) -> bool:
        """Post a note, unless it was told already; whether it was posted now."""
        text = "\0".join((identity.uid, note.reason, note.message))
        mark = hashlib.sha256(text.encode()).digest()[:8]
        if mark in self._told:
            self._told.move_to_end(mark)
            return False
        try:
            await self._api.create(_event(identity, note, mark.hex()))
            posted = True
        except Conflict:
            posted = False
        self._told[mark] = None
        if len(self._told) > MAX_TOLD:
            self._told.popitem(last=False)
        return posted


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
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
