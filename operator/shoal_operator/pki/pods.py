"""What the token of a pod is good for: a certificate for its node, of its pool.

Two functions of the controller interpret a token: `review` asks the API server whose it is, `find`
returns the authority of the pool that a reviewed account belongs to. The name that is signed is
that of the node that the pod runs on, unless that is a reserved name: nodes may choose their names.

A token may be used again with the same key, since an answer can be lost. Used tokens are stored for
a day, longer than tokens last; a restarted operator has lost them.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from shoal_protocol.identities import why_no_device
from shoal_protocol.pki.authority import Authority, Request
from shoal_protocol.pki.enrolment import (
    USED_WITH_ANOTHER_KEY,
    EnrolmentDenied,
    Grant,
    TokenRefused,
)

_TOKENS: Final = 20_000
_TOKENS_LAST: Final = timedelta(days=1)
_NOT_ACCEPTED: Final = (
    "the token is not accepted: expired, not of this cluster, or of a pod that is gone"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reviewed:
    """The owner of a token: a pod of `service_account` in `namespace`, on `node`."""

    namespace: str
    pod: str
    node: str
    service_account: str


Identify = Callable[[str], Awaitable[Reviewed | None]]
"""None: the token is not accepted. Raises `ReviewFailed`."""
Find = Callable[[Reviewed], Awaitable[Authority | None]]
"""None: the account is no pool's agents'. Raises `ReviewFailed`."""


@dataclass(slots=True)
class PodTokens:
    """Reviews the tokens of pods. `clock` gives the time as an aware datetime."""

    identify: Identify
    find: Find
    clock: Callable[[], datetime]
    _used: OrderedDict[bytes, tuple[bytes, datetime]] = field(default_factory=OrderedDict)

    async def review(self, token: str, wanted: Request) -> Grant:
        """Raises as `shoal_protocol.pki.enrolment.Review` does."""
        reviewed = await self.identify(token)
        if reviewed is None:
            raise TokenRefused(_NOT_ACCEPTED)
        authority = await self.find(reviewed)
        if authority is None:
            who = f"service account {reviewed.service_account} of namespace {reviewed.namespace}"
            raise EnrolmentDenied(f"{who} is no pool's agents'")
        if (problem := why_no_device(reviewed.node)) is not None:
            raise EnrolmentDenied(f"node {reviewed.node} cannot be a device: {problem}")
        if not self._first_use(token, wanted.fingerprint):
            raise EnrolmentDenied(USED_WITH_ANOTHER_KEY)
        return Grant(name=reviewed.node, holder=f"pod {reviewed.pod}", authority=authority)

    def _first_use(self, token: str, fingerprint: bytes) -> bool:
        """Record a token's key; whether it is the first, or the same as before."""
        now = self.clock()
        while self._used:
            _, at = next(iter(self._used.values()))
            if len(self._used) < _TOKENS and now - at < _TOKENS_LAST:
                break
            self._used.popitem(last=False)
        key = hashlib.sha256(token.encode()).digest()
        before, _ = self._used.setdefault(key, (fingerprint, now))
        return before == fingerprint
