"""The service `Enrolment` (`v1/enrolment.proto`): a caller without a certificate gets one.

A token identifies the caller. What it is good for, `Review` decides: the operator asks the API
server of its cluster, a standalone coordinator looks into its records of invitations. Both refuse a
token that comes with another key than before: somebody has read it.

Anyone may call, so each address has a rate limit of its own, and reviews run in turns per address:
a flood from one address delays or refuses nobody at another. Devices behind one address (NAT) share
its rate, and try again later.
"""

import asyncio
import ipaddress
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NoReturn
from urllib.parse import unquote

import grpc

from shoal_protocol.limits import CallLimiter, TooManyCalls
from shoal_protocol.listener import Listener, ServerIdentity
from shoal_protocol.pki.authority import (
    DEVICE_LIFETIME,
    Authority,
    CertificateRefused,
    Issued,
    Request,
    parse_request,
)
from shoal_protocol.v1 import enrolment_pb2 as pb
from shoal_protocol.v1.enrolment_pb2_grpc import (
    EnrolmentServicer,
    add_EnrolmentServicer_to_server,
)

logger = logging.getLogger(__name__)

REVIEWS: Final = 8
"""At once; one may be a request to an API server."""
REVIEWS_EACH: Final = 4
"""At once for one address."""
BURST: Final = 200
"""Requests of one address at once, before `PER_SECOND` limits them."""
PER_SECOND: Final = 20.0
CONNECTIONS: Final = 1024
_TOKEN_BYTES: Final = 16 << 10
_ADDRESSES: Final = 10_000
_REVIEW_SECONDS: Final = 10.0
_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a token is good for: a certificate for `name`, signed by `authority`. `holder` is what
    logs and refusals call the caller."""

    name: str
    holder: str
    authority: Authority


class TokenRefused(Exception):
    """The token is not accepted; the text says why."""


class EnrolmentDenied(Exception):
    """The token is accepted, but not for what is asked; the text says why."""


class ReviewFailed(Exception):
    """The token could not be reviewed at this time."""


Review = Callable[[str, Request], Awaitable[Grant]]
"""What a token is good for, for who asks so. Raises `TokenRefused`, `EnrolmentDenied`,
`ReviewFailed`."""
USED_WITH_ANOTHER_KEY: Final = "the token was used already, with another key"


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
        clock: Callable[[], datetime],
        lifetime: timedelta = DEVICE_LIFETIME,
    ) -> None:
        """`clock` gives the time as an aware datetime."""
        self._review = review
        self._clock = clock
        self._lifetime = lifetime
        self._reviews = CallLimiter(total=REVIEWS, each=REVIEWS_EACH, waiting=BURST)
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
        denied = grpc.StatusCode.PERMISSION_DENIED
        try:
            async with asyncio.timeout(_REVIEW_SECONDS), self._reviews.turn(address):
                grant = await self._review(request.token, wanted)
        except (ReviewFailed, TooManyCalls, TimeoutError) as error:
            reason = f"the token cannot be reviewed now: {str(error) or 'no answer'}"
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, reason)
        except TokenRefused as error:
            await _refuse(context, grpc.StatusCode.UNAUTHENTICATED, str(error))
        except EnrolmentDenied as error:
            await _refuse(context, denied, str(error))
        authority = grant.authority
        try:
            chain = authority.sign(request.certificate_request, grant.name, now, self._lifetime)
        except CertificateRefused as error:
            await _refuse(context, denied, f"{grant.holder}: {error}")
        logger.info("signed for %s, %s", grant.name, grant.holder)
        return pb.EnrolResponse(certificate_chain=chain, authority=authority.certificate)


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
