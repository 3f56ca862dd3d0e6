"""The documents of Partitions, from their ConfigMaps.

They are large and parsed, so each content is kept once, whatever the number of Partitions that have
it, and the least used go first.
"""

from collections import OrderedDict
from typing import Final

from shoal_operator.api.kinds import Partition
from shoal_operator.reconcile.documents import read_document
from shoal_operator.reconcile.names import document_name, namespace_of
from shoal_operator.reconcile.snapshot import KeptDocument
from shoal_operator.shell.cluster.api import Api
from shoal_operator.shell.cluster.resources import CONFIG_MAP

MAX_KEPT: Final = 64

_Digests = tuple[str, ...]


class Documents:
    """Reads the ConfigMaps of Partitions."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._kept: OrderedDict[tuple[str, _Digests], KeptDocument] = OrderedDict()
        self._recipes: dict[str, str] = {}

    async def read(self, partition: Partition, *, fresh: bool = False) -> KeptDocument | None:
        """A Partition's document; None where there is none. Without `fresh` one that has the
        fragments of the Partition's status is taken as read before.
        """
        uid = partition.metadata.uid or ""
        kept = None if fresh else self._find(partition, uid)
        if kept is not None:
            return kept
        name = document_name(partition.metadata.name)
        config_map = await self._api.get(CONFIG_MAP, namespace_of(partition), name)
        kept = None if config_map is None else read_document(config_map)
        if kept is None:
            self._recipes.pop(uid, None)
            return None
        self._recipes[uid] = kept.recipe
        return self._keep(kept)

    def forget(self, uid: str) -> None:
        """A Partition is gone."""
        self._recipes.pop(uid, None)

    def _find(self, partition: Partition, uid: str) -> KeptDocument | None:
        if partition.status is None or not partition.status.fragments or uid not in self._recipes:
            return None
        digests = tuple(fragment.digest for fragment in partition.status.fragments)
        key = (self._recipes[uid], digests)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        return kept

    def _keep(self, kept: KeptDocument) -> KeptDocument:
        key = (kept.recipe, tuple(each.digest for each in kept.document.fragments))
        known = self._kept.setdefault(key, kept)
        self._kept.move_to_end(key)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return known if known == kept else kept
