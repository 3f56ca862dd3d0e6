"""What an agent's memory does, as the kernel measures it: never from the agent's own ledger."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from agent.conftest import MARK_ERROR_BYTES, AgentProcess, Joined
from agent.fragment_making import MadeFragment, dense_model, write_fragment
from agent.scripted_coordinator import PATIENCE_SECONDS, ConnectedDevice, ScriptedCoordinator
from agent.test_running import edge, task
from shoal_agent.runtime.process_memory import LIBRARY_RESERVE_BYTES
from shoal_protocol.heap_reserve import HEAP_RESERVE_BYTES
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

Join = Callable[..., Awaitable[Joined]]
MIB = 1 << 20
IDLE_BYTES = 45 * MIB
"""42 were measured; how the kernel maps the libraries' pages that return differs by some."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all of these tests: none of them changes a file of it."""
    return tmp_path_factory.mktemp("store")


@functools.cache
def dense(store: Path, *sizes: int, resident: int, seed: int = 0) -> MadeFragment:
    """A dense fragment that is said to need so much."""
    return write_fragment(store, dense_model(sizes, seed), resident)


async def run(
    device: ConnectedDevice, digest: str, width: int, item: int = 0, rows: int = 1
) -> pb.Reply:
    """One item of ones through a dense fragment."""
    await device.give(edge(-1, 0, item), {"x": np.ones((rows, width), np.float32)})
    execute = pb.Execute(
        task=task(0, item),
        digest=digest,
        inputs=[pb.InputSource(producer=-1, tensors=["x"])],
        results=["y"],
    )
    reply = await device.ask("execute", execute)
    if reply.WhichOneof("outcome") == "executed":
        await device.result()
    return reply


async def resting(agent: AgentProcess) -> int:
    """Resident bytes once it has given back what an idle agent does not need, and what it does
    need has returned. Pages of libraries go when a fragment does, too, and those return that end
    its work; the agent rests some seconds later."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            while (resident := agent.status("VmRSS")) > IDLE_BYTES:
                await asyncio.sleep(0.1)
            await asyncio.sleep(1)
            if (later := agent.status("VmRSS")) <= IDLE_BYTES:
                return max(resident, later)


async def test_an_idle_agent_is_small(join: Join) -> None:
    joined = await join()
    telemetry = await joined.device.telemetry.get()
    floor = joined.device.hello.floor_bytes
    resident = await resting(joined.agent)
    assert resident < IDLE_BYTES, f"{resident / MIB:.1f} MiB"
    # It keeps a reserve for the library pages that a job needs, and for what its heap grows by.
    reserved = LIBRARY_RESERVE_BYTES + HEAP_RESERVE_BYTES
    assert floor - reserved < resident < floor < reserved + 36 * MIB
    assert telemetry.used_bytes < MIB // 2


async def test_fragments_that_have_come_and_gone_leave_the_next_ones_their_budget(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    """What stays in the agent's heap between what they freed is its own: 2 MiB of a budget of 5."""
    joined = await join(budget="5Mi")
    for seed in range(40):
        width = 256 + seed
        made = dense(coordinator.store, *[width] * 6, resident=4 * MIB, seed=seed)
        assert (await joined.device.load(made.digest, made.resident_bytes)).HasField("loaded")
        assert (await run(joined.device, made.digest, width, seed)).HasField("executed")
        await joined.device.unload(made.digest)
    while not joined.device.telemetry.empty():
        joined.device.telemetry.get_nowait()
    await joined.device.telemetry.get()  # which may have been read before
    assert (await joined.device.telemetry.get()).used_bytes < MIB // 4


async def test_an_agent_is_small_again_when_its_work_has_ended(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = dense(coordinator.store, 1024, 4096, 1024, resident=40 * MIB)
    joined = await join()
    left = []
    for _ in range(2):  # what is made for the first job, such as threads, is there after it
        await joined.device.load(fragment.digest, fragment.resident_bytes)
        for item in range(3):
            await run(joined.device, fragment.digest, 1024, item)
        await joined.device.unload(fragment.digest)
        assert await resting(joined.agent) < IDLE_BYTES
        left.append(joined.agent.status("RssAnon"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while joined.agent.status("RssAnon") >= left[0] + MIB:
            await asyncio.sleep(0.1)


async def test_library_pages_that_a_fragment_brings_back_are_not_its_use(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    # 32 MiB of weights, and little else.
    model = dense_model([1024, 4096, 1024])
    fragment = write_fragment(coordinator.store, model, 40 * MIB, largest={"x": (1, 1024)})
    joined = await join()
    await resting(joined.agent)
    before = joined.agent.status("VmRSS")
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    reply = await run(joined.device, fragment.digest, 1024)
    grown = joined.agent.status("VmRSS") - before
    assert 32 * MIB < reply.executed.peak_bytes < 34 * MIB < grown, f"{grown / MIB:.1f} MiB"
    assert joined.agent.status("VmRSS") < joined.device.hello.floor_bytes + 34 * MIB
    assert (await joined.device.telemetry.get()).peak_bytes < 34 * MIB


async def test_weights_are_mapped_and_never_on_the_heap(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = dense(coordinator.store, 1024, 4096, 1024, resident=40 * MIB)
    joined = await join()
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    before, mapped_before = joined.agent.status("RssAnon"), joined.agent.mapped_bytes()
    for item in range(3):
        reply = await run(joined.device, fragment.digest, 1024, item)
        assert reply.executed.peak_bytes > 32 * MIB
    assert joined.agent.status("RssAnon") - before < 6 * MIB
    assert joined.agent.mapped_bytes() - mapped_before > 31 * MIB


@pytest.mark.parametrize("budget", ["20M", "20000001", "33333333", "8Gi"])
async def test_a_budget_of_any_number_of_bytes_serves(
    coordinator: ScriptedCoordinator, join: Join, budget: str
) -> None:
    fragment = dense(coordinator.store, 256, 1024, 256, resident=8 * MIB)
    joined = await join(budget=budget)
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    reply = await run(joined.device, fragment.digest, 256, rows=512)
    assert reply.WhichOneof("outcome") == "executed", reply
    assert "could be rehearsed" not in joined.agent.errors.read_text(), "the floor is too low"


async def test_memory_is_back_when_unload_is_answered(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = dense(coordinator.store, 1024, 4096, 1024, resident=40 * MIB)
    joined = await join()
    idle = joined.agent.status("VmRSS")
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    await run(joined.device, fragment.digest, 1024)
    assert joined.agent.status("VmRSS") - idle > 31 * MIB
    reply = await joined.device.unload(fragment.digest)
    assert reply.unloaded.freed_bytes > 30 * MIB
    assert joined.agent.status("VmRSS") - idle < 4 * MIB
    assert joined.agent.mapped() == set()


async def test_under_single_two_fragments_are_never_mapped_together(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    one, other = (
        dense(coordinator.store, 512, 2048, 512, resident=8 * MIB, seed=seed) for seed in (1, 2)
    )
    joined = await join("pi-4", "--residency", "Single")
    assert joined.device.hello.residency == pb.SINGLE
    for _ in range(3):
        for fragment, rival in ((one, other), (other, one)):
            assert (await joined.device.load(fragment.digest, 8 * MIB)).HasField("loaded")
            await run(joined.device, fragment.digest, 512)
            refused = await joined.device.load(rival.digest, 8 * MIB)
            assert refused.failure.code == pb.BUDGET
            assert "Single" in refused.failure.message
            assert joined.agent.mapped() == {fragment.digest}
            await joined.device.unload(fragment.digest)
            assert joined.agent.mapped() == set()


ROWS, WIDTH = 1 << 16, 128


@functools.cache
def lookup_table() -> np.ndarray:
    """32 MiB of rows."""
    return np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)


def table_model(side: int = 0) -> ModelProto:
    """Looks rows up in a table of 32 MiB, and works with a square of floats meanwhile."""
    nodes = [helper.make_node("Gather", ["table", "x"], ["y"])]
    weights = [numpy_helper.from_array(lookup_table(), "table")]
    if side:
        nodes = [
            helper.make_node("Gather", ["table", "x"], ["rows"]),
            helper.make_node("ReduceMax", ["rows"], ["most"]),
            helper.make_node("Mul", ["most", "column"], ["scaled"]),
            helper.make_node("MatMul", ["scaled", "row"], ["square"]),
            helper.make_node("ReduceMin", ["square"], ["nothing"]),
            helper.make_node("Add", ["rows", "nothing"], ["y"]),
        ]
        line = np.arange(side, dtype=np.float32)
        weights.append(numpy_helper.from_array(line[:, None], "column"))
        weights.append(numpy_helper.from_array(line[None], "row"))
    graph = helper.make_graph(
        nodes,
        "words",
        [helper.make_tensor_value_info("x", TensorProto.INT64, [1, "length"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "length", WIDTH])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


async def look_up(device: ConnectedDevice, digest: str, item: int, words: np.ndarray) -> pb.Reply:
    """Rows of the table."""
    await device.give(edge(-1, 0, item), {"x": words})
    execute = pb.Execute(
        task=task(0, item),
        digest=digest,
        inputs=[pb.InputSource(producer=-1, tensors=["x"])],
        results=["y"],
    )
    reply = await device.ask("execute", execute)
    assert reply.HasField("executed"), reply
    assert np.array_equal((await device.result()).tensors["y"], lookup_table()[words])
    return reply


async def test_of_a_table_no_more_stays_in_memory_than_there_is_room_for(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = write_fragment(coordinator.store, table_model(), 7 * MIB)
    joined = await join(budget="12Mi")
    idle = joined.agent.without_libraries()
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    for item, words in enumerate(np.random.default_rng(1).integers(0, ROWS, (60, 1, 32))):
        reply = await look_up(joined.device, fragment.digest, item, words)
        # 60 items read rows all over its 32 MiB; of the last ones at most some are there still.
        assert reply.executed.peak_bytes < 10 * MIB + MARK_ERROR_BYTES
        assert joined.agent.without_libraries() - idle < 10 * MIB
        assert joined.agent.status("VmRSS") < joined.device.hello.floor_bytes + 12 * MIB


async def test_rows_gather_no_further_where_a_fragment_works_with_more_than_its_weights(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = write_fragment(coordinator.store, table_model(side=2048), 34 * MIB)
    joined = await join(budget="40Mi")
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    for item, words in enumerate(np.random.default_rng(1).integers(0, ROWS, (60, 1, 32))):
        reply = await look_up(joined.device, fragment.digest, item, words)
        assert reply.executed.peak_bytes < 40 * MIB


@pytest.mark.slow
@pytest.mark.minutes
async def test_two_hundred_loads_and_evictions_leave_memory_flat(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragments = [
        dense(coordinator.store, 512, 2048, 512, resident=12 * MIB, seed=seed) for seed in range(3)
    ]
    joined = await join()
    readings: list[int] = []
    for cycle in range(200):
        fragment = fragments[cycle % 3]
        assert (await joined.device.load(fragment.digest, 12 * MIB)).HasField("loaded")
        await run(joined.device, fragment.digest, 512, cycle)
        await joined.device.unload(fragment.digest)
        readings.append(joined.agent.status("VmRSS"))
    grown = max(readings[150:]) - max(readings[20:50])
    assert grown < MIB, f"{grown / MIB:.2f} MiB in 150 cycles"


async def test_a_load_beyond_the_budget_is_refused_before_anything_is_fetched(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([64, 64]))
    joined = await join(budget="24Mi")
    reply = await joined.device.load(fragment.digest, 212 * MIB)
    assert reply.failure.code == pb.BUDGET
    assert (reply.failure.need_bytes, reply.failure.have_bytes) == (212 * MIB, 24 * MIB)
    assert "would need 212 MiB, have 24 MiB" in reply.failure.message
    assert coordinator.fetches == []


async def test_a_fragment_measured_over_the_budget_is_given_up(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = dense(coordinator.store, 1024, 4096, 1024, resident=8 * MIB)
    joined = await join(budget="24Mi")
    idle = joined.agent.status("VmRSS")
    assert (await joined.device.load(fragment.digest, 8 * MIB)).HasField("loaded")
    reply = await run(joined.device, fragment.digest, 1024)
    assert reply.failure.code == pb.BUDGET, reply
    assert reply.failure.need_bytes > 32 * MIB > reply.failure.have_bytes == 24 * MIB
    assert (await joined.device.evicted.get()).digest == fragment.digest
    assert joined.agent.status("VmRSS") - idle < 6 * MIB


async def test_activations_that_would_break_the_budget_fail_instead(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = dense(coordinator.store, 16, 1 << 14, 16, resident=8 * MIB)
    joined = await join(budget="16Mi")
    await joined.device.load(fragment.digest, 8 * MIB)
    await joined.device.give(edge(-1, 0), {"x": np.ones((512, 16), np.float32)})
    execute = pb.Execute(
        task=task(0),
        digest=fragment.digest,
        inputs=[pb.InputSource(producer=-1, tensors=["x"])],
        results=["y"],
    )
    reply = await joined.device.ask("execute", execute)
    assert reply.failure.code == pb.BUDGET, reply


async def test_items_of_many_sizes_stay_within_the_budget(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = dense(coordinator.store, 64, 512, 512, 64, resident=12 * MIB)
    joined = await join(budget="16Mi")
    await joined.device.load(fragment.digest, 12 * MIB)
    sizes = np.random.default_rng(0).integers(1, 1500, 40)
    for item, size in enumerate(sizes):
        x = np.ones((int(size), 64), np.float32)
        await joined.device.give(edge(-1, 0, item), {"x": x})
        execute = pb.Execute(
            task=task(0, item),
            digest=fragment.digest,
            inputs=[pb.InputSource(producer=-1, tensors=["x"])],
            results=["y"],
        )
        reply = await joined.device.ask("execute", execute)
        assert reply.HasField("executed"), reply
        assert reply.WhichOneof("outcome") == "executed", reply
        assert reply.executed.peak_bytes <= 16 * MIB
        await joined.device.result()


async def run_all(device: ConnectedDevice, digest: str, items: range) -> list[pb.Reply]:
    """All at once: what waits for what is the agent's affair."""
    replies = [
        device.begin(
            "execute",
            pb.Execute(
                task=task(0, item),
                digest=digest,
                inputs=[pb.InputSource(producer=-1, tensors=["x"])],
                results=["y"],
            ),
        )
        for item in items
    ]
    return await asyncio.wait_for(asyncio.gather(*replies), 60)


async def peak_bytes(device: ConnectedDevice) -> int:
    """The most above the floor, as the next telemetry has it."""
    while not device.telemetry.empty():
        device.telemetry.get_nowait()
    return (await device.telemetry.get()).peak_bytes


async def test_large_outputs_for_a_slow_consumer_stay_within_the_budget(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    # 4 MiB of output an item, over a link of 25 MB/s.
    fragment = dense(coordinator.store, 16, 1 << 14, resident=14 * MIB)
    joined = await join("pi-4", "--link-rate", "200M", budget="20Mi")
    device = joined.device
    await device.load(fragment.digest, fragment.resident_bytes)
    for item in range(10):
        x = np.full((64, 16), item, np.float32)
        await device.give(edge(-1, 0, item), {"x": x})
    replies = await run_all(device, fragment.digest, range(10))
    assert all(reply.HasField("executed") for reply in replies)
    results = {(each := await device.result()).key.item: each.tensors["y"] for _ in range(10)}
    assert sorted(results) == list(range(10))
    assert all(np.allclose(results[item], item * results[1], atol=1e-4) for item in range(10))
    assert await peak_bytes(device) <= 20 * MIB


async def test_large_outputs_leave_a_device_that_is_full_within_the_budget(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    # An item takes 28 MiB while it runs: 8 of output, twice in the arena and once outside it.
    fragment = write_fragment(coordinator.store, dense_model([16, 1 << 15]), 29 * MIB)
    device = (await join(budget="29Mi")).device
    await device.load(fragment.digest, fragment.resident_bytes)
    for item in range(6):
        reply = await run(device, fragment.digest, 16, item, rows=64)
        assert reply.HasField("executed"), reply
    assert await peak_bytes(device) <= 29 * MIB


async def test_large_inputs_for_a_slow_device_stay_within_the_budget(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = dense(coordinator.store, 1024, 16, resident=10 * MIB)
    device = (await join(budget="20Mi")).device
    await device.load(fragment.digest, fragment.resident_bytes)
    for item in range(10):  # 4 MiB each: some find room in memory, the others go to the disk
        x = np.full((1024, 1024), item, np.float32)
        assert (await device.give(edge(-1, 0, item), {"x": x})).outcome == Acknowledgement.ACCEPTED
    replies = await run_all(device, fragment.digest, range(10))
    assert all(reply.HasField("executed") for reply in replies)
    results = {(each := await device.result()).key.item: each.tensors["y"] for _ in range(10)}
    assert all(np.allclose(results[item], item * results[1], atol=1e-4) for item in range(10))
    assert await peak_bytes(device) <= 20 * MIB


async def test_rows_of_a_table_stay_where_there_is_room_and_go_when_another_fragment_comes(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    table = write_fragment(coordinator.store, table_model(), 7 * MIB)
    other = dense(coordinator.store, 1024, 4096, 1024, resident=40 * MIB)
    joined = await join(budget="50Mi")
    idle = joined.agent.status("VmRSS")
    await joined.device.load(table.digest, table.resident_bytes)
    # They gather until there is no room, go, and gather again: few of them may stay, too.
    for item, words in enumerate(np.random.default_rng(1).integers(0, ROWS, (120, 1, 32))):
        await look_up(joined.device, table.digest, item, words)
        if item >= 50 and (most := joined.agent.status("VmRSS") - idle) > 18 * MIB:
            break
    assert most > 18 * MIB
    reply = await joined.device.load(other.digest, other.resident_bytes)
    assert reply.HasField("loaded"), reply
    assert joined.agent.status("VmRSS") - idle < 12 * MIB
    reply = await run(joined.device, other.digest, 1024, item=120)
    assert reply.executed.peak_bytes < 50 * MIB
