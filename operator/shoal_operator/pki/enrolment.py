"""The service `Enrolment` (`v1/enrolment.proto`): a device without a certificate gets one.

A token identifies the caller. Two functions of the controller interpret it: `review` asks the API
server, `find` returns the authority of the pool that a reviewed account belongs to. The name that
is signed is that of the node that the pod runs on, unless that is a reserved name: nodes may choose
their names.

A token may be used again with the same key, since an answer can be lost. With another key it is
refused: somebody has read it. Used tokens are stored for a day, longer than tokens last; a
restarted operator has lost them.

Anyone may call, so each address has a rate limit of its own, and reviews run in turns per address:
a flood from one address delays or refuses nobody at another. Devices behind one address (NAT) share
its rate, and try again later.
"""

import asyncio
import hashlib
import ipaddress
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NoReturn
from urllib.parse import unquote

import grpc

from shoal_operator.pki.authority import (
    DEVICE_LIFETIME,
    Authority,
    CertificateRefused,
    Issued,
    parse_request,
)
from shoal_operator.reconcile.names import why_no_device
from shoal_protocol.limits import CallLimiter, TooManyCalls
from shoal_protocol.listener import Listener, ServerIdentity
from shoal_protocol.v1 import enrolment_pb2 as pb
from shoal_protocol.v1.enrolment_pb2_grpc import (
    EnrolmentServicer,
    add_EnrolmentServicer_to_server,
)

logger = logging.getLogger(__name__)

REVIEWS: Final = 8
"""At once; each is a request to the API server."""
REVIEWS_EACH: Final = 4
"""At once for one address."""
BURST: Final = 200
"""Requests of one address at once, before `PER_SECOND` limits them."""
PER_SECOND: Final = 20.0
CONNECTIONS: Final = 1024
_TOKEN_BYTES: Final = 16 << 10
_ADDRESSES: Final = 10_000
_TOKENS: Final = 20_000
_TOKENS_LAST: Final = timedelta(days=1)
_REVIEW_SECONDS: Final = 10.0
_NOT_ACCEPTED: Final = (
    "the token is not accepted: expired, not of this cluster, or of a pod that is gone"
)
_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reviewed:
    """The owner of a token: a pod of `service_account` in `namespace`, on `node`."""

    namespace: str
    pod: str
    node: str
    service_account: str


class ReviewFailed(Exception):
    """The token could not be reviewed at this time."""


Review = Callable[[str], Awaitable[Reviewed | None]]
"""None: the token is not accepted. Raises `ReviewFailed`."""
Find = Callable[[Reviewed], Awaitable[Authority | None]]
"""None: the account is no pool's agents'. Raises `ReviewFailed`."""


class RateLimiter:
    """A token bucket per address: `BURST` requests at once, and `PER_SECOND` after that.

    Of each address it stores when its bucket is full again, and forgets those that are full. When
    too many are known, the one that asked longest ago is forgotten, whatever it has left.
    """

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, datetime] = OrderedDict()

    def admit(self, address: str, now: datetime) -> bool:
        """Whether the rate of an address allows one more request."""
        full_at = max(now, self._buckets.pop(address, now))
        missing = (full_at - now).total_seconds() * PER_SECOND
        admitted = missing <= BURST - 1
        self._buckets[address] = full_at + timedelta(seconds=admitted / PER_SECOND)
        while len(self._buckets) > 1:
            oldest = next(iter(self._buckets.values()))
            if oldest > now and len(self._buckets) <= _ADDRESSES:
                break
            self._buckets.popitem(last=False)
        return admitted


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
        self._reviews = CallLimiter(total=REVIEWS, each=REVIEWS_EACH, waiting=BURST)
        self._used: OrderedDict[bytes, tuple[bytes, datetime]] = OrderedDict()
        self._rate = RateLimiter()

    async def Enrol(self, request: pb.EnrolRequest, context: _Context) -> pb.EnrolResponse:
        now = self._clock()
        if not 0 < len(request.token) <= _TOKEN_BYTES:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "there is no token")
        address = address_of(context.peer())
        if not self._rate.admit(address, now):
            reason = f"too many requests from {address}; ask again later"
            await _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        try:
            wanted = parse_request(request.certificate_request)
        except CertificateRefused as error:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            async with asyncio.timeout(_REVIEW_SECONDS), self._reviews.turn(address):
                reviewed = await self._review(request.token)
                if reviewed is None:
                    await _refuse(context, grpc.StatusCode.UNAUTHENTICATED, _NOT_ACCEPTED)
                authority = await self._find(reviewed)
        except (ReviewFailed, TooManyCalls, TimeoutError) as error:
            reason = f"the token cannot be reviewed now: {str(error) or 'no answer'}"
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

    def _first_use(self, token: str, fingerprint: bytes, now: datetime) -> bool:
        """Record a token's key; whether it is the first, or the same as before."""
        while self._used:
            _, at = next(iter(self._used.values()))
            if len(self._used) < _TOKENS and now - at < _TOKENS_LAST:
                break
            self._used.popitem(last=False)
        key = hashlib.sha256(token.encode()).digest()
        before, _ = self._used.setdefault(key, (fingerprint, now))
        return before == fingerprint


async def listen_for_enrolment(
    service: EnrolmentService, address: str, identity: Callable[[], Awaitable[Issued]]
) -> tuple[Listener, int]:
    """Serve those without certificates; the listener, to be stopped, and the port bound.

    `identity` is asked every few seconds, so that a renewed certificate is used. Raises `OSError`.
    """

    async def source() -> ServerIdentity:
        issued = await identity()
        return ServerIdentity(certificate=issued.certificate, key=issued.key, client_ca=None)

    listener = Listener(
        lambda server: add_EnrolmentServicer_to_server(service, server), connections=CONNECTIONS
    )
    return listener, await listener.open_secured(address, source)


def address_of(peer: str) -> str:
    """The address that a rate counts for, of a peer as gRPC writes it (`ipv4:127.0.0.1:4711`): an
    IPv4 address, or the network of 64 bits that a host of IPv6 can choose its address in.
    """
    host = unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


async def _refuse(context: _Context, code: grpc.StatusCode, reason: str) -> NoReturn:
    logger.warning("refused to enrol %s: %s", context.peer(), reason)
    await context.abort(code, reason)
    raise AssertionError("abort always raises")
