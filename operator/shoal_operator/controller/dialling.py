"""Channels to coordinators: mutual TLS as `shoal-operator`, with a certificate made in memory."""

from collections.abc import Mapping

import grpc

from shoal_operator.controller.certificates import Certificates
from shoal_operator.controller.clock import now
from shoal_operator.controller.coordinators import DialRefused
from shoal_operator.pki.authority import CertificateRefused
from shoal_operator.reconcile.names import authority_secret, coordinator_host
from shoal_protocol.channels import client_options, open_channel
from shoal_protocol.identities import OPERATOR


class Dialler:
    """`overrides` are targets of pools (NAMESPACE/POOL) that are reached in another way than by
    their Service; a Unix socket needs no certificate.
    """

    def __init__(self, certificates: Certificates, overrides: Mapping[str, str]) -> None:
        self._certificates = certificates
        self._overrides = overrides

    def target(self, namespace: str, pool: str, endpoint: str | None) -> str | None:
        """Where to dial for a pool whose status names this endpoint."""
        return self._overrides.get(f"{namespace}/{pool}", endpoint)

    async def dial(self, namespace: str, pool: str, target: str) -> grpc.aio.Channel:
        """A channel to a pool's coordinator. Raises `DialRefused`, or `ApiError`."""
        if target.startswith("unix:"):
            return open_channel(target)
        secret = authority_secret(pool)
        authority = await self._certificates.authority(namespace, secret)
        if authority is None:
            raise DialRefused(f"Secret {secret} holds no authority yet")
        try:
            issued = authority.issue(OPERATOR, now())
        except CertificateRefused as error:
            raise DialRefused(f"Secret {secret}: {error}") from error
        # The Service may be reached by an address that is not in the coordinator's certificate.
        host = coordinator_host(pool, namespace)
        options = [*client_options(), ("grpc.ssl_target_name_override", host)]
        credentials = grpc.ssl_channel_credentials(
            root_certificates=authority.certificate,
            private_key=issued.key,
            certificate_chain=issued.certificate,
        )
        return grpc.aio.secure_channel(target, credentials, options=options)
