"""Streams to peers: one for each peer that activations are sent to, and a bound on how many."""

import asyncio
from collections import OrderedDict
from contextlib import suppress
from typing import Final

import grpc

from shoal_agent.telemetry.counters import Counters
from shoal_agent.transport.shaping import Uplink
from shoal_protocol.bulk.link import BulkLink, OutboundActivation, Undelivered
from shoal_protocol.channels import AddressRefused, Credentials, open_channel
from shoal_protocol.codecs import LinkCodec
from shoal_protocol.services import FileStream, PeerClient
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest

MAXIMUM_LINKS: Final = 128
"""Beyond these, the one that was used longest ago is closed for a new one."""
_USED_SECONDS: Final = 0.1
"""How often it is seen whether a stream that is left is used still."""
_CONFIRM_SECONDS: Final = 5.0
"""How long a peer may take to say what has arrived, before one hangs up."""


class PeerLink:
    """The stream to one peer, opened when it is first needed and again after it broke."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        uplink: Uplink,
        counters: Counters | None = None,
        address: str = "",
    ) -> None:
        """`address` is the channel's, for the local link that may be there."""
        self._channel = channel
        self._address = address
        self._client = PeerClient(channel)
        self._uplink = uplink
        self._traffic = (counters or Counters()).traffic
        self._codec = LinkCodec()
        self._bulk: BulkLink | None = None
        self._serving: set[asyncio.Task[str]] = set()
        self._fetches: set[FileStream] = set()
        self._users = 0

    @property
    def idle(self) -> bool:
        return not self._users

    @property
    def bulk(self) -> BulkLink | None:
        """Its stream, if there is one."""
        return None if self._bulk is None or self._bulk.broken is not None else self._bulk

    async def send(self, outbound: OutboundActivation) -> int:
        """Deliver to the peer; the bytes that it took on the wire. Raises `Undelivered`,
        `UnsupportedTensor`."""
        bulk = self._bulk
        if bulk is None or bulk.broken is not None:
            bulk = self.open()
        self._users += 1
        try:
            return await bulk.send(outbound)
        finally:
            self._users -= 1

    def open(self) -> BulkLink:
        """Its stream, a new one where there is none."""
        if (bulk := self.bulk) is None:
            transport = self._uplink.open(self._address, self._client.push)
            bulk = self._bulk = BulkLink(transport, codec=self._codec, traffic=self._traffic)
            serving = asyncio.create_task(bulk.run(), name="stream to a peer")
            self._serving.add(serving)
            serving.add_done_callback(self._served)
        return bulk

    def fetch_fragment(self, request: FetchFragmentRequest, timeout: float) -> FileStream:
        """A file of a fragment from the peer's cache; `timeout` in seconds."""
        call = self._client.fetch_fragment(request, timeout)
        self._users += 1
        self._fetches.add(call)
        call.add_done_callback(lambda _: self._fetched(call))
        return call

    def close_stream(self, reason: str) -> None:
        """Give up what is on its way; what is sent later goes over another stream."""
        if self._bulk is not None:
            self._bulk.end(reason)

    def lose(self, reason: str) -> None:
        """Nothing comes from the peer any more, and nothing gets there."""
        self.close_stream(reason)
        for call in list(self._fetches):
            call.cancel()

    async def hang_up(self) -> None:
        """Close it when what is on its way has arrived, of what nobody acknowledges too: else that
        would count as lost."""
        while self._users:
            await asyncio.sleep(_USED_SECONDS)
        if self.bulk is not None:
            with suppress(Undelivered, TimeoutError):
                async with asyncio.timeout(_CONFIRM_SECONDS):
                    await self.bulk.confirm()
        await self.close()

    async def close(self) -> None:
        """Close the stream and the connection, for good."""
        self.close_stream("closed")
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._channel.close()

    def _served(self, serving: asyncio.Task[str]) -> None:
        self._serving.discard(serving)
        if not serving.cancelled():
            serving.exception()  # senders have the reason

    def _fetched(self, call: FileStream) -> None:
        self._fetches.discard(call)
        self._users -= 1


class PeerLinks:
    """The links to peers, by address. The certificate there must be the meant device's."""

    def __init__(
        self,
        credentials: Credentials | None,
        uplink: Uplink,
        counters: Counters,
        *,
        insecure: bool,
    ) -> None:
        self._credentials = credentials
        self._insecure = insecure
        self._uplink = uplink
        self._counters = counters
        self._links: OrderedDict[tuple[str, str], PeerLink] = OrderedDict()
        self._closing: dict[asyncio.Task[None], tuple[str, PeerLink]] = {}

    def __len__(self) -> int:
        return len(self._links)

    def link(self, device: str, address: str) -> PeerLink:
        """The link to a peer; raises `Undelivered` where its address cannot be used, or every link
        that there may be is busy."""
        key = (device, address)
        if key not in self._links:
            self._make_room()
            try:
                channel = open_channel(
                    address,
                    self._credentials,
                    insecure=self._insecure,
                    server_name=device or None,
                )
            except (AddressRefused, OSError) as error:
                raise Undelivered(str(error)) from error
            self._links[key] = PeerLink(channel, self._uplink, self._counters, address)
        self._links.move_to_end(key)
        return self._links[key]

    def fetch_fragment(
        self, device: str, address: str, request: FetchFragmentRequest, timeout: float
    ) -> FileStream:
        """Over the link that there is now: one that nobody uses between two parts is closed.
        Raises `Undelivered`."""
        return self.link(device, address).fetch_fragment(request, timeout)

    def open(self) -> dict[str, BulkLink]:
        """The streams that there are, by device."""
        bulks = {device: link.bulk for (device, _), link in self._links.items()}
        return {device: bulk for device, bulk in bulks.items() if bulk is not None}

    def lose(self, device: str) -> None:
        """A device is lost: whatever is on its way to it, or from it, fails at once."""
        links = [(name, link) for (name, _), link in self._links.items()]
        for name, link in (*links, *self._closing.values()):
            if name == device:
                link.lose(f"the coordinator has lost {device}")

    def interrupt(self, reason: str) -> None:
        """End the streams on which something large is being sent: nobody waits for it any more."""
        for bulk in self.open().values():
            if bulk.leaving:
                bulk.end(reason)

    def renew(self) -> None:
        """What is sent from now on goes over new streams; what is on its way arrives."""
        for key in list(self._links):
            self._close(key)

    async def close(self) -> None:
        """Close all of them."""
        links = [*self._links.values(), *(link for _, link in self._closing.values())]
        self._links.clear()
        for closing in self._closing:
            closing.cancel()  # it may wait for a fetch
        await asyncio.gather(*(link.close() for link in links))

    async def close_idle(self) -> None:
        """Close those where nothing is on its way: each connection takes some 75 KiB."""
        for key in [key for key, link in self._links.items() if link.idle]:
            self._close(key)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _make_room(self) -> None:
        if len(self._links) < MAXIMUM_LINKS:
            return
        self._counters.full_queues["peers"] += 1
        idle = next((key for key, link in self._links.items() if link.idle), None)
        if idle is None:
            raise Undelivered(f"streams to {MAXIMUM_LINKS} peers are busy already")
        self._close(idle)

    def _close(self, key: tuple[str, str]) -> None:
        link = self._links.pop(key)
        closing = asyncio.create_task(link.hang_up())
        self._closing[closing] = key[0], link
        closing.add_done_callback(self._closing.pop)
