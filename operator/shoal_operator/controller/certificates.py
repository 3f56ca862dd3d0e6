"""The Secrets that hold certificates: made when they are missing or wrong, renewed in time.

A Secret has `tls.crt`, `tls.key` and `ca.crt`. An authority that cannot be read any more, or that
has ended, is made anew, and with it the Secrets that it had signed; agents notice by themselves
that theirs is of no use. With cert-manager its objects are applied instead, and it makes the
Secrets; those that are left of it when it is no longer used are taken over.

A pool that was deleted and made again finds the Secrets of the old one, which Kubernetes has yet to
collect. They are good, so they are kept, as the new pool's.
"""

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from shoal_operator.controller.api import Api, Conflict, Json
from shoal_operator.controller.children import Children, NameTaken
from shoal_operator.controller.clock import now
from shoal_operator.controller.foreign import Identity, Raw, identity_of
from shoal_operator.reconcile.decision import CertificateWanted
from shoal_operator.reconcile.names import MANAGED_BY, MANAGER
from shoal_operator.reconcile.resources import SECRET, key_of
from shoal_protocol.pki.authority import (
    Authority,
    CertificateRefused,
    Use,
    expiry,
    is_issued_by,
    renewal_time,
)

KEPT_SECONDS: Final = 30.0
"""How long a Secret is not read again."""
SIGNED_FOR: Final = "shoal.dev/signed-for"
_CERT_MANAGERS: Final = "cert-manager.io/certificate-name"
_TLS: Final = "kubernetes.io/tls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A Secret's content, PEM. `signed_for`: for what it was made, where it was made here; `owner`:
    the uid of the pool that it is of; `asked_as`: the Certificate that cert-manager made it for.
    """

    certificate: bytes
    key: bytes
    authority: bytes
    signed_for: str = ""
    owner: str = ""
    asked_as: str = ""


@dataclass(slots=True)
class Certificates:
    """Reads and makes Secrets with certificates. `clock` counts seconds."""

    api: Api
    children: Children
    clock: Callable[[], float]
    cert_manager: bool = field(kw_only=True)
    _read: dict[tuple[str, str], tuple[float, Pair | None]] = field(default_factory=dict)

    async def pair(self, namespace: str, secret: str) -> Pair | None:
        """What a Secret holds; None when it is not there or holds no certificate."""
        known = self._read.get((namespace, secret))
        if known is not None and self.clock() - known[0] < KEPT_SECONDS:
            return known[1]
        document = await self.api.get(SECRET, namespace, secret)
        pair = None if document is None else _pair(document)
        self._read[namespace, secret] = (self.clock(), pair)
        return pair

    async def authority(self, namespace: str, secret: str) -> Authority | None:
        """An authority, ready to sign; None while there is none that can."""
        pair = await self.pair(namespace, secret)
        if pair is None:
            return None
        try:
            return Authority.load(pair.certificate, pair.key)
        except CertificateRefused:
            return None

    async def want(self, wanted: CertificateWanted, owner: Identity) -> bool:
        """Have a Secret be as it is wanted; whether something was written. Raises `ApiError`, or
        `NameTaken` where a Secret of that name is not of Shoal.
        """
        pair = await self.pair(owner.namespace, wanted.secret)
        authority = None
        if wanted.authority is not None:
            authority = await self.authority(owner.namespace, wanted.authority)
            if authority is None:
                return False  # It is wanted as well, and comes first.
        left = pair is not None and pair.asked_as == wanted.secret and not pair.owner
        if pair is None or not _is_good(pair, wanted, authority):
            pair = _made(wanted, authority)
        elif pair.owner == owner.uid or not (pair.owner or left):
            return False  # An authority that somebody else has made is as good.
        secret = _secret(pair, wanted, owner.namespace)
        changed = await self.children.apply(secret, owner, take_over=left)
        self._read.pop((owner.namespace, wanted.secret), None)
        return changed

    async def own_authority(self, secret: str) -> Authority | None:
        """The operator's own authority, which belongs to no object; made if it is not there. None
        while cert-manager, which the chart has asked, is still to make it. Raises `ApiError`,
        `NameTaken`, or `CertificateRefused` where somebody has put there what cannot sign.
        """
        namespace = self.api.namespace
        pair = await self.pair(namespace, secret)
        if pair is None and not self.cert_manager:
            await self._make_own(secret)
            pair = await self.pair(namespace, secret)
        return None if pair is None else _usable(pair, f"{namespace}/{secret}")

    async def _make_own(self, secret: str) -> None:
        namespace = self.api.namespace
        wanted = CertificateWanted(secret=secret, authority=None, common_name=secret)
        try:
            await self.api.create(_secret(_made(wanted, None), wanted, namespace))
        except Conflict:
            document = await self.api.get(SECRET, namespace, secret)
            if document is not None and _pair(document) is None:
                raise NameTaken(key_of(document)) from None
        self._read.pop((namespace, secret), None)


def _usable(pair: Pair, secret: str) -> Authority:
    """The authority in a Secret that is never written again. Raises `CertificateRefused`."""
    advice = f"delete Secret {secret} to have another one made"
    try:
        authority = Authority.load(pair.certificate, pair.key)
    except CertificateRefused as error:
        raise CertificateRefused(f"no agent can enrol: {error}; {advice}") from error
    if expiry(pair.certificate) <= now():
        raise CertificateRefused(f"no agent can enrol: the authority has expired; {advice}")
    return authority


def _made(wanted: CertificateWanted, authority: Authority | None) -> Pair:
    if authority is None:
        new = Authority.make(wanted.common_name, now())
        return Pair(certificate=new.certificate, key=new.key, authority=new.certificate)
    use = Use.BOTH if wanted.hosts else Use.CLIENT
    issued = authority.issue(wanted.common_name, now(), hosts=wanted.hosts, use=use)
    return Pair(certificate=issued.certificate, key=issued.key, authority=authority.certificate)


def _is_good(pair: Pair, wanted: CertificateWanted, authority: Authority | None) -> bool:
    """Whether a Secret is what is wanted, for a good while yet."""
    if authority is None:
        try:
            Authority.load(pair.certificate, pair.key)
        except CertificateRefused:
            return False
        return expiry(pair.certificate) > now()
    try:
        fresh = renewal_time(pair.certificate) > now()
    except ValueError:
        return False
    signed = is_issued_by(pair.certificate, authority.certificate)
    return fresh and signed and pair.signed_for == _signed_for(wanted)


def _signed_for(wanted: CertificateWanted) -> str:
    return ",".join((wanted.common_name, *wanted.hosts))


def _secret(pair: Pair, wanted: CertificateWanted, namespace: str) -> Json:
    data = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": pair.authority}
    metadata = {
        "name": wanted.secret,
        "namespace": namespace,
        "labels": {MANAGED_BY: MANAGER},
        "annotations": {SIGNED_FOR: _signed_for(wanted)},
    }
    encoded = {name: base64.b64encode(value).decode() for name, value in data.items()}
    return SECRET.manifest(metadata, type=_TLS, data=encoded)


def _pair(document: Json) -> Pair | None:
    raw = Raw(document)
    data = raw.table("data")
    try:
        certificate, key, authority = (
            base64.b64decode(data.text(name)) for name in ("tls.crt", "tls.key", "ca.crt")
        )
    except binascii.Error:
        return None
    if not certificate or not key:
        return None
    return Pair(
        certificate=certificate,
        key=key,
        authority=authority or certificate,
        signed_for=raw.table("metadata", "annotations").text(SIGNED_FOR),
        owner=identity_of(document).shoal_owner,
        asked_as=raw.table("metadata", "annotations").text(_CERT_MANAGERS),
    )
