"""Persistent volume claims of ours: whether they are bound, and if not, why."""

from typing import Final

from shoal_operator.controller.api import Api, Rejected
from shoal_operator.controller.foreign import Raw, identity_of
from shoal_operator.controller.resources import CLAIM, EVENT
from shoal_operator.reconcile.snapshot import Claim
from shoal_protocol.units import Bytes, parse_quantity

_BOUND: Final = "Bound"


class Claims:
    """Reads claims. One that is bound is read once for the pool that has it: a pool that is made
    again has another."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._bound: dict[tuple[str, str], tuple[str, Claim]] = {}

    async def claim(self, namespace: str, name: str, pool: str) -> Claim | None:
        """The claim of the pool with this uid; None if it is not there, or about to go."""
        uid, known = self._bound.get((namespace, name), ("", None))
        if known is not None and uid == pool:
            return known
        document = await self._api.get(CLAIM, namespace, name)
        if document is None or identity_of(document).leaving:
            self._bound.pop((namespace, name), None)
            return None
        raw = Raw(document)
        status, spec = raw.table("status"), raw.table("spec")
        bound = status.text("phase") == _BOUND
        # A volume may be larger than what was asked for; nobody has asked for that much.
        size = spec.table("resources", "requests").text("storage")
        claim = Claim(
            name=name,
            bound=bound,
            size=Bytes(int(parse_quantity(size)) if size else 0),
            storage_class=spec.text("storageClassName") or None,
            message="" if bound else await self._trouble(namespace, identity_of(document).uid),
        )
        if bound:
            self._bound[namespace, name] = (pool, claim)
        return claim

    async def _trouble(self, namespace: str, uid: str) -> str:
        """What was last said of a claim that is not bound."""
        fields = f"involvedObject.kind=PersistentVolumeClaim,involvedObject.uid={uid}"
        try:
            events = [Raw(each) async for each in self._api.list(EVENT, namespace, fields=fields)]
        except Rejected:
            return ""  # A role that does not allow it takes nothing but the reason.
        if not events:
            return ""
        last = max(events, key=lambda event: event.text("lastTimestamp"))
        return f"{last.text('reason')}: {last.text('message')}"
