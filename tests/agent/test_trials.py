"""A fragment is tried before it is given work: what it takes then replaces the estimate."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from agent.conftest import Joined
from agent.fragment_making import InBlocks, dense_model, write_fragment
from agent.measured_trials import runs_within_what_is_planned, takes_in_a_trial_and_in_a_run
from agent.own_process import in_own_process
from agent.scripted_coordinator import ConnectedDevice, ScriptedCoordinator
from agent.test_memory_of_fragments import peak_bytes
from agent.test_running import edge, task
from made_models import Made, weight
from shoal_agent.memory.trials import MOST_TRIALS, Trial, need_of_stopped, next_grant
from shoal_agent.runtime import onnx_runtime
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.largest_inputs import tried_inputs
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.prepared import NOTHING_PREPARED
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_protocol.units import Bytes
from shoal_protocol.v1 import session_pb2 as pb

Join = Callable[..., Awaitable[Joined]]
MIB = 1 << 20
WIDTH = 1024
ROWS = 2048
"""An item of 8 MiB, and activations of as much."""
LARGEST = {"x": (ROWS, WIDTH)}


async def run(device: ConnectedDevice, digest: str, rows: int, item: int = 0) -> pb.Reply:
    await device.give(edge(-1, 0, item), {"x": np.ones((rows, WIDTH), np.float32)})
    source = pb.InputSource(producer=-1, tensors=["x"])
    execute = pb.Execute(task=task(0, item), digest=digest, inputs=[source], results=["y"])
    return await device.ask("execute", execute)


async def test_what_a_trial_measures_replaces_the_estimate(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    model = dense_model([WIDTH] * 4)
    made = write_fragment(coordinator.store, model, 14 * MIB, largest=LARGEST)
    joined = await join(budget="56Mi")
    loaded = (await joined.device.load(made.digest, 15 * MIB)).loaded
    # Three layers of 4 MiB, the item, and what a layer takes and gives.
    assert (3 * 4 + 3 * 8) * MIB < loaded.resident_bytes <= 56 * MIB, loaded
    reply = await run(joined.device, made.digest, ROWS)
    assert reply.WhichOneof("outcome") == "executed", reply
    assert reply.executed.peak_bytes <= 56 * MIB


async def test_a_fragment_too_large_for_work_is_refused_before_there_is_any(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    model = dense_model([WIDTH] * 4)
    made = write_fragment(coordinator.store, model, 14 * MIB, largest=LARGEST)
    joined = await join(budget="24Mi")
    idle = joined.agent.status("VmRSS")
    failure = (await joined.device.load(made.digest, 15 * MIB)).failure
    assert failure.code == pb.BUDGET, failure
    assert failure.need_bytes > failure.have_bytes == 24 * MIB
    assert "was tried with the largest inputs of the plan: takes more than" in failure.message
    assert joined.agent.status("VmRSS") - idle < 6 * MIB
    # It is known now, and not tried again.
    again = (await joined.device.load(made.digest, 15 * MIB)).failure
    assert again == failure
    assert joined.agent.errors.read_text().count("in a trial") == 1


async def test_a_fragment_that_takes_more_than_there_is_as_a_whole_is_loaded_in_blocks(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    blocks = InBlocks(17, working_bytes=MIB)
    model = dense_model([WIDTH] * 18)
    made = write_fragment(coordinator.store, model, 20 * MIB, blocks, largest={"x": (64, WIDTH)})
    joined = await join(budget="24Mi")
    assert (await joined.device.load(made.digest, 20 * MIB)).HasField("loaded")
    assert "tried again within" in joined.agent.errors.read_text()
    for item in range(3):
        reply = await run(joined.device, made.digest, 64, item)
        assert reply.WhichOneof("outcome") == "executed", reply
        assert reply.executed.peak_bytes <= 24 * MIB, reply


TWO_WAYS = Made(
    text="""g (float[N,1024] x, bool long) => (float[N,1024] y) {
        y = If (long) <
            then_branch = one () => (float[N,1024] p) {
                a = Exp(x) b = Mul(x, a) p = Sub(a, b) },
            else_branch = two () => (float[N,1024] q) { q = Tanh(x) } > }""",
)
"""Its branches give 8 MiB; one makes 16 MiB on the way."""


@pytest.mark.parametrize("chooses", [False, True])
def test_a_trial_runs_either_branch(tmp_path: Path, *, chooses: bool) -> None:
    """What no trial could show has its estimate, whatever the trial has measured."""
    largest = {"x": (ROWS, WIDTH), "long": ()}
    made = write_fragment(tmp_path, TWO_WAYS.proto(), 60 * MIB, largest=largest)
    tried, taken = in_own_process(takes_in_a_trial_and_in_a_run, made.folder, chooses=chooses)
    assert tried is not None
    assert taken < tried + MIB
    assert tried > 24 * MIB, "an item, and what is made of it"


def test_all_is_tried_again_as_items_come_one_after_the_other() -> None:
    item = {"x": np.zeros(4, np.float32), "long": np.array(False)}
    assert [bool(each["long"]) for each in tried_inputs(item)] == [False, True] * 2


async def test_a_fragment_that_chooses_itself_keeps_its_estimate(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    model = dense_model([WIDTH] * 4)
    made = write_fragment(
        coordinator.store, model, 50 * MIB, largest={"x": (4, WIDTH)}, chooses=True
    )
    joined = await join(budget="56Mi")
    loaded = (await joined.device.load(made.digest, 50 * MIB)).loaded
    assert loaded.resident_bytes == 50 * MIB, loaded


def endless_model() -> onnx.ModelProto:
    """Multiplies 256 numbers with themselves until their sum is large: ones without an end."""
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Mul", ["carried", "x"], ["grown"]),
            helper.make_node("ReduceSum", ["grown"], ["sum"], keepdims=0),
            helper.make_node("Less", ["sum", "large"], ["go_on"]),
        ],
        "body",
        [
            value("round", TensorProto.INT64, []),
            value("before", TensorProto.BOOL, []),
            value("carried", TensorProto.FLOAT, [256]),
        ],
        [value("go_on", TensorProto.BOOL, []), value("grown", TensorProto.FLOAT, [256])],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["", "begin", "x"], ["y"], name="until large", body=body)],
        "growing",
        [value("x", TensorProto.FLOAT, [256])],
        [value("y", TensorProto.FLOAT, [256])],
        [
            numpy_helper.from_array(np.array(1e6, np.float32), "large"),
            numpy_helper.from_array(np.array(True), "begin"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_trial_that_does_not_end_is_given_up_and_items_show_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is made up for it may be what no item is."""
    monkeypatch.setattr(onnx_runtime, "TRIAL_SECONDS", 0.1)
    made = write_fragment(tmp_path, endless_model(), 4 * MIB, largest={"x": (256,)})
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=64 * MIB)
    meter.settle()
    _, tried = runtime.open_and_try("f", made.folder, 8 * MIB, NOTHING_PREPARED, 64 * MIB)
    assert tried.taken_bytes is None
    assert tried.reason == "not ended after 0.1 s, and stopped in its Loop node 'until large'"
    result = runtime.run("f", {"x": np.full(256, 2, np.float32)}, Stopper()).outputs["y"]
    np.testing.assert_array_equal(result, np.full(256, 4096, np.float32))


LASTING = Made(
    text="""g (float[1024,1024] x) => (float[1,1] y) {
        rounds = Constant<value = int64 {20}>()
        all = Loop(rounds, , x) <body = b (int64 round, bool before, float[1024,1024] carried)
            => (bool on, float[1024,1024] next) {
                on = Identity(before)
                next = Mul(carried, w) }>
        y = ReduceMax<axes = [0, 1], keepdims = 1>(all) }""",
    weights={"w": weight(1024, 1024)},
    shapes={"x": (1024, 1024)},
)
"""What it takes it has for long: the guard sees it for sure."""


def test_a_fragment_runs_that_takes_what_is_planned_and_leaves_next_to_nothing(
    tmp_path: Path,
) -> None:
    """It is not stopped to leave room for what nobody knows: what it takes is known."""
    model = onnx.load(LASTING.save(tmp_path))
    made = write_fragment(tmp_path, model, 64 * MIB, largest=LASTING.shapes)
    assert in_own_process(runs_within_what_is_planned, made.folder) == (True, True)


def reordered_model() -> onnx.ModelProto:
    """Convolutions with 9 channels: those that are prepared for a processor's vectors, of 8 numbers
    or of 16, compute 16, and lay out their results anew for an operation between them."""
    value = helper.make_tensor_value_info
    generator = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> TensorProto:
        return numpy_helper.from_array(generator.normal(size=shape).astype(np.float32), name)

    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w0"], ["a"], pads=[1] * 4),
            helper.make_node("Erf", ["a"], ["b"]),
            helper.make_node("Conv", ["b", "w1"], ["c"], pads=[1] * 4),
            helper.make_node("Erf", ["c"], ["d"]),
            helper.make_node("GlobalAveragePool", ["d"], ["e"]),
            helper.make_node("Conv", ["e", "w2"], ["y"]),
        ],
        "reordered",
        [value("x", TensorProto.FLOAT, [1, 3, 704, 704])],
        [value("y", TensorProto.FLOAT, None)],
        [weight("w0", 9, 3, 3, 3), weight("w1", 9, 9, 3, 3), weight("w2", 1 << 17, 9, 1, 1)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


async def test_a_fragment_that_takes_more_than_there_is_prepared_is_loaded_as_it_was_cut(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    made = write_fragment(coordinator.store, reordered_model(), 20 * MIB)
    joined = await join(budget="52Mi")
    for number in range(2):
        reply = await joined.device.load(made.digest, 20 * MIB)
        assert reply.HasField("loaded"), reply
        assert reply.loaded.resident_bytes <= 52 * MIB
        await joined.device.unload(made.digest)
        told = joined.agent.errors.read_text()
        assert told.count("tried again as it was cut") == number + 1
        assert told.count("in a trial") == number + 3, "each form is tried once"


def growing_model() -> onnx.ModelProto:
    """Four times as many bytes in the middle as there come in."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
            helper.make_node("Neg", ["wide"], ["other"]),
            helper.make_node("ReduceMax", ["other"], ["y"], axes=[1], keepdims=0),
        ],
        "growing",
        [value("x", TensorProto.UINT8, ["rows", MIB])],
        [value("y", TensorProto.FLOAT, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


async def test_an_item_that_must_exceed_the_budget_fails_before_it_takes_anything(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    model = dense_model([WIDTH] * 4)
    made = write_fragment(coordinator.store, model, 20 * MIB, largest={"x": (1, WIDTH)})
    joined = await join(budget="24Mi")
    assert (await joined.device.load(made.digest, 20 * MIB)).HasField("loaded")
    failure = (await run(joined.device, made.digest, 2 * ROWS)).failure
    assert failure.code == pb.BUDGET, failure
    needed = re.search(r"its input of 16 MiB makes it need about ([0-9.]+) MiB", failure.message)
    assert needed is not None, failure
    held = 4 * (3 * WIDTH * WIDTH + 2 * ROWS * WIDTH) / MIB
    assert held <= float(needed[1]) < held + 2, "its weights, its input, and little more"
    assert "give the device more memory, or the model a smaller input" in failure.message
    assert (await run(joined.device, made.digest, 1, item=1)).HasField("executed")
    assert joined.agent.status("VmHWM") - joined.agent.status("VmRSS") < 24 * MIB


async def planned_for_one_row(coordinator: ScriptedCoordinator, join: Join) -> tuple[Joined, str]:
    """A device of 36 MiB with a fragment of five layers of 4 MiB, and its digest."""
    model = dense_model([WIDTH] * 6)
    made = write_fragment(coordinator.store, model, 24 * MIB, largest={"x": (1, WIDTH)})
    joined = await join(budget="36Mi")
    assert (await joined.device.load(made.digest, 24 * MIB)).HasField("loaded")
    return joined, made.digest


async def test_an_item_beyond_the_plan_runs_in_the_place_of_weights_that_are_read_again(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    joined, digest = await planned_for_one_row(coordinator, join)
    for item in range(3):
        # Five layers of 4 MiB, the item of 7 MiB, and what a layer takes and gives.
        reply = await run(joined.device, digest, ROWS * 7 // 8, item)
        assert 0 < reply.executed.peak_bytes <= 36 * MIB, reply


async def test_what_waits_for_other_items_leaves_memory_for_one_beyond_the_plan(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    joined, digest = await planned_for_one_row(coordinator, join)
    waiting = np.ones((3 * ROWS // 8, WIDTH), np.float32)
    await joined.device.give(edge(-1, 0, 1), {"x": waiting})
    reply = await run(joined.device, digest, ROWS * 7 // 8)
    assert 0 < reply.executed.peak_bytes <= 36 * MIB, reply


async def test_a_node_of_an_untried_fragment_fails_before_it_takes_more_than_is_left(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    made = write_fragment(coordinator.store, growing_model(), 12 * MIB)
    joined = await join(budget="24Mi")
    assert (await joined.device.load(made.digest, 12 * MIB)).HasField("loaded")
    # 5 MiB that the first node makes 20 of.
    await joined.device.give(edge(-1, 0, 0), {"x": np.ones((5, MIB), np.uint8)})
    source = pb.InputSource(producer=-1, tensors=["x"])
    execute = pb.Execute(task=task(0, 0), digest=made.digest, inputs=[source], results=["y"])
    failure = (await joined.device.ask("execute", execute)).failure
    assert failure.code == pb.BUDGET, failure
    assert await peak_bytes(joined.device) < 16 * MIB


async def test_an_item_whose_activations_grow_as_it_does_is_refused_before_it_takes_anything(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    made = write_fragment(coordinator.store, growing_model(), 12 * MIB, largest={"x": (1, MIB)})
    joined = await join(budget="20Mi")
    assert (await joined.device.load(made.digest, 12 * MIB)).HasField("loaded")
    await joined.device.give(edge(-1, 0, 0), {"x": np.ones((8, MIB), np.uint8)})
    source = pb.InputSource(producer=-1, tensors=["x"])
    execute = pb.Execute(task=task(0, 0), digest=made.digest, inputs=[source], results=["y"])
    failure = (await joined.device.ask("execute", execute)).failure
    assert failure.code == pb.BUDGET, failure
    assert "its input of 8 MiB makes it need about " in failure.message
    assert await peak_bytes(joined.device) < 16 * MIB


async def test_a_fragment_that_made_up_inputs_do_not_suit_is_loaded_untried(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "sizes"], ["y"])],
        "reshape",
        [value("x", TensorProto.FLOAT, [6]), value("sizes", TensorProto.INT64, [2])],
        [value("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    made = write_fragment(coordinator.store, model, 20 * MIB)
    joined = await join(budget="24Mi")
    assert (await joined.device.load(made.digest, 20 * MIB)).HasField("loaded")
    assert "was not tried: " in joined.agent.errors.read_text()


@pytest.mark.parametrize(
    ("rows", "tried"), [(512, True), (513, False), (1 << 70, False)], ids=["right", "wrong", "huge"]
)
async def test_a_fragment_is_tried_with_the_sizes_that_the_plan_knows(
    coordinator: ScriptedCoordinator, join: Join, rows: int, *, tried: bool
) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Reshape", ["x", "sizes"], ["folded"], allowzero=1),
            helper.make_node("ReduceMax", ["folded"], ["y"], axes=[0], keepdims=0),
        ],
        "folding",
        [
            value("x", TensorProto.FLOAT, ["rows", WIDTH]),
            value("sizes", TensorProto.INT64, [2]),
        ],
        [value("y", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    made = write_fragment(
        coordinator.store,
        model,
        4 * MIB,
        largest={"x": (256, WIDTH)},
        values={"sizes": (rows, WIDTH // 2)},
    )
    joined = await join(budget="8Mi")
    assert (await joined.device.load(made.digest, 4 * MIB)).HasField("loaded")
    assert ("was not tried: " not in joined.agent.errors.read_text()) == tried


@pytest.mark.parametrize(("estimate", "tries"), [(4, 0), (20, 1)])
async def test_a_small_estimate_is_not_worth_a_trial(
    coordinator: ScriptedCoordinator, join: Join, estimate: int, tries: int
) -> None:
    model = dense_model([WIDTH] * 2, batch=1)
    made = write_fragment(coordinator.store, model, estimate * MIB)
    joined = await join(budget="24Mi")
    for _ in range(2):
        assert (await joined.device.load(made.digest, estimate * MIB)).HasField("loaded")
        await joined.device.unload(made.digest)
    assert joined.agent.errors.read_text().count("in a trial") == tries


def test_what_a_few_tokens_more_take_is_not_extrapolated() -> None:
    granted, taken, fixed = Bytes(16 * MIB), Bytes(14 * MIB), Bytes(2 * MIB)
    of_tokens = Trial(granted=granted, taken=taken, fixed=fixed, input_bytes=Bytes(80))
    assert of_tokens.need(80) == taken
    assert of_tokens.need(240) < taken + MIB // 16
    of_an_image = replace(of_tokens, input_bytes=Bytes(MIB))
    assert of_an_image.need(3 * MIB) > of_an_image.taken + 4 * MIB


sizes = st.integers(1, 1 << 40)


@given(had=sizes, budget=sizes)
def test_a_run_that_is_stopped_again_and_again_soon_asks_for_more_than_there_is(
    had: int, budget: int
) -> None:
    for _ in range(128):
        if had > budget:
            break
        had = need_of_stopped(had, budget)
    assert had > budget


@given(granted=sizes, least=sizes, room=sizes, beyond=sizes, stopped=st.booleans())
def test_trials_go_down_to_the_least_grant_and_end_there(
    granted: int, least: int, room: int, beyond: int, stopped: bool
) -> None:
    grants = [Bytes(granted)]
    for number in range(1, MOST_TRIALS + 1):
        trial = Trial(granted=grants[-1], taken=Bytes(room + beyond), stopped=stopped)
        less = next_grant(trial, Bytes(least), Bytes(room), number)
        if less is None:
            break
        grants.append(less)
    assert less is None
    assert grants == sorted(set(grants), reverse=True), "each grant is less than the one before"
    assert len(grants) <= MOST_TRIALS
    assert grants[-1] == min(granted, least) or granted <= least
