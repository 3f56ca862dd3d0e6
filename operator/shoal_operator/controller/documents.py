"""The documents of Partitions, from their ConfigMaps.

They are large and parsed, so each content is kept once, whatever the number of Partitions that have
it, and the least used go first. A ConfigMap that has not changed is not parsed again.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from shoal_api.kinds import Partition
from shoal_operator.controller.api import Api
from shoal_operator.controller.foreign import identity_of
from shoal_operator.controller.resources import CONFIG_MAP
from shoal_operator.reconcile.names import document_name, namespace_of
from shoal_operator.reconcile.partition import read_document
from shoal_operator.reconcile.snapshot import StoredDocument

MAX_KEPT: Final = 64
MAX_KNOWN: Final = 16_384
"""Partitions of which it is remembered what they were read as; each costs some hundred bytes."""

_Digests = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """Which ConfigMap in which state a Partition's document was read from, and what that was."""

    config_map: tuple[str, int]
    document: tuple[str, _Digests]


class Documents:
    """Reads the ConfigMaps of Partitions."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._kept: OrderedDict[tuple[str, _Digests], StoredDocument] = OrderedDict()
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def read(self, partition: Partition, *, fresh: bool = False) -> StoredDocument | None:
        """A Partition's document; None where there is none. Without `fresh` one that has the
        fragments of the Partition's status is taken as read before.
        """
        uid = partition.metadata.uid or ""
        kept = None if fresh else self._find(partition, uid)
        if kept is not None:
            return kept
        name = document_name(partition.metadata.name)
        config_map = await self._api.get(CONFIG_MAP, namespace_of(partition), name)
        if config_map is None:
            self._known.pop(uid, None)
            return None
        identity = identity_of(config_map)
        state = (identity.uid, identity.version)
        known = self._known.get(uid)
        if known is not None and known.config_map == state and known.document in self._kept:
            return self._use(known.document)
        kept = read_document(config_map)
        if kept is None:
            self._known.pop(uid, None)
            return None
        return self._keep(uid, state, kept)

    def _find(self, partition: Partition, uid: str) -> StoredDocument | None:
        known = self._known.get(uid)
        if partition.status is None or not partition.status.fragments or known is None:
            return None
        digests = tuple(fragment.digest for fragment in partition.status.fragments)
        same = known.document[1] == digests and known.document in self._kept
        return self._use(known.document) if same else None

    def _use(self, document: tuple[str, _Digests]) -> StoredDocument:
        self._kept.move_to_end(document)
        return self._kept[document]

    def _keep(self, uid: str, state: tuple[str, int], kept: StoredDocument) -> StoredDocument:
        document = (kept.recipe, tuple(each.digest for each in kept.document.fragments))
        known = self._kept.setdefault(document, kept)
        if known != kept:
            # The same fragments by other arguments: the newest is what is asked for.
            self._kept[document] = kept
        self._known[uid] = _Known(state, document)
        self._known.move_to_end(uid)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        used = self._use(document)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return used
