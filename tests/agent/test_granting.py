"""Grants carried out: what is done at once, and what is left for later."""

import asyncio
from concurrent.futures import Future
from functools import partial

import pytest

from shoal_agent.memory.allocation import Point
from shoal_agent.memory.demands import Grant, Reclaim
from shoal_agent.memory.residency import Ledger
from shoal_agent.runtime.granting import Granting, finish
from shoal_agent.telemetry.counters import Counters
from shoal_protocol.units import Bytes

ALL = Point(40, 0.0)


class Device:
    """A runtime that opens a fragment whole, and packs it in parts, each when it is allowed to."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.allowed = asyncio.Semaphore(0)
        self.openings: list[Future[bool]] = []
        self.turn = asyncio.Lock()

    async def grant(self, digest: str, size: int) -> None:
        async with self.turn:
            self.done.append(f"{digest} within {size}")

    async def widen(self, digest: str) -> Future[bool] | None:
        self.done.append(f"{digest} is looked at")
        return self.openings.pop(0) if self.openings else None

    async def pack(self, digest: str) -> bool:
        await self.allowed.acquire()
        self.done.append(f"part of {digest}")
        return self.done.count(f"part of {digest}") < 3

    def change(self, digest: str) -> None:
        self.done.append(f"{digest} changes")


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def granting(device: Device) -> Granting:
    later = partial(finish, device.widen, device.pack, device.change)
    ledger = Ledger(budget=Bytes(64))
    return Granting(ledger, device.grant, later, Counters(), lambda *_: None)


async def a_moment() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_grant_is_carried_out_before_its_fragment_is_packed_part_after_part(
    device: Device, granting: Granting
) -> None:
    granting.begin(Grant(digest="f", size=Bytes(8)))
    await granting.wait()
    assert device.done[0] == "f within 8"
    assert "part of f" not in device.done, "nobody waits for what is left"
    for parts in (1, 2, 3, 3):
        device.allowed.release()
        await a_moment()
        assert device.done == ["f within 8", "f is looked at", *["part of f"] * parts]


async def test_what_is_opened_beside_is_asked_for_again_and_a_change_is_told_before_it_is_made(
    device: Device, granting: Granting
) -> None:
    stopped, opened = Future[bool](), Future[bool]()
    device.openings = [stopped, opened]
    granting.begin(Grant(digest="f", size=Bytes(8)))
    await granting.wait()
    await a_moment()
    assert device.done == ["f within 8", "f is looked at"]
    stopped.set_result(False)
    await a_moment()
    assert device.done[2:] == ["f is looked at"], "nothing has changed, and it is tried again"
    opened.set_result(True)
    await a_moment()
    assert device.done[3:] == ["f changes", "f is looked at"]
    device.allowed.release()
    await a_moment()
    assert device.done[5:] == ["part of f"], "what it did not become is packed"


async def test_what_is_left_is_given_up_when_the_agent_ends(
    device: Device, granting: Granting
) -> None:
    granting.begin(Grant(digest="f", size=Bytes(8)))
    await granting.close()
    device.allowed.release()
    await a_moment()
    assert "part of f" not in device.done


async def test_a_grant_is_carried_out_though_whoever_waits_for_it_is_cancelled(
    device: Device, granting: Granting
) -> None:
    await device.turn.acquire()
    granting.begin(Grant(digest="f", size=Bytes(8)))
    waiting = asyncio.create_task(granting.wait())
    await a_moment()
    waiting.cancel()
    await asyncio.wait((waiting,))
    device.turn.release()
    await a_moment()
    assert device.done == ["f within 8", "f is looked at"]


async def test_what_was_lent_is_taken_back_within_what_a_load_has_left_meanwhile(
    device: Device,
) -> None:
    """The load takes more than what was lent, while the first of two is still to give that back."""
    ledger = Ledger(budget=Bytes(96))
    later = partial(finish, device.widen, device.pack, device.change)
    granting = Granting(ledger, device.grant, later, Counters(), lambda *_: None)
    for digest in ("a", "b"):
        ledger.request_load(digest, Bytes(24))
        ledger.finish_load(digest, least=Bytes(8), curve=(Point(8, 16.0), Point(32, 0.0), ALL))
    assert {grant.digest for grant in ledger.lend()} == {"a", "b"}
    await device.turn.acquire()
    granting.take_back()
    await a_moment()
    match ledger.request_load("c", Bytes(76)):
        case Reclaim(grants=grants):
            for grant in grants:
                granting.begin(grant)
    device.turn.release()
    await granting.wait()
    last = dict(each.split(" within ") for each in device.done if " within " in each)
    assert {each: int(size) for each, size in last.items()} == {
        each: share.granted for each, share in ledger.shares.items()
    }
    assert 0 < sum(share.granted for share in ledger.shares.values()) <= 20
