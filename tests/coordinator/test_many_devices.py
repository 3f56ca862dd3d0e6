"""Devices that know more, together, than one message can hold."""

import asyncio

from coordinator.world import World
from shoal_protocol import PROTOCOL
from shoal_protocol.channels import MAXIMUM_MESSAGE_BYTES
from shoal_protocol.coordinator_client import CoordinatorClient
from shoal_protocol.services import SessionClient
from shoal_protocol.v1 import session_pb2 as pb

DEVICES = 130
FRAGMENTS = 256


def hello_of(name: str) -> pb.Hello:
    """Of a device whose disk is full of small fragments, which have all run there."""
    within = [pb.TimeWithin(granted_bytes=1 << 20 << each, seconds=0.01) for each in range(4)]
    hello = pb.Hello(protocol=PROTOCOL, device=name, budget_bytes=1 << 30)
    for number in range(FRAGMENTS):
        digest = f"sha256:{number:064x}"
        hello.cached.add(digest=digest, bytes=4 << 20, task_seconds=0.01, within=within)
    return hello


async def test_all_devices_are_listed_however_much_they_know(world: World) -> None:
    names = [f"pi-{number:03}" for number in range(DEVICES)]
    sessions = SessionClient(world.channel)
    for name in names:
        stream = sessions.connect()
        await stream.write(pb.AgentMessage(hello=hello_of(name)))
        assert isinstance(await stream.read(), pb.CoordinatorMessage)
    client = CoordinatorClient(world.channel)
    async with asyncio.timeout(60):
        found = await client.devices()
    assert [each.name for each in found] == names
    assert {len(each.times) for each in found} == {FRAGMENTS}
    assert sum(each.ByteSize() for each in found) > MAXIMUM_MESSAGE_BYTES
