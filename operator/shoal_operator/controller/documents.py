"""The documents of Partitions, from their ConfigMaps.

They are large and parsed, so each content is kept once, whatever the number of Partitions that have
it, and the least used go first. A ConfigMap that has not changed is not parsed again.

A Partition that was deleted and made again finds the ConfigMaps of the old one, which Kubernetes
has yet to collect. They are as good as gone.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from shoal_api.kinds import Partition
from shoal_operator.controller.api import Api, Json
from shoal_operator.controller.foreign import identity_of
from shoal_operator.reconcile.names import document_name, namespace_of, table_name, uid_of
from shoal_operator.reconcile.partition import read_document
from shoal_operator.reconcile.planned_cuts import read_table
from shoal_operator.reconcile.resources import CONFIG_MAP
from shoal_operator.reconcile.snapshot import StoredDocument, StoredTable

MAX_KEPT: Final = 64
MAX_KNOWN: Final = 16_384
"""Partitions whose last document is remembered; each costs some hundred bytes."""

_Content = tuple[str, tuple[str, ...]]
"""What a document was cut by, and the digests of its fragments."""


@dataclass(frozen=True, slots=True)
class _Known:
    """Which ConfigMap in which version a Partition's document was read from, and what that was."""

    config_map: tuple[str, int]
    content: _Content


class Documents:
    """Reads the ConfigMaps of Partitions."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._kept: OrderedDict[_Content, StoredDocument] = OrderedDict()
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def read(self, partition: Partition, *, fresh: bool = False) -> StoredDocument | None:
        """A Partition's document; None where there is none. Without `fresh` one that has the
        fragments of the Partition's status is taken as read before.
        """
        uid = uid_of(partition)
        known = self._known.get(uid)
        if known is not None and not fresh and known.content[1] == _fragments(partition):
            found = self._find(known.content)
            if found is not None:
                return found
        config_map = await self._get(partition, document_name(partition.metadata.name))
        identity = identity_of(config_map)
        state = (identity.uid, identity.version)
        found = self._find(known.content) if known and known.config_map == state else None
        if found is not None:
            return found
        stored = read_document(config_map)
        if stored is None:
            self._known.pop(uid, None)
            return None
        content = (stored.recipe, tuple(each.digest for each in stored.document.fragments))
        kept = self._find(content)
        if kept != stored:
            # The same fragments may come from other arguments: the newest count.
            kept = self._kept[content] = stored
        self._known[uid] = _Known(state, content)
        self._known.move_to_end(uid)
        for memory, limit in ((self._known, MAX_KNOWN), (self._kept, MAX_KEPT)):
            if len(memory) > limit:
                memory.popitem(last=False)
        return kept

    async def read_table(self, partition: Partition) -> StoredTable | None:
        """The table of a Partition whose cuts are planned; None where there is none."""
        return read_table(await self._get(partition, table_name(partition.metadata.name)))

    async def _get(self, partition: Partition, name: str) -> Json:
        """A ConfigMap of this very Partition; empty where there is none that stays."""
        config_map = await self._api.get(CONFIG_MAP, namespace_of(partition), name) or {}
        identity = identity_of(config_map)
        stays = identity.shoal_owner == uid_of(partition) and not identity.leaving
        return config_map if stays else {}

    def _find(self, content: _Content) -> StoredDocument | None:
        """A document that is stored, as the one that was used last."""
        if content in self._kept:
            self._kept.move_to_end(content)
        return self._kept.get(content)


def _fragments(partition: Partition) -> tuple[str, ...] | None:
    fragments = partition.status.fragments if partition.status else ()
    return tuple(fragment.digest for fragment in fragments) or None
