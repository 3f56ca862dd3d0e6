"""Both services over a real socket: typed messages where they are small, raw bytes elsewhere."""

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from shoal_protocol.assembly import ActivationAssembler, ReceivedActivation
from shoal_protocol.channels import open_channel
from shoal_protocol.files import FileReceiver, file_frames
from shoal_protocol.frames import TransferError, acknowledgement, split_frame
from shoal_protocol.listener import Listener
from shoal_protocol.services import (
    ConnectContext,
    FileContext,
    FrameContext,
    FrameStream,
    PeerClient,
    SessionClient,
    add_peer_service,
    add_session_service,
    device_metadata,
)
from shoal_protocol.tensors import ActivationKey, encode_activation
from shoal_protocol.v1.session_pb2 import AgentMessage, CoordinatorMessage, Hello, Welcome
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, FetchFragmentRequest

KEY = ActivationKey(job="ocr", epoch=1, item=2, producer=0, consumer=1)
WEIGHTS = bytes(range(256)) * 20_000


class Both:
    """A coordinator and an agent in one: it takes what comes, and answers."""

    def __init__(self) -> None:
        self.received: list[ReceivedActivation] = []
        self.devices: list[str | None] = []

    async def connect(self, requests: AsyncIterator[AgentMessage], context: ConnectContext) -> None:
        async for message in requests:
            assert message.WhichOneof("message") == "hello"
            await context.write(CoordinatorMessage(welcome=Welcome(session=message.hello.protocol)))

    async def exchange(self, requests: AsyncIterator[bytes], context: FrameContext) -> None:
        self.devices.append(device_metadata(context))
        await self.push(requests, context)

    async def push(self, requests: AsyncIterator[bytes], context: FrameContext) -> None:
        assembler = ActivationAssembler()
        async for message in requests:
            try:
                received = assembler.feed(message)
            except TransferError as error:
                answer = acknowledgement(error.transfer or 0, error.outcome, str(error))
                await context.write(bytes(answer))
                continue
            if received is not None:
                self.received.append(received)
                await context.write(bytes(acknowledgement(received.transfer)))

    async def fetch_fragment(self, request: FetchFragmentRequest, context: FileContext) -> None:
        if request.file != "weights.bin":
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no file {request.file}")
        for message in file_frames(io.BytesIO(WEIGHTS), request, len(WEIGHTS)):
            await context.write(message)


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[tuple[Both, grpc.aio.Channel]]:
    implementation = Both()

    def register(server: grpc.aio.Server) -> None:
        add_session_service(server, implementation)
        add_peer_service(server, implementation)

    listener = Listener(register, connections=10)
    address = f"unix:{tmp_path}/both.sock"
    await listener.open(address)
    async with open_channel(address) as channel:
        yield implementation, channel
    await listener.stop(None)


async def answer_of(call: FrameStream) -> Acknowledgement:
    message = await asyncio.wait_for(call.read(), timeout=60)
    assert isinstance(message, bytes)
    return split_frame(message)[0].acknowledgement


async def test_a_session_begins_with_hello_and_welcome(
    both: tuple[Both, grpc.aio.Channel],
) -> None:
    call = SessionClient(both[1]).connect()
    await call.write(AgentMessage(hello=Hello(protocol=41, device="pi-4")))
    answer = await asyncio.wait_for(call.read(), timeout=60)
    assert answer == CoordinatorMessage(welcome=Welcome(session=41))
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() == grpc.StatusCode.OK


async def test_activations_are_acknowledged_one_by_one(
    both: tuple[Both, grpc.aio.Channel],
) -> None:
    implementation, channel = both
    call = PeerClient(channel).push()
    tensors = {"x": np.arange(1_000_000, dtype=np.float32)}
    for transfer in (1, 2, 3):
        for message in encode_activation(KEY, "pi-4", tensors, transfer=transfer):
            await call.write(message)
        assert (await answer_of(call)).outcome == Acknowledgement.ACCEPTED
    assert [received.transfer for received in implementation.received] == [1, 2, 3]
    for received in implementation.received:
        np.testing.assert_array_equal(received.tensors["x"], tensors["x"])
    await call.done_writing()
    assert await call.code() == grpc.StatusCode.OK


async def test_a_refused_transfer_does_not_end_the_stream(
    both: tuple[Both, grpc.aio.Channel],
) -> None:
    implementation, channel = both
    call = SessionClient(channel).exchange("pi-4")
    await call.write(b"nonsense")
    answer = await answer_of(call)
    assert answer.outcome == Acknowledgement.REFUSED
    assert "does not start with a header" in answer.message
    for message in encode_activation(KEY, "", {"x": np.zeros(3)}, transfer=1):
        await call.write(message)
    assert (await answer_of(call)).outcome == Acknowledgement.ACCEPTED
    assert implementation.devices == ["pi-4"]
    await call.done_writing()
    assert await call.code() == grpc.StatusCode.OK


@pytest.mark.parametrize("offset", [0, 1_500_000, len(WEIGHTS)])
@pytest.mark.parametrize("client", [SessionClient, PeerClient])
async def test_a_file_is_fetched_from_either_service(
    both: tuple[Both, grpc.aio.Channel],
    client: type[SessionClient] | type[PeerClient],
    offset: int,
) -> None:
    request = FetchFragmentRequest(digest="sha256:0", file="weights.bin", offset=offset)
    receiver = FileReceiver(request, limit_bytes=len(WEIGHTS))
    fetched = bytearray(WEIGHTS[:offset])
    async for message in client(both[1]).fetch_fragment(request, timeout=60):
        fetched += receiver.feed(message)
    assert receiver.complete
    assert fetched == WEIGHTS


async def test_an_abort_reaches_the_caller(both: tuple[Both, grpc.aio.Channel]) -> None:
    request = FetchFragmentRequest(digest="sha256:0", file="passwd")
    with pytest.raises(grpc.aio.AioRpcError, match="no file passwd") as caught:
        async for _ in SessionClient(both[1]).fetch_fragment(request, timeout=60):
            pass
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
