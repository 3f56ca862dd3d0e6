"""The service `Enrolment` (`v1/enrolment.proto`): a device without a certificate gets one.

Who asks is said by a token, and what the token means by two functions that the cluster's shell
gives: `review` asks the API server, `find` knows which pool's authority a reviewed account gets its
certificates from. The name that is signed is that of the node that the pod is on, unless it would
make its owner somebody else: nodes may choose their names.

A token may be used again with the same key, since an answer can be lost. With another key it is
refused: somebody has read it. What was used is remembered for a day, longer than tokens last; a
restarted operator has forgotten it.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NoReturn

import grpc

from shoal_operator.pki.authority import (
    DEVICE_LIFETIME,
    Authority,
    CertificateRefused,
    Issued,
    parse_request,
)
from shoal_operator.reconcile.names import why_no_device
from shoal_protocol.v1 import enrolment_pb2 as pb
from shoal_protocol.v1.enrolment_pb2_grpc import EnrolmentServicer

logger = logging.getLogger(__name__)

REVIEWS: Final = 8
"""At once; each is a request to the API server."""
BURST: Final = 200
PER_SECOND: Final = 20.0
_TOKEN_BYTES: Final = 16 << 10
_REMEMBERED: Final = 20_000
_REMEMBERED_FOR: Final = timedelta(days=1)
_REVIEW_SECONDS: Final = 10.0
_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reviewed:
    """Whose a token is: a pod of `service_account` in `namespace`, on `node`."""

    namespace: str
    pod: str
    node: str
    service_account: str


class ReviewFailed(Exception):
    """The token could not be looked at just now."""


Review = Callable[[str], Awaitable[Reviewed | None]]
"""None: the token is not accepted. Raises `ReviewFailed`."""
Find = Callable[[Reviewed], Awaitable[Authority | None]]
"""None: the account is no pool's agents'. Raises `ReviewFailed`."""


class EnrolmentService(EnrolmentServicer):
    """Signs for those that the review names."""

    def __init__(
        self,
        review: Review,
        find: Find,
        clock: Callable[[], datetime],
        lifetime: timedelta = DEVICE_LIFETIME,
    ) -> None:
        """`clock` gives the time as an aware datetime."""
        self._review = review
        self._find = find
        self._clock = clock
        self._lifetime = lifetime
        self._turns = asyncio.Semaphore(REVIEWS)
        self._used: OrderedDict[bytes, tuple[bytes, datetime]] = OrderedDict()
        self._allowance = float(BURST)
        self._counted_at = clock()

    async def Enrol(self, request: pb.EnrolRequest, context: _Context) -> pb.EnrolResponse:
        now = self._clock()
        if not self._admit(now):
            await _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many ask at a time")
        if not 0 < len(request.token) <= _TOKEN_BYTES:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "there is no token")
        try:
            wanted = parse_request(request.certificate_request)
        except CertificateRefused as error:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            async with asyncio.timeout(_REVIEW_SECONDS), self._turns:
                reviewed = await self._review(request.token)
                if reviewed is None:
                    reason = "the token is not accepted: expired, not of this cluster, or of a pod "
                    reason += "that is gone"
                    await _refuse(context, grpc.StatusCode.UNAUTHENTICATED, reason)
                authority = await self._find(reviewed)
        except (ReviewFailed, TimeoutError) as error:
            reason = f"the token cannot be looked at now: {error or 'no answer'}"
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, reason)
        denied = grpc.StatusCode.PERMISSION_DENIED
        who = f"service account {reviewed.service_account} of namespace {reviewed.namespace}"
        if authority is None:
            await _refuse(context, denied, f"{who} is no pool's agents'")
        if (problem := why_no_device(reviewed.node)) is not None:
            text = f"node {reviewed.node} cannot be a device: {problem}"
            await _refuse(context, denied, text)
        if not self._first_use(request.token, wanted.fingerprint, now):
            await _refuse(context, denied, "the token was used already, with another key")
        try:
            chain = authority.sign(request.certificate_request, reviewed.node, now, self._lifetime)
        except CertificateRefused as error:
            await _refuse(context, denied, f"pod {reviewed.pod}: {error}")
        logger.info("signed for %s, pod %s/%s", reviewed.node, reviewed.namespace, reviewed.pod)
        return pb.EnrolResponse(certificate_chain=chain, authority=authority.certificate)

    def _admit(self, now: datetime) -> bool:
        """Whether the rate allows one more: so many at once, and so many a second after that."""
        passed = max(0.0, (now - self._counted_at).total_seconds())
        self._counted_at = now
        self._allowance = min(float(BURST), self._allowance + passed * PER_SECOND)
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    def _first_use(self, token: str, fingerprint: bytes, now: datetime) -> bool:
        """Note a token's key; whether it is the first, or the same as before."""
        while self._used:
            _, at = next(iter(self._used.values()))
            if len(self._used) < _REMEMBERED and now - at < _REMEMBERED_FOR:
                break
            self._used.popitem(last=False)
        key = hashlib.sha256(token.encode()).digest()
        before, _ = self._used.setdefault(key, (fingerprint, now))
        return before == fingerprint


def add_enrolment_port(
    server: grpc.aio.Server, address: str, identity: Callable[[], Issued]
) -> int:
    """Let a server listen for those without certificates; the port bound.

    `identity` is asked at every handshake, so that a renewed certificate is taken. Raises
    `OSError`.
    """

    def configuration() -> grpc.ServerCertificateConfiguration:
        issued = identity()
        return grpc.ssl_server_certificate_configuration([(issued.key, issued.certificate)])

    credentials = grpc.dynamic_ssl_server_credentials(
        configuration(), configuration, require_client_authentication=False
    )
    try:
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(
            f"cannot listen on {address}: it is in use, or not of this machine"
        ) from error


async def _refuse(context: _Context, code: grpc.StatusCode, reason: str) -> NoReturn:
    logger.warning("refused to enrol %s: %s", context.peer(), reason)
    await context.abort(code, reason)
    raise AssertionError("abort always raises")
