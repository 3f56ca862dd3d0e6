"""What enrolment asks of the cluster: whose a token is, and which pool's agents that is.

The API server says of a token which pod it is bound to, and since Kubernetes 1.32 on which node
that is; before, the pod itself says so. A pool's agents have a service account of their own, so the
account names the pool, and the pool's authority signs.

Every operator serves enrolment, the one that leads and those that wait: signing writes nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal_api.kinds import DevicePool
from shoal_operator.controller.api import Api, ApiError
from shoal_operator.controller.certificates import Certificates
from shoal_operator.controller.children import NameTaken
from shoal_operator.controller.clock import now
from shoal_operator.controller.foreign import Raw
from shoal_operator.pki.pods import PodTokens, Reviewed
from shoal_operator.reconcile.names import ENROLMENT_AUDIENCE, agent_name, authority_secret
from shoal_operator.reconcile.resources import POD, SHOAL, TOKEN_REVIEW
from shoal_protocol.identities import ENROLMENT
from shoal_protocol.pki.authority import (
    Authority,
    CertificateRefused,
    Issued,
    Use,
    renewal_time,
)
from shoal_protocol.pki.enrolment import (
    EnrolmentService,
    ReviewFailed,
    listen_for_enrolment,
)

logger = logging.getLogger(__name__)

AUTHORITY_SECRET: Final = "shoal-ca"  # noqa: S105 - a name
MISSING_SECONDS: Final = 5.0
KEPT_SECONDS: Final = 60.0
"""How long the operator's authority is taken for what it was."""
GRACE_SECONDS: Final = 2.0
_ACCOUNT: Final = "system:serviceaccount:"
_EXTRA: Final = "authentication.kubernetes.io"


@dataclass(slots=True)
class Enrolling:
    """Serves `Enrol` at `address` (host and port) under the name that agents dial, `host`.

    `trusted` is the certificate (PEM) that agents are to trust, the operator's own authority's;
    empty while there is none. `changed` is called when it changes.
    """

    api: Api
    certificates: Certificates
    address: tuple[str, int]
    host: str = field(kw_only=True)
    changed: Callable[[], None] = field(kw_only=True)
    _authority: Authority | None = None
    _issued: Issued | None = None
    _problem: str = ""
    _known: asyncio.Event = field(default_factory=asyncio.Event)
    trusted: str = field(default="", init=False)

    async def keep_authority(self) -> None:
        """Have the operator's own authority, until cancelled."""
        while True:
            authority, problem = None, ""
            try:
                authority = await self.certificates.own_authority(AUTHORITY_SECRET)
            except (ApiError, CertificateRefused, NameTaken) as error:
                problem = str(error)
            if problem and problem != self._problem:
                logger.warning("%s", problem)
            self._problem = problem
            if authority is not None and authority.certificate.decode() != self.trusted:
                self._authority, self._issued = authority, None
                self.trusted = authority.certificate.decode()
                self._known.set()
                self.changed()
            await asyncio.sleep(MISSING_SECONDS if authority is None else KEPT_SECONDS)

    async def serve(self) -> None:
        """Serve until cancelled, as soon as there is an authority."""
        await self._known.wait()
        service = EnrolmentService(PodTokens(self._identify, self._find, now).review, now)
        host, port = self.address
        listener, bound = await listen_for_enrolment(service, f"{host}:{port}", self._identity)
        logger.info("enrolment at %s:%d", host, bound)
        try:
            await asyncio.Event().wait()
        finally:
            await listener.stop(GRACE_SECONDS)

    async def _identity(self) -> Issued:
        """The server's certificate, issued anew when it is time. Raises `CertificateRefused`."""
        authority = self._authority
        assert authority is not None, "served before there was an authority"
        if self._issued is None or renewal_time(self._issued.certificate) <= now():
            # The host may be longer than a common name: it has the namespace and the release in it.
            self._issued = authority.issue(ENROLMENT, now(), hosts=[self.host], use=Use.BOTH)
        return self._issued

    async def _identify(self, token: str) -> Reviewed | None:
        try:
            asked = {"token": token, "audiences": [ENROLMENT_AUDIENCE]}
            answer = await self.api.create(TOKEN_REVIEW.manifest({"name": ""}, spec=asked))
            return await self._reviewed(Raw(answer).table("status"))
        except ApiError as error:
            raise ReviewFailed(str(error)) from error

    async def _reviewed(self, status: Raw) -> Reviewed | None:
        audiences = status.value.get("audiences")
        known = isinstance(audiences, list) and ENROLMENT_AUDIENCE in audiences
        user = status.table("user")
        account = user.text("username").removeprefix(_ACCOUNT).split(":")
        if not status.flag("authenticated") or not known or len(account) != 2:
            return None
        namespace, name = account
        extra = user.table("extra").value
        pod, uid, node = (_first(extra, each) for each in ("pod-name", "pod-uid", "node-name"))
        if pod and not node:
            node = await self._node_of(namespace, pod, uid)
        if not pod or not node:
            return None  # A token that is bound to no pod says nothing of a node.
        return Reviewed(namespace=namespace, pod=pod, node=node, service_account=name)

    async def _node_of(self, namespace: str, pod: str, uid: str) -> str:
        document = await self.api.get(POD, namespace, pod)
        if document is None or Raw(document).table("metadata").text("uid") != uid:
            return ""
        return Raw(document).table("spec").text("nodeName")

    async def _find(self, reviewed: Reviewed) -> Authority | None:
        namespace = reviewed.namespace
        try:
            async for document in self.api.list(SHOAL[DevicePool.__name__], namespace):
                pool = Raw(document).table("metadata").text("name")
                if agent_name(pool) == reviewed.service_account:
                    secret = authority_secret(pool)
                    authority = await self.certificates.authority(namespace, secret)
                    if authority is None:
                        raise ReviewFailed(f"Secret {secret} holds no authority yet")
                    return authority
        except ApiError as error:
            raise ReviewFailed(str(error)) from error
        return None


def _first(extra: Mapping[str, object], name: str) -> str:
    """The only value of an `extra` of a user."""
    values = extra.get(f"{_EXTRA}/{name}")
    return str(values[0]) if isinstance(values, list) and len(values) == 1 else ""
