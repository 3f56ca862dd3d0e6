"""Sessions: one control stream per connected device.

A session begins with the device's Hello and ends with its stream; a new session of a device ends
the one before. An instruction is answered on the session on which it was given, or never: a reply
to anything else is ignored. A device that sends more than its instructions explain is read slowly:
what it floods is its own stream.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from itertools import count
from math import inf
from time import monotonic, time
from typing import Any, Final

import grpc

from shoal_coordinator.server import wire
from shoal_coordinator.server.device_session import DeviceSession, SessionStream
from shoal_coordinator.server.driver import Driver
from shoal_coordinator.server.exchange import DeviceLink, ExchangeHub
from shoal_coordinator.server.refusals import CallRefused, aborting
from shoal_protocol.bulk.local import LocalTransport
from shoal_protocol.bulk.transport import GrpcTransport, Transport, TransportBroken
from shoal_protocol.channels import peer_expiration, peer_name
from shoal_protocol.control import LocalControl, coordinators_stream
from shoal_protocol.frames import MalformedFrame
from shoal_protocol.pacing import WRITE_SECONDS, Allowance
from shoal_protocol.services import ConnectContext, FrameContext, device_metadata
from shoal_protocol.v1.session_pb2 import AgentMessage, CoordinatorMessage, Hello, Welcome

logger = logging.getLogger(__name__)

HELLO_SECONDS: Final = 10.0
MAXIMUM_SESSIONS: Final = 10_000
UNASKED_PER_SECOND: Final = 50.0
"""Messages that answer no instruction (telemetry, mostly): a device that sends more is read at this
rate."""
UNASKED_AT_ONCE: Final = 200.0
STRAY_PER_SECOND: Final = 500.0
"""Replies to nothing that the device was asked, which cost little: peers that send it rubbish cause
them, so they do not count with what the device says unasked."""
STRAY_AT_ONCE: Final = 2000.0

_CLOCK_SECONDS: Final = 60.0
"""How often the clock is looked at, which may be set."""


class Sessions:
    """All sessions by device, and the two streams that each has."""

    def __init__(
        self,
        driver: Driver,
        hub: ExchangeHub,
        by_device: dict[str, DeviceSession],
        *,
        tls: bool,
        expire: bool,
        telemetry_seconds: float,
    ) -> None:
        """`expire`: a session ends when the certificate expires that it was opened with."""
        self._driver = driver
        self._hub = hub
        self._tls = tls
        self._expire = expire
        self._telemetry_seconds = telemetry_seconds
        self._numbers = count(1)
        self._joined = asyncio.Condition()
        self.by_device = by_device
        self.last: dict[str, DeviceSession] = {}
        """The newest session of every device, also of one that is gone."""

    def close(self, reason: str) -> None:
        for session in list(self.by_device.values()):
            session.end(reason)

    # ---- Session.Connect -------------------------------------------------------------------------

    async def connect(self, requests: AsyncIterator[AgentMessage], context: ConnectContext) -> None:
        """Serve a control stream over gRPC from its Hello to its end."""

        def identify(device: str) -> None:
            self._identify(device, context)

        ends_at = peer_expiration(context) if self._expire else None
        async with aborting(context):
            stream = coordinators_stream(requests, context.write)
            reason = await self._serve(stream, identify, ends_at or inf)
        await context.abort(grpc.StatusCode.ABORTED, reason)

    async def connect_locally(self, _: str, transport: LocalTransport) -> str:
        """Serve a local control stream from its Hello to its end; why it ended."""
        try:
            return await self._serve(
                LocalControl(transport, AgentMessage.FromString), lambda _: None
            )
        except CallRefused as error:
            return str(error)

    async def _serve(
        self, stream: SessionStream, identify: Callable[[str], None], ends_at: float = inf
    ) -> str:
        """Serve a control stream, at most until a time in seconds since 1970; why it ended. Raises
        `CallRefused`."""
        requests = stream.received()
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                messages = await anext(requests, None)  # Python 3.11 raises for an empty tuple
            hello = self._greeted(messages or (), identify)
        except (CallRefused, TimeoutError, MalformedFrame) as error:
            match error:
                case CallRefused():
                    refused = error
                case TimeoutError():
                    refused = CallRefused("no Hello came", grpc.StatusCode.DEADLINE_EXCEEDED)
                case _:
                    refused = CallRefused(str(error))
            logger.warning("refused a session: %s", refused)
            raise refused from error
        except TransportBroken as error:
            return str(error)
        session = DeviceSession(number=next(self._numbers), hello=hello)
        welcome = Welcome(
            session=session.number,
            telemetry_interval_seconds=self._telemetry_seconds,
            ticket_key=session.ticket_key,
        )
        try:
            await stream.write((CoordinatorMessage(welcome=welcome),))
        except TransportBroken as error:
            return str(error)
        before = self.by_device.get(session.device)
        if before is not None:
            self._leave(before, "the device has opened a new session")
        self.by_device[session.device] = session
        self._remember(session)
        logger.info("device %s joined as session %d", session.device, session.number)
        self._driver.joined(session)
        async with self._joined:
            self._joined.notify_all()
        reason = "the stream ended"
        try:
            reason = await _until_first_ends(
                session,
                self._read(session, requests),
                session.outbox.watch(),
                session.write_all(stream),
                _expired(ends_at),
            )
        finally:
            self._leave(session, reason)
        return reason

    def _greeted(self, messages: Sequence[AgentMessage], identify: Callable[[str], None]) -> Hello:
        """The Hello that a stream begins with, checked. Raises `CallRefused`."""
        if not messages:
            raise CallRefused("the stream ended without a Hello")
        if len(messages) > 1 or messages[0].WhichOneof("message") != "hello":
            raise CallRefused("the first message is not a Hello")
        hello = messages[0].hello
        try:
            wire.check_hello(hello)
        except wire.Malformed as error:
            raise CallRefused(str(error)) from error
        identify(hello.device)
        if len(self.by_device) >= MAXIMUM_SESSIONS:
            reason = f"{MAXIMUM_SESSIONS} devices are connected already"
            raise CallRefused(reason, grpc.StatusCode.RESOURCE_EXHAUSTED)
        return hello

    def _identify(self, device: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raise `CallRefused` for a device that does not prove its name. Behind a Unix socket the
        file system is the proof."""
        certified = peer_name(context)
        if self._tls and not context.peer().startswith("unix:") and certified != device:
            reason = f"device {device!r} came with the certificate of {certified!r}"
            raise CallRefused(reason, grpc.StatusCode.PERMISSION_DENIED)

    async def _read(
        self, session: DeviceSession, requests: AsyncIterator[Sequence[AgentMessage]]
    ) -> None:
        unasked = Allowance(UNASKED_PER_SECOND, UNASKED_AT_ONCE)
        stray = Allowance(STRAY_PER_SECOND, STRAY_AT_ONCE)
        async for messages in requests:
            session.received_at = monotonic()
            for each in messages:
                if not session.waits_for(each):
                    await (stray if each.HasField("reply") else unasked).take()
                self._driver.receive(session, each)

    def _remember(self, session: DeviceSession) -> None:
        self.last.pop(session.device, None)
        self.last[session.device] = session
        if len(self.last) > MAXIMUM_SESSIONS:
            del self.last[next(iter(self.last))]

    def _leave(self, session: DeviceSession, reason: str) -> None:
        session.end(reason)
        if self.by_device.get(session.device) is not session:
            return
        del self.by_device[session.device]
        if session.link is not None:
            self._detach(session.link, reason)
        logger.info("device %s left: %s", session.device, reason)
        self._driver.left(session, reason)

    # ---- Session.Exchange ------------------------------------------------------------------------

    async def exchange(self, requests: AsyncIterator[bytes], context: FrameContext) -> None:
        """Serve a device's bulk stream over gRPC."""
        device = device_metadata(context) or ""
        async with aborting(context):
            self._identify(device, context)
            session = await self._session_of(device)
        reason = await self._serve_bulk(session, GrpcTransport(requests, context.write))
        await context.abort(grpc.StatusCode.ABORTED, reason)

    async def exchange_locally(self, device: str, transport: Transport) -> str:
        """Serve a device's bulk stream over the local link; why it ended."""
        try:
            session = await self._session_of(device)
        except CallRefused as error:
            return str(error)
        return await self._serve_bulk(session, transport)

    async def _serve_bulk(self, session: DeviceSession, transport: Transport) -> str:
        """Serve the bulk stream that belongs to a session; why it ended."""
        if session.link is not None:
            self._detach(session.link, "the device has opened another stream")
        link = DeviceLink(session.device, self._hub, transport)
        session.link = link
        session.linked.set()
        self._hub.links[session.device] = link
        reason = "the stream ended"
        try:
            reason = await _until_first_ends(session, link.run())
        finally:
            self._detach(link, reason)
            if session.link is link:
                # What was under way on it is lost, and both sides have to agree on that.
                session.end(f"the bulk stream broke: {reason}")
        return reason

    async def _session_of(self, device: str) -> DeviceSession:
        """The session that a bulk stream belongs to. Raises `CallRefused`."""
        if not re.fullmatch(r"[a-z0-9.-]{1,63}", device):
            raise CallRefused("the stream names no device", grpc.StatusCode.PERMISSION_DENIED)
        try:
            async with asyncio.timeout(HELLO_SECONDS), self._joined:
                await self._joined.wait_for(lambda: device in self.by_device)
        except TimeoutError as error:
            code = grpc.StatusCode.FAILED_PRECONDITION
            raise CallRefused(f"{device} has no session", code) from error
        return self.by_device[device]

    def _detach(self, link: DeviceLink, reason: str) -> None:
        link.bulk.end(reason)
        if self._hub.links.get(link.device) is link:
            del self._hub.links[link.device]


async def _expired(ends_at: float) -> str:
    """Returns when the certificate has expired that a session was opened with."""
    while (left := ends_at - time()) > 0:
        await asyncio.sleep(min(left, _CLOCK_SECONDS))
    return "the certificate that it was opened with has expired"


async def _until_first_ends(session: DeviceSession, *acts: Coroutine[Any, Any, str | None]) -> str:
    """Do all of these until one ends, or the session; why it ended."""
    tasks = [asyncio.create_task(act) for act in acts]
    waited: set[asyncio.Future[Any]] = {*tasks, session.ended}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    ended = session.ended.result() if session.ended.done() else None
    stated = next((result for result in results if isinstance(result, str)), ended)
    return stated or _reason(results, session.device)


def _reason(results: Iterable[object], device: str) -> str:
    for result in results:
        match result:
            case wire.Malformed() | MalformedFrame():
                return str(result)
            case TimeoutError():
                return f"{device} has not read for {WRITE_SECONDS:g} s"
            case asyncio.CancelledError() | TransportBroken():
                pass  # the other side hung up, at whatever moment
            case BaseException():
                logger.error("the stream of %s failed", device, exc_info=result)
                return f"the coordinator failed: {result}"
            case _:
                pass
    return "the stream ended"
