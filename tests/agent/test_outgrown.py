"""Items of one size that take more or less by what they hold: how much, no trial can know."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from agent.conftest import Joined
from agent.fragment_making import MadeFragment, dense_model, write_fragment
from agent.in_process import Thread, make_fragments
from agent.scripted_coordinator import ConnectedDevice, ScriptedCoordinator
from agent.test_larger_items import GROWING
from agent.test_memory_of_fragments import peak_bytes
from agent.test_running import edge, task
from made_models import Made
from shoal_agent.runtime import opening
from shoal_protocol.v1 import session_pb2 as pb

Join = Callable[..., Awaitable[Joined]]
MIB = 1 << 20


def growing(coordinator: ScriptedCoordinator) -> MadeFragment:
    return write_fragment(coordinator.store, GROWING.proto(), 7 * MIB, unknown_sizes=True)


async def run(device: ConnectedDevice, digest: str, rows_mib: int, item: int) -> pb.Reply:
    await device.give(edge(-1, 0, item), {"count": np.array([rows_mib * 256, 1024])})
    source = pb.InputSource(producer=-1, tensors=["count"])
    execute = pb.Execute(task=task(0, item), digest=digest, inputs=[source], results=["y"])
    return await device.ask("execute", execute)


async def test_activations_that_wait_make_room_for_an_item_that_takes_more_than_they_leave(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    made = growing(coordinator)
    joined = await join(budget="32Mi")
    assert (await joined.device.load(made.digest, 7 * MIB)).HasField("loaded")
    await joined.device.give(edge(-1, 0, 9), {"x": np.ones((12, MIB), np.uint8)})
    assert (await run(joined.device, made.digest, 1, item=0)).HasField("executed")
    assert (await run(joined.device, made.digest, 22, item=1)).HasField("executed")
    assert await peak_bytes(joined.device) <= 32 * MIB


async def test_what_made_up_inputs_would_take_is_no_reason_to_refuse_a_fragment(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    made = write_fragment(
        coordinator.store,
        GROWING.proto(),
        7 * MIB,
        largest={"count": (2,)},
        values={"count": (64 * 256, 1024)},
        unknown_sizes=True,
    )
    joined = await join(budget="24Mi")
    assert (await joined.device.load(made.digest, 7 * MIB)).HasField("loaded")
    reply = await run(joined.device, made.digest, 12, item=0)
    assert 12 * MIB < reply.executed.resident_bytes <= 24 * MIB, reply
    assert "in a trial" not in joined.agent.errors.read_text()


async def test_an_item_that_all_of_the_budget_is_too_little_for_fails_alone(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    made = growing(coordinator)
    joined = await join(budget="24Mi")
    assert (await joined.device.load(made.digest, 7 * MIB)).HasField("loaded")
    assert (await run(joined.device, made.digest, 1, item=0)).HasField("executed")
    failure = (await run(joined.device, made.digest, 40, item=1)).failure
    assert failure.code == pb.BUDGET, failure
    assert failure.need_bytes > failure.have_bytes, failure
    assert "it would take more than 24 MiB in its Expand node" in failure.message
    assert (await run(joined.device, made.digest, 1, item=2)).HasField("executed")
    assert await peak_bytes(joined.device) <= 24 * MIB


SPOKEN = Made(
    text="""g (float[n,1024] x, float[1,m] z, float[1,1024] w) => (float[1,1024] y) {
        row = ReduceMax<axes = [0], keepdims = 1>(x)
        one = ReduceMax<keepdims = 0>(z)
        large = Pad(x, wide)
        most = ReduceMax<axes = [0], keepdims = 1>(large)
        sum = Add(row, one) both = Add(most, w) y = Add(both, sum) }""",
    weights={"wide": np.array([1 << 14, 0, 0, 0])},
    shapes={},
)
"""Sixteen thousand rows more than it gets."""


@pytest.mark.parametrize(
    ("seen", "news"),
    [
        ({}, {"x": (5, 1024)}),
        ({"x": (4, 1024)}, {"x": (5, 1024)}),
        ({"x": (5,)}, {"x": (5, 1024)}),
        ({"x": (5, 1024)}, {}),
    ],
)
async def test_what_took_too_much_says_the_sizes_that_neither_a_plan_nor_an_item_has_said(
    coordinator: ScriptedCoordinator,
    join: Join,
    seen: dict[str, tuple[int, ...]],
    news: dict[str, tuple[int, ...]],
) -> None:
    made = write_fragment(
        coordinator.store,
        SPOKEN.proto(),
        7 * MIB,
        largest={"z": (1, 3)},
        seen=seen,
        unknown_sizes=True,
    )
    joined = await join(budget="24Mi")
    assert (await joined.device.load(made.digest, 7 * MIB)).HasField("loaded")
    given = {"x": (5, 1024), "z": (1, 2), "w": (1, 1024)}
    tensors = {name: np.ones(shape, np.float32) for name, shape in given.items()}
    await joined.device.give(edge(-1, 0, 0), tensors)
    source = pb.InputSource(producer=-1, tensors=sorted(given))
    execute = pb.Execute(task=task(0, 0), digest=made.digest, inputs=[source], results=["y"])
    failure = (await joined.device.ask("execute", execute)).failure
    assert failure.code == pb.BUDGET, failure
    assert {each.name: tuple(each.sizes) for each in failure.seen} == news


async def test_fragments_that_have_left_are_forgotten_and_those_that_are_here_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known of them would grow with all that a device has ever had."""
    monkeypatch.setattr(opening, "_KNOWN_UNPLANNED", 2)
    made = [
        write_fragment(tmp_path, dense_model([16, 16 * width]), MIB, unknown_sizes=True)
        for width in range(1, 6)
    ]
    with Thread(1) as thread:
        fragments = make_fragments(tmp_path, thread)
        stays, *others = (each.digest for each in made)
        await fragments.load(stays, MIB, [])
        for digest in others:
            await fragments.load(digest, MIB, [])
            assert not fragments.opening.is_known(digest)
            await fragments.unload(digest)
        assert not fragments.opening.is_known(stays)
        assert sum(not fragments.opening.is_known(each.digest) for each in made) <= 3
        await fragments.close()
