"""Several items in one run: which, within what memory, and what becomes of a run that fails."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import TensorProto, helper, numpy_helper

from agent.conftest import Joined
from agent.fragment_making import InBlocks, MadeFragment, dense_model, table_model, write_fragment
from agent.in_process import MIB
from agent.scripted_coordinator import PATIENCE_SECONDS, ConnectedDevice, ScriptedCoordinator
from agent.test_inline import execute
from agent.test_running import edge
from shoal_agent.execution.joining import NotSplit, join, likeness, split
from shoal_agent.runtime.failures import Exceeded, RuntimeFailed
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.runtime.results import RunResult
from shoal_protocol.assembly import ActivationAssembler, ReceivedActivation
from shoal_protocol.tensors import Array, encode_activation
from shoal_protocol.v1 import session_pb2 as pb

Make = Callable[..., Fragments]
Items = list[dict[str, Array]]


@given(
    count=st.integers(1, 5),
    rows=st.integers(1, 3),
    width=st.integers(1, 4),
    kind=st.sampled_from([np.float32, np.int64, np.bool_]),
    data=st.data(),
)
def test_what_is_joined_and_split_again_is_what_it_was(
    count: int, rows: int, width: int, kind: type[np.generic], data: st.DataObject
) -> None:
    counted = {"sizes": [1]}
    items: Items = [
        {
            "x": data.draw(arrays.arrays(kind, (rows, width))),
            "sizes": np.array([7, rows, width], np.int64),
        }
        for _ in range(count)
    ]
    assert len({likeness(item, counted) for item in items}) == 1
    joined = join(items, counted)
    assert joined["x"].shape == (count * rows, width)
    assert joined["sizes"].tolist() == [7, count * rows, width]
    shapes = {"x": (rows, width), "sizes": (3,)}
    for item, got in zip(items, split(joined, count, shapes, counted), strict=True):
        assert got.keys() == item.keys()
        for name, array in item.items():
            np.testing.assert_array_equal(got[name], array)
            assert got[name].base is None, "it would keep the others in memory"


def test_outputs_that_are_not_those_of_so_many_items_are_refused() -> None:
    with pytest.raises(NotSplit, match=r"y has the shape \[1, 2\] for 2 items"):
        split({"y": np.zeros((1, 2))}, 2, {"y": (1, 2)}, {})
    with pytest.raises(NotSplit, match="n counts 3 for 2 items"):
        split({"n": np.array([3, 1])}, 2, {"n": (2,)}, {"n": [0]})


def test_items_of_other_shapes_types_or_sizes_are_not_alike() -> None:
    counted = {"n": [0]}
    x, n = np.zeros((1, 2), np.float32), np.array([1, 2])
    one = likeness({"x": x, "n": n}, counted)
    assert one == likeness({"x": x + 1, "n": n}, counted)
    for other in ({"x": x[:, :1], "n": n}, {"x": x.astype(int), "n": n}, {"x": x, "n": n + 1}):
        assert one != likeness(other, counted)
    for empty in ({"x": x[:0], "n": n}, {"x": np.array(1), "n": n}, {"x": x, "n": n[:0]}):
        assert likeness(empty, counted) is None


async def alone(fragments: Fragments, made: MadeFragment, item: Mapping[str, Array]) -> RunResult:
    """Run an item by itself, as the first of those like it."""
    result = await fragments.run(made.digest, item)
    fragments.batches.note(made.digest, item, result.outputs)
    return result


async def together(fragments: Fragments, made: MadeFragment, items: Items) -> list[RunResult]:
    """Run what is chosen of these at once."""
    chosen = fragments.batches.choose(made.digest, items)
    assert len(chosen) > 1
    try:
        return await fragments.run_together(made.digest, [items[at] for at in chosen])
    finally:
        fragments.batches.settled(len(chosen))


def inputs(count: int, *shape: int) -> Items:
    chance = np.random.default_rng(0)
    return [{"x": chance.standard_normal(shape, dtype=np.float32)} for _ in range(count)]


@pytest.mark.parametrize("blocks", [None, InBlocks(3)])
async def test_items_like_one_that_ran_alone_run_at_once_and_give_the_same(
    make: Make, tmp_path: Path, blocks: InBlocks | None
) -> None:
    model = dense_model([64, 512, 512, 64])
    made = write_fragment(tmp_path, model, 8 * MIB, blocks, batched=True)
    fragments, items = make(), inputs(5, 1, 64)
    await fragments.load(made.digest, 8 * MIB if blocks is None else made.least_bytes, [])
    assert fragments.batches.choose(made.digest, [*items]) == [0], "none has run alone"
    wanted = [(await alone(fragments, made, item)).outputs["y"] for item in items]
    assert fragments.batches.choose(made.digest, [inputs(1, 2, 64)[0], *items]) == [0]
    results = await together(fragments, made, items)
    assert [each.batch for each in results] == [5] * 5
    for result, each in zip(results, wanted, strict=True):
        np.testing.assert_allclose(result.outputs["y"], each, rtol=1e-4, atol=1e-5)


async def test_items_of_other_shapes_or_that_are_gone_are_left_out(
    make: Make, tmp_path: Path
) -> None:
    made = write_fragment(tmp_path, dense_model([64, 64]), 8 * MIB, batched=True)
    fragments, (first, *others) = make(), inputs(3, 1, 64)
    await fragments.load(made.digest, 8 * MIB, [])
    await alone(fragments, made, first)
    items = [first, inputs(1, 2, 64)[0], None, *others]
    assert fragments.batches.choose(made.digest, items) == [0, 3, 4]
    assert fragments.batches.choose(made.digest, [None, *others]) == [0]


async def test_a_fragment_whose_manifest_says_nothing_of_it_runs_items_one_by_one(
    make: Make, tmp_path: Path
) -> None:
    made = write_fragment(tmp_path, dense_model([64, 64]), 8 * MIB)
    fragments, items = make(), inputs(3, 1, 64)
    await fragments.load(made.digest, 8 * MIB, [])
    await alone(fragments, made, items[0])
    assert fragments.batches.choose(made.digest, [*items]) == [0]


async def test_what_may_run_at_once_is_known_from_the_load_and_read_no_more(
    make: Make, tmp_path: Path
) -> None:
    made = write_fragment(tmp_path, dense_model([64, 64]), 8 * MIB, batched=True)
    fragments, items = make(), inputs(3, 1, 64)
    await fragments.load(made.digest, 8 * MIB, [])
    (made.folder / "fragment.json").unlink()
    await alone(fragments, made, items[0])
    assert fragments.batches.choose(made.digest, [*items]) == [0, 1, 2]


async def test_as_many_items_join_as_the_ledger_has_memory_for_and_it_comes_back(
    make: Make, tmp_path: Path
) -> None:
    made = write_fragment(tmp_path, dense_model([64, 64]), 4 * MIB, batched=True)
    fragments, items = make(32 * MIB), inputs(8, 1, 64)
    await fragments.load(made.digest, 4 * MIB, [])
    await alone(fragments, made, items[0])
    assert fragments.request_space(fragments.ledger.free - 9 * MIB)
    assert len(await together(fragments, made, items)) == 3, "each more takes less than 4 MiB"
    ledger = fragments.ledger
    assert 7 * MIB < ledger.moving <= 9 * MIB, "the runtime keeps what it has for the next batch"
    assert ledger.fragments + ledger.reserved + ledger.moving <= ledger.budget
    assert not fragments.request_space(8 * MIB), "it is asked back"
    await fragments.batches.give_back()
    assert ledger.moving == 0
    assert fragments.request_space(8 * MIB)
    assert fragments.batches.choose(made.digest, [*items]) == [0]


async def test_the_memory_of_a_batch_is_not_given_back_while_its_outputs_lie_there(
    make: Make, tmp_path: Path
) -> None:
    made = write_fragment(tmp_path, dense_model([64, 64]), 4 * MIB, batched=True)
    fragments, items = make(), inputs(2, 1, 64)
    await fragments.load(made.digest, 4 * MIB, [])
    await alone(fragments, made, items[0])
    assert fragments.batches.choose(made.digest, [*items]) == [0, 1]
    await fragments.run_together(made.digest, items)
    fragments.batches.settled()
    fragments.batches.take_back()
    assert not fragments.request_space(fragments.ledger.budget - 5 * MIB)
    assert fragments.ledger.moving > 0
    fragments.batches.settled()
    await fragments.batches.give_back()
    assert fragments.ledger.moving == 0


async def test_items_run_one_by_one_until_whoever_wants_the_memory_of_batches_has_it(
    make: Make, tmp_path: Path
) -> None:
    made = write_fragment(tmp_path, dense_model([64, 64]), 4 * MIB, batched=True)
    fragments, items = make(), inputs(2, 1, 64)
    await fragments.load(made.digest, 4 * MIB, [])
    await alone(fragments, made, items[0])
    batches = fragments.batches
    assert batches.choose(made.digest, [*items]) == [0, 1]
    returning = asyncio.create_task(batches.give_back())
    await asyncio.sleep(0)
    assert batches.choose(made.digest, [*items]) == [0], "else the first batch is never the last"
    batches.settled(2)
    await returning
    assert fragments.ledger.moving == 0
    assert batches.choose(made.digest, [*items]) == [0, 1]
    batches.settled(2)


async def test_the_memory_of_a_batch_comes_back_also_where_a_load_that_waits_for_it_is_cancelled(
    make: Make, tmp_path: Path
) -> None:
    made = write_fragment(tmp_path, dense_model([64, 64]), 4 * MIB, batched=True)
    other = write_fragment(tmp_path, dense_model([64, 32]), 24 * MIB)
    fragments, items = make(32 * MIB), inputs(8, 1, 64)
    await fragments.load(made.digest, 4 * MIB, [])
    await alone(fragments, made, items[0])
    await together(fragments, made, items)
    assert fragments.ledger.moving > 0
    running = Event()  # an item has the processor
    processing = asyncio.create_task(fragments.processor.call(running.wait))
    loading = asyncio.create_task(fragments.load(other.digest, 24 * MIB, []))
    await asyncio.sleep(0)
    loading.cancel()  # as Cancel does, and the end of a session
    await asyncio.sleep(0)
    running.set()
    await asyncio.wait((processing, loading))
    assert loading.cancelled()
    assert fragments.ledger.moving == 0
    await asyncio.wait_for(fragments.load(other.digest, 24 * MIB, []), PATIENCE_SECONDS)


async def test_a_batch_that_takes_more_than_there_is_is_stopped_and_the_next_is_smaller(
    make: Make, tmp_path: Path
) -> None:
    """The manifest says far too little: each item takes 8 MiB."""
    made = write_fragment(tmp_path, dense_model([64, 16384, 64]), 10 * MIB, batched=True)
    fragments, items = make(40 * MIB), inputs(8, 128, 64)
    await fragments.load(made.digest, 10 * MIB, [])
    await alone(fragments, made, items[0])
    with pytest.raises(Exceeded):
        await together(fragments, made, items)
    results = await alone(fragments, made, items[1])
    assert results.peak_bytes <= 40 * MIB
    assert len(fragments.batches.choose(made.digest, [*items])) <= 4


def reducing(operator: str, **more: Any) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    shape = numpy_helper.from_array(np.array([1, 64]), "shape")
    takes = ["x", "shape"] if operator == "Reshape" else ["x"]
    graph = helper.make_graph(
        [helper.make_node(operator, takes, ["y"], **more)],
        "g",
        [value("x", TensorProto.FLOAT, ["n", 64])],
        [value("y", TensorProto.FLOAT, ["n", 64])],
        [shape] if operator == "Reshape" else [],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("model", "tries"),
    [(reducing("Reshape"), 3), (reducing("ReduceMax", axes=[0], keepdims=1), 1)],
)
async def test_a_fragment_that_cannot_do_it_after_all_runs_items_one_by_one(
    make: Make, tmp_path: Path, model: onnx.ModelProto, tries: int
) -> None:
    made = write_fragment(tmp_path, model, 4 * MIB, batched=True)
    fragments, items = make(), inputs(3, 1, 64)
    await fragments.load(made.digest, 4 * MIB, [])
    await alone(fragments, made, items[0])
    for _ in range(tries):
        with pytest.raises(RuntimeFailed):
            await together(fragments, made, items)
    assert fragments.batches.choose(made.digest, [*items]) == [0]
    assert (await alone(fragments, made, items[1])).outputs["y"].shape == (1, 64)


# ---- a real agent --------------------------------------------------------------------------------

Join = Callable[..., Awaitable[Joined]]


async def answers(device: ConnectedDevice, made: MadeFragment, rows: list[Array]) -> list[pb.Reply]:
    """What became of items that were given at once."""
    orders = []
    for number, x in enumerate(rows):
        (frame,) = encode_activation(edge(-1, 0, number), "pi-4", {"x": x}, transfer=0)
        whole = execute(made, number, input_frame=frame, reply_bytes=64 << 10, batch=8)
        orders.append(device.begin("execute", whole))
    return await asyncio.wait_for(asyncio.gather(*orders), PATIENCE_SECONDS)


def result(reply: pb.Reply) -> ReceivedActivation:
    received = ActivationAssembler().feed(reply.executed.result_frame)
    assert received is not None
    return received


@pytest.mark.real
@pytest.mark.forked
async def test_one_bad_item_of_a_batch_fails_alone(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    made = write_fragment(coordinator.store, table_model(), 16 * MIB, batched=True)
    device = (await join()).device
    await device.load(made.digest, 16 * MIB)
    rows = [np.arange(number, number + 4) for number in range(9)]
    bad = [*rows[:5], np.array([1, 2, 3, 1 << 40]), *rows[6:]]
    first, second = await answers(device, made, bad), await answers(device, made, rows)
    assert [reply.HasField("executed") for reply in first] == [True] * 5 + [False] + [True] * 3
    assert "out of" in first[5].failure.message
    assert all(reply.HasField("executed") for reply in second)
    for one, other in zip(first, second, strict=True):
        if one.HasField("executed"):
            got, wanted = result(other).tensors["y"], result(one).tensors["y"]
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.real
async def test_items_that_wait_run_at_once_within_the_budget_and_a_cancelled_one_stops_no_other(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    made = write_fragment(
        coordinator.store, dense_model([64, 4096, 4096, 64]), 84 * MIB, batched=True
    )
    joined = await join(budget="128Mi")
    device = joined.device
    await device.load(made.digest, 84 * MIB)
    rows = [item["x"] for item in inputs(20, 16, 64)]
    giving = asyncio.create_task(answers(device, made, rows))
    await asyncio.sleep(0)
    device.send(cancel=pb.Cancel(instruction=max(device.replies)))
    *replies, last = await giving
    assert all(reply.HasField("executed") for reply in replies)
    assert last.HasField("executed") or last.failure.code == pb.CANCELLED
    assert max(reply.executed.batch for reply in replies) > 1
    assert max(reply.executed.peak_bytes for reply in replies) <= 128 * MIB
    for number in (1, 7, 18):
        (single,) = await answers(device, made, rows[number : number + 1])
        assert single.executed.batch == 0
        got, wanted = result(replies[number]), result(single)
        assert got.key == edge(0, -1, number)
        np.testing.assert_allclose(got.tensors["y"], wanted.tensors["y"], rtol=1e-3, atol=1e-4)


@pytest.mark.real
async def test_a_fragment_is_loaded_beside_one_that_always_has_items_to_run_at_once(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    busy = write_fragment(
        coordinator.store, dense_model([64, 2048, 2048, 64]), 26 * MIB, batched=True
    )
    other = write_fragment(coordinator.store, dense_model([64, 1024, 64]), 20 * MIB)
    device = (await join(budget="64Mi")).device
    await device.load(busy.digest, 26 * MIB)
    (item,), numbers, ended = inputs(1, 16, 64), itertools.count(), asyncio.Event()
    has_run_at_once = asyncio.Event()

    async def run_one_after_the_other() -> None:
        while not ended.is_set():
            number = next(numbers)
            (frame,) = encode_activation(edge(-1, 0, number), "pi-4", item, transfer=0)
            order = execute(busy, number, input_frame=frame, reply_bytes=64 << 10, batch=8)
            reply = await device.ask("execute", order)
            if reply.executed.batch > 1:
                has_run_at_once.set()

    lanes = [asyncio.create_task(run_one_after_the_other()) for _ in range(18)]
    try:
        await asyncio.wait_for(has_run_at_once.wait(), PATIENCE_SECONDS)
        load = pb.Load(digest=other.digest, resident_bytes=20 * MIB)
        reply = await asyncio.wait_for(device.begin("load", load), PATIENCE_SECONDS / 2)
        assert reply.HasField("loaded"), reply
    finally:
        ended.set()
        await asyncio.gather(*lanes)
