"""Convolutions in blocks: their layout crosses borders, and what they compute stays the same.
Tables in blocks: all of one is copied where few rows are read."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from agent.fragment_making import InBlocks, MadeFragment, table_model, write_fragment
from shoal_agent.cache.disk import FragmentCache
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.mapped_pages import mapped_ranges
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.preparation import Preparation
from shoal_agent.runtime.prepared import Prepared
from shoal_agent.runtime.process_memory import MemoryMeter

MIB = 1 << 20
CHANNELS, UNITS = 32, 5
NODES_OF_A_UNIT = 5


def residual_model(
    *, channels: int = CHANNELS, results: Sequence[str] = (), channels_first: bool = True
) -> onnx.ModelProto:
    """Units of two convolutions whose result is added to what they take; input `x`, output `y`.
    `results` are more outputs."""
    chance = np.random.default_rng(3)
    nodes, weights, current = [], {}, "x"
    for unit in range(UNITS):
        names = [f"{kind}{unit}" for kind in ("r", "c", "s", "d")]
        for name in (names[1], names[3]):
            shape = (channels, channels, 3, 3)
            weights[f"w_{name}"] = chance.standard_normal(shape, dtype=np.float32) / 20
        given = "y" if unit == UNITS - 1 else f"a{unit}"
        nodes += [
            helper.make_node("Relu", [current], [names[0]]),
            _convolution(names[0], names[1]),
            helper.make_node("Sigmoid", [names[1]], [names[2]]),
            _convolution(names[2], names[3]),
            helper.make_node("Add", [names[3], current], [given]),
        ]
        current = given
    if not channels_first:
        nodes[-1].output[0] = "last"
        nodes.append(helper.make_node("Transpose", ["last"], ["y"], perm=[0, 2, 3, 1]))
    value, size = helper.make_tensor_value_info, [1, channels, 12, 12]
    graph = helper.make_graph(
        nodes,
        "residual",
        [value("x", TensorProto.FLOAT, size)],
        [value(name, TensorProto.FLOAT, None) for name in ("y", *results)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _convolution(taken: str, given: str) -> onnx.NodeProto:
    return helper.make_node("Conv", [taken, f"w_{given}"], [given], pads=[1, 1, 1, 1])


def prepare(store: Path, made: MadeFragment, granted: int) -> Prepared:
    preparation = Preparation(
        FragmentCache(store, 1 << 30), lambda _: True, lambda _: None, worth_bytes=0
    )
    return asyncio.run(preparation.prepare(made.digest, made.folder, granted))


def outputs(
    made: MadeFragment, x: np.ndarray, granted: int, prepared: Prepared
) -> list[np.ndarray]:
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=64 * MIB)
    runtime.open("f", made.folder, granted, prepared)
    return list(runtime.run("f", {"x": x}, Stopper()).outputs.values())


def operators(prepared: Prepared) -> list[Counter[str]]:
    assert prepared.blocks is not None
    models = [onnx.load(each.model, load_external_data=False) for each in prepared.blocks]
    return [Counter(node.op_type for node in model.graph.node) for model in models]


def has_blocked_layout(store: Path) -> bool:
    """Whether ONNX Runtime has one for this processor."""
    made = write_fragment(store / "probe", residual_model(), 16 * MIB)
    whole = prepare(store / "probe", made, made.resident_bytes).whole
    assert whole is not None
    nodes = onnx.load(whole.model, load_external_data=False).graph.node
    return any(node.op_type == "ReorderOutput" for node in nodes)


MODELS = {
    "plain": residual_model(),
    "a border is a result": residual_model(results=["a0", "a2"]),
    "inner values are results": residual_model(results=["c1", "d3"]),
    "odd channels": residual_model(channels=20),
    "channels last": residual_model(channels_first=False),
}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, 3) for name in MODELS),
        ("plain", NODES_OF_A_UNIT * UNITS),
        *(
            pytest.param(name, NODES_OF_A_UNIT * UNITS, marks=pytest.mark.minutes)
            for name in MODELS
            if name != "plain"
        ),
    ],
)
def test_prepared_blocks_of_convolutions_compute_what_the_whole_does(
    name: str, count: int, tmp_path: Path
) -> None:
    made = write_fragment(tmp_path, MODELS[name], 16 * MIB, InBlocks(count))
    x = np.random.default_rng(0).standard_normal(
        (1, 20 if "odd" in name else CHANNELS, 12, 12), dtype=np.float32
    )
    expected = outputs(made, x, made.resident_bytes, Prepared())
    granted = made.least_bytes + MIB
    prepared = prepare(tmp_path, made, granted)
    assert prepared.blocks is not None
    for result, wanted in zip(outputs(made, x, granted, prepared), expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


def test_a_block_of_convolutions_maps_its_weights_in_one_piece(tmp_path: Path) -> None:
    made = write_fragment(tmp_path, residual_model(), 16 * MIB, InBlocks(UNITS))
    granted = made.least_bytes + MIB
    prepared = prepare(tmp_path, made, granted)
    assert prepared.blocks is not None
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=64 * MIB)
    runtime.open("f", made.folder, granted, prepared)
    runtime.run("f", {"x": np.zeros((1, CHANNELS, 12, 12), np.float32)}, Stopper())
    for block in prepared.blocks:
        tensors = onnx.load(block.model, load_external_data=False).graph.initializer
        assert sum(bool(each.external_data) for each in tensors) > 1
        assert len(mapped_ranges(block.weights.parent.resolve())) == 1
    runtime.close("f")


def test_values_cross_borders_in_the_layout_of_convolutions(tmp_path: Path) -> None:
    if not has_blocked_layout(tmp_path):
        pytest.skip("ONNX Runtime has no such layout for this processor")
    made = write_fragment(tmp_path, residual_model(), 16 * MIB, InBlocks(UNITS))
    found = operators(prepare(tmp_path, made, made.least_bytes + MIB))
    assert [each["ReorderInput"] for each in found] == [1, 0, 0, 0, 0]
    assert [each["ReorderOutput"] for each in found] == [0, 0, 0, 0, 1]
    # Sums are fused with convolutions, and nothing is left of what brought inputs into the layout.
    assert all(each.keys() <= {"ReorderInput", "ReorderOutput", "Conv", "Relu"} for each in found)


def test_a_border_that_the_fragment_gives_keeps_the_plain_layout(tmp_path: Path) -> None:
    made = write_fragment(tmp_path, residual_model(results=["a0"]), 16 * MIB, InBlocks(UNITS))
    if not has_blocked_layout(tmp_path):
        pytest.skip("ONNX Runtime has no such layout for this processor")
    found = operators(prepare(tmp_path, made, made.least_bytes + MIB))
    assert [each["ReorderOutput"] for each in found] == [1, 0, 0, 0, 1]
    assert [each["ReorderInput"] for each in found] == [1, 1, 0, 0, 0]


def test_what_is_no_number_passes_a_border(tmp_path: Path) -> None:
    """The largest of one element, and of that and the least number there is, differ for those."""
    made = write_fragment(tmp_path, residual_model(), 16 * MIB, InBlocks(UNITS))
    x = np.full((1, CHANNELS, 12, 12), np.nan, np.float32)
    granted = made.least_bytes + MIB
    (result,) = outputs(made, x, granted, prepare(tmp_path, made, granted))
    assert np.isnan(result).all()


def test_a_block_is_prepared_that_reads_few_rows_of_a_table(tmp_path: Path) -> None:
    in_blocks = InBlocks(2, read_bytes=MIB)
    made = write_fragment(tmp_path, table_model(rows=48 << 10), 64 * MIB, in_blocks)
    assert prepare(tmp_path, made, made.least_bytes).blocks is not None
