"""Who has which certificate in a pool: made by the operator, or asked of cert-manager. Pure."""

from typing import Final

from shoal_api.kinds import DevicePool
from shoal_operator.reconcile.decision import CertificateWanted, Manifest
from shoal_operator.reconcile.manifests import Json, labels_of, manifest
from shoal_operator.reconcile.names import (
    authority_secret,
    child_name,
    coordinator_host,
    coordinator_name,
    coordinator_secret,
    namespace_of,
    viewer_secret,
    worker_secret,
)
from shoal_operator.reconcile.settings import OperatorSettings
from shoal_protocol.identities import VIEWER, WORKER

_AUTHORITY_LIFE: Final = "87600h"
_LIFE: Final = "2160h"
_RENEWED_BEFORE: Final = "720h"


def _leaves(pool: DevicePool) -> tuple[CertificateWanted, ...]:
    name, authority = pool.metadata.name, authority_secret(pool.metadata.name)
    return (
        CertificateWanted(
            secret=coordinator_secret(name),
            authority=authority,
            common_name=coordinator_name(name),
            hosts=(coordinator_host(name, namespace_of(pool)),),
        ),
        CertificateWanted(secret=worker_secret(name), authority=authority, common_name=WORKER),
        CertificateWanted(secret=viewer_secret(name), authority=authority, common_name=VIEWER),
    )


def certificates_wanted(
    pool: DevicePool, settings: OperatorSettings
) -> tuple[CertificateWanted, ...]:
    """The Secrets that the operator makes: none where cert-manager does."""
    if settings.cert_manager:
        return ()
    name = authority_secret(pool.metadata.name)
    authority = CertificateWanted(secret=name, authority=None, common_name=name)
    return (authority, *_leaves(pool))


def secrets_needed(pool: DevicePool) -> tuple[str, ...]:
    """The Secrets that a pool's pods mount and its authority, whoever makes them."""
    name = pool.metadata.name
    return authority_secret(name), coordinator_secret(name), worker_secret(name)


def certificate_children(pool: DevicePool, settings: OperatorSettings) -> tuple[Manifest, ...]:
    """What asks cert-manager for the same Secrets."""
    if not settings.cert_manager:
        return ()
    authority = authority_secret(pool.metadata.name)
    first = child_name(pool.metadata.name, "self-signed")
    spec: Json = {
        "isCA": True,
        "commonName": authority,
        "secretName": authority,
        "duration": _AUTHORITY_LIFE,
        "privateKey": {"algorithm": "ECDSA", "size": 256},
        "issuerRef": {"name": first, "kind": "Issuer"},
    }
    return (
        _object(pool, "Issuer", first, {"selfSigned": {}}),
        _object(pool, "Certificate", authority, spec),
        _object(pool, "Issuer", authority, {"ca": {"secretName": authority}}),
        *(_leaf(pool, each, authority) for each in _leaves(pool)),
    )


def _leaf(pool: DevicePool, wanted: CertificateWanted, authority: str) -> Manifest:
    spec: Json = {
        "commonName": wanted.common_name,
        "secretName": wanted.secret,
        # cert-manager asks for at least one name; a client is never dialled by one.
        "dnsNames": list(wanted.hosts or (wanted.common_name,)),
        "duration": _LIFE,
        "renewBefore": _RENEWED_BEFORE,
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        "usages": ["digital signature", "client auth", "server auth"],
        "issuerRef": {"name": authority, "kind": "Issuer"},
    }
    return _object(pool, "Certificate", wanted.secret, spec)


def _object(pool: DevicePool, kind: str, name: str, spec: Json) -> Manifest:
    return manifest(pool, kind, name, labels_of(pool, "certificates"), spec=spec)
