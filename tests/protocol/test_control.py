"""Control streams between processes of one host."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from shoal_protocol.bulk.local import CONTROL, LocalTransport, connect, listen
from shoal_protocol.bulk.transport import TransportBroken, describe_status
from shoal_protocol.channels import STATUS_LOST
from shoal_protocol.control import LOCAL_MESSAGE_BYTES, LocalControl
from shoal_protocol.frames import Frame, MalformedFrame, acknowledgement
from shoal_protocol.v1.session_pb2 import (
    AgentMessage,
    CoordinatorMessage,
    Probe,
    ProbeReply,
    Release,
    Task,
)
from shoal_protocol.v1.tensors_pb2 import FrameHeader

AgentsEnd = LocalControl[AgentMessage, CoordinatorMessage]
CoordinatorsEnd = LocalControl[CoordinatorMessage, AgentMessage]


class Echo:
    """A coordinator that answers each message with a probe of its number; then it says goodbye."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.devices: list[str] = []
        self.received: list[int] = []
        self.failed: list[Exception] = []

    async def serve(self, device: str, transport: LocalTransport) -> str:
        self.devices.append(device)
        stream: CoordinatorsEnd = LocalControl(transport, AgentMessage.FromString)
        try:
            async for messages in stream.received():
                self.received.append(len(messages))
                for message in messages:
                    probe = Probe(nonce=message.probe_reply.nonce)
                    await stream.write([CoordinatorMessage(probe=probe)])
                    self.answers -= 1
                if self.answers <= 0:
                    break
        except (MalformedFrame, TransportBroken) as error:
            self.failed.append(error)
            raise
        return "that is all"


@asynccontextmanager
async def connected(folder: Path, echo: Echo) -> AsyncIterator[LocalTransport]:
    address = f"unix:{folder}/s"
    listener = listen(address, echo.serve, connections=10, suffix=CONTROL)
    assert listener is not None
    transport = connect(address, "pi-4", CONTROL)
    assert transport is not None
    try:
        yield transport
    finally:
        await transport.close()
        await listener.stop()


async def note(stream: AgentsEnd, heard: list[int]) -> None:
    """Note the numbers that come, until the stream ends."""
    async with asyncio.timeout(60):
        async for messages in stream.received():
            heard += [message.probe.nonce for message in messages]


async def test_messages_come_in_order_and_the_end_says_why(tmp_path: Path) -> None:
    echo = Echo(answers=300)
    async with connected(tmp_path, echo) as transport:
        stream: AgentsEnd = LocalControl(transport, CoordinatorMessage.FromString)
        numbers = range(300)
        for start in range(0, 300, 50):
            await stream.write(
                [
                    AgentMessage(probe_reply=ProbeReply(nonce=number))
                    for number in numbers[start : start + 50]
                ]
            )
        heard: list[int] = []
        with pytest.raises(TransportBroken, match="that is all"):
            await note(stream, heard)
    assert heard == list(numbers)
    assert echo.devices == ["pi-4"]


async def test_a_message_of_the_largest_size_passes(tmp_path: Path) -> None:
    echo = Echo(answers=1)
    async with connected(tmp_path, echo) as transport:
        stream: AgentsEnd = LocalControl(transport, CoordinatorMessage.FromString)
        message = AgentMessage(probe_reply=ProbeReply(nonce=7))
        message.evicted.reason = "x" * (LOCAL_MESSAGE_BYTES - 64)
        await stream.write([message])
        async with asyncio.timeout(60):
            answers = await anext(stream.received())
    assert [each.probe.nonce for each in answers] == [0], "the other kind has taken its place"


async def test_a_message_that_comes_in_parts_is_received_when_it_is_whole(tmp_path: Path) -> None:
    echo = Echo(answers=1)
    async with connected(tmp_path, echo) as transport:
        reply = AgentMessage(probe_reply=ProbeReply(nonce=7))
        frame = FrameHeader(message=reply.SerializeToString()).SerializeToString()
        whole = struct.pack("<II", len(frame), 0) + frame
        stream: AgentsEnd = LocalControl(transport, CoordinatorMessage.FromString)
        for part in (whole[:3], whole[3:-1], whole[-1:]):
            transport._socket.send(part)
            await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            answers = await anext(stream.received())
    assert [each.probe.nonce for each in answers] == [7]
    assert all(echo.received), "nothing was told as received before"


@pytest.mark.parametrize(
    "frame",
    [
        acknowledgement(1),
        Frame(FrameHeader(message=b"\xff\xff").SerializeToString()),
        Frame(FrameHeader(message=b"").SerializeToString(), (b"payload",), 7),
        Frame(b"\xff"),
    ],
    ids=["of another kind", "no message", "with a payload", "no header"],
)
async def test_rubbish_ends_the_stream_with_a_reason(tmp_path: Path, frame: Frame) -> None:
    echo = Echo(answers=10)
    async with connected(tmp_path, echo) as transport:
        await transport.write([frame])
        stream: AgentsEnd = LocalControl(transport, CoordinatorMessage.FromString)
        with pytest.raises(TransportBroken):
            await note(stream, [])
    assert [type(error) for error in echo.failed] == [MalformedFrame]


async def test_a_frame_that_ends_halfway_is_no_message(tmp_path: Path) -> None:
    echo = Echo(answers=10)
    async with connected(tmp_path, echo) as transport:
        release = CoordinatorMessage(release=Release(tasks=[Task(job="j")]))
        frame = FrameHeader(message=release.SerializeToString()).SerializeToString()
        whole = struct.pack("<II", len(frame), 0) + frame
        transport._socket.send(whole[:-3])
        await transport.close()
        async with asyncio.timeout(60):
            while not echo.failed:
                await asyncio.sleep(0.01)
    assert "within a frame" in str(echo.failed[0])


def test_a_stream_whose_status_was_lost_is_told_of_in_words() -> None:
    """As that of a machine that was suspended for longer than the other side waited."""
    assert describe_status(grpc.StatusCode.INTERNAL, STATUS_LOST) == "the stream ended"
    assert describe_status(grpc.StatusCode.ABORTED, "silent") == "ABORTED: silent"
