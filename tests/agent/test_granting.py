"""Grants carried out: what is done at once, and what is left for later."""

import asyncio

from shoal_agent.memory.residency import Grant, Ledger
from shoal_agent.runtime.granting import Granting
from shoal_agent.telemetry.counters import Counters
from shoal_protocol.units import Bytes


class Device:
    """A runtime that packs a fragment in parts, each when it is allowed to."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.allowed = asyncio.Semaphore(0)

    async def grant(self, digest: str, size: int) -> None:
        self.done.append(f"{digest} within {size}")

    async def pack(self, digest: str) -> bool:
        await self.allowed.acquire()
        self.done.append(f"part of {digest}")
        return self.done.count(f"part of {digest}") < 3


async def test_a_grant_is_carried_out_before_its_fragment_is_packed_part_after_part() -> None:
    device = Device()
    granting = Granting(
        Ledger(budget=Bytes(64)), device.grant, device.pack, Counters(), lambda *_: None
    )
    granting.begin(Grant(digest="f", size=Bytes(8)))
    await granting.wait()
    assert device.done == ["f within 8"], "nobody waits for what is left"
    for parts in (1, 2, 3, 3):
        device.allowed.release()
        for _ in range(5):
            await asyncio.sleep(0)
        assert device.done == ["f within 8", *["part of f"] * parts]


async def test_what_is_left_is_given_up_when_the_agent_ends() -> None:
    device = Device()
    granting = Granting(
        Ledger(budget=Bytes(64)), device.grant, device.pack, Counters(), lambda *_: None
    )
    granting.begin(Grant(digest="f", size=Bytes(8)))
    await granting.close()
    device.allowed.release()
    await asyncio.sleep(0)
    assert device.done == ["f within 8"]
