"""Persistent volume claims of ours: whether they are bound, and if not, why."""

from typing import Final

from shoal_operator.reconcile.snapshot import Claim
from shoal_operator.shell.cluster.api import Api, Refused
from shoal_operator.shell.cluster.foreign import Raw, identity_of
from shoal_operator.shell.cluster.resources import CLAIM, EVENT
from shoal_protocol.units import Bytes, parse_quantity

_BOUND: Final = "Bound"


class Claims:
    """Reads claims; one that is bound stays what it is, so it is read once."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._bound: dict[tuple[str, str], Claim] = {}

    async def claim(self, namespace: str, name: str, *, fresh: bool = False) -> Claim | None:
        """A claim; None if it is not there."""
        known = self._bound.get((namespace, name))
        if known is not None and not fresh:
            return known
        document = await self._api.get(CLAIM, namespace, name)
        if document is None:
            self._bound.pop((namespace, name), None)
            return None
        raw = Raw(document)
        status, spec = raw.table("status"), raw.table("spec")
        bound = status.text("phase") == _BOUND
        size = status.table("capacity").text("storage")
        size = size or spec.table("resources", "requests").text("storage")
        claim = Claim(
            name=name,
            bound=bound,
            size=Bytes(int(parse_quantity(size)) if size else 0),
            storage_class=spec.text("storageClassName") or None,
            message="" if bound else await self._trouble(namespace, identity_of(document).uid),
        )
        if bound:
            self._bound[namespace, name] = claim
        return claim

    async def _trouble(self, namespace: str, uid: str) -> str:
        """What was last said of a claim that is not bound."""
        fields = f"involvedObject.kind=PersistentVolumeClaim,involvedObject.uid={uid}"
        try:
            events = [Raw(each) async for each in self._api.list(EVENT, namespace, fields=fields)]
        except Refused:
            return ""  # A role that does not allow it takes nothing but the reason.
        if not events:
            return ""
        last = max(events, key=lambda event: event.text("lastTimestamp"))
        return f"{last.text('reason')}: {last.text('message')}"
