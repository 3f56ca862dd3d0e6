"""Releases leave with the next message to their device, or by themselves a moment later."""

import asyncio
from collections.abc import Sequence

import pytest

from shoal_coordinator.dispatch.instructions import Release
from shoal_coordinator.server import messenger
from shoal_coordinator.server.device_session import DeviceSession
from shoal_coordinator.server.messenger import Messenger
from shoal_protocol.v1.session_pb2 import CoordinatorMessage, Hello


def release(device: str, item: int) -> Release:
    return Release(device=device, job="job", epoch=1, item=item, stage=0)


async def sent(session: DeviceSession) -> list[str]:
    """The messages that a session has to send, each by what it is."""
    found: list[CoordinatorMessage] = []

    async def write(messages: Sequence[CoordinatorMessage]) -> None:
        found.extend(messages)

    writing = asyncio.create_task(session.outbox.write_all(write, lambda: False))
    await session.outbox.sent()
    writing.cancel()
    return [f"{each.WhichOneof('message')}" for each in found]


def released(*orders: Release) -> dict[str, DeviceSession]:
    """Sessions of two devices, of which the first is to get a message as well."""
    sessions = {name: DeviceSession(number=1, hello=Hello(device=name)) for name in ("a", "b")}
    messages = Messenger(sessions)
    for each in orders:
        messages.release(each)
    messages.flush_soon()
    messages.send("a", CoordinatorMessage(probe={"nonce": 1}))
    return sessions


async def test_a_message_overtakes_no_release_of_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messenger, "RELEASE_SECONDS", 3600)  # nothing leaves by itself meanwhile
    sessions = released(release("a", 1), release("b", 2), release("a", 3))
    assert await sent(sessions["a"]) == ["release", "probe"]
    assert await sent(sessions["b"]) == []


async def test_a_release_leaves_by_itself_where_no_message_takes_it_along() -> None:
    sessions = released(release("a", 1), release("b", 2), release("a", 3))
    assert await sent(sessions["a"]) == ["release", "probe"]
    async with asyncio.timeout(60):
        while not sessions["b"].outbox:
            await asyncio.sleep(0.01)
    assert await sent(sessions["b"]) == ["release"]
    assert await sent(sessions["a"]) == []


async def test_what_was_released_in_a_session_is_not_sent_in_the_next() -> None:
    sessions = {"a": DeviceSession(number=1, hello=Hello(device="a"))}
    messages = Messenger(sessions)
    messages.release(release("a", 1))
    messages.left("a")
    sessions["a"] = DeviceSession(number=2, hello=Hello(device="a"))
    messages.send("a", CoordinatorMessage(probe={"nonce": 2}))
    assert await sent(sessions["a"]) == ["probe"]
