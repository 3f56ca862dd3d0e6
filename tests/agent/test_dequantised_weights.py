"""Products whose weights are quantised, and nothing else: how an agent opens and prepares them."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from agent.fragment_making import MadeFragment, write_fragment
from shoal_agent.cache.disk import FragmentCache
from shoal_agent.memory.residency import Ledger
from shoal_agent.runtime.preparation import Preparation
from shoal_agent.runtime.prepared import PreparedModel
from shoal_agent.runtime.sessions import open_session
from shoal_agent.runtime.whole_fragment import whole_of
from shoal_protocol.units import Bytes

MIB = 1 << 20
ROWS, COLUMNS = 1024, 4096
DEQUANTISED = {"DequantizeLinear": 1, "MatMul": 1}
"""What runs then; the runtime would make one operator of it, which has weights of its own."""


def product(element_type: int) -> onnx.ModelProto:
    """One product of floats with dequantised weights."""
    packed = np.random.default_rng(0).integers(-7, 8, ROWS * COLUMNS, np.int8)
    if element_type == TensorProto.INT4:
        packed = (packed[::2] & 15) | (packed[1::2] << 4)
    scales = np.full(COLUMNS, 0.01, np.float32)
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, size])
        for name, size in (("x", ROWS), ("y", COLUMNS))
    ]
    graph = helper.make_graph(
        [
            helper.make_node("DequantizeLinear", ["q", "scales"], ["w"], axis=1),
            helper.make_node("MatMul", ["x", "w"], ["y"]),
        ],
        "product",
        ends[:1],
        ends[1:],
        [
            helper.make_tensor("q", element_type, [ROWS, COLUMNS], packed.tobytes(), raw=True),
            numpy_helper.from_array(scales, "scales"),
        ],
    )
    opset = helper.make_opsetid("", 21)
    return helper.make_model(graph, opset_imports=[opset], ir_version=10)


async def prepare(store: Path, fragment: MadeFragment) -> PreparedModel | None:
    ledger = Ledger(budget=Bytes(512 * MIB))
    preparation = Preparation(
        FragmentCache(store, 1 << 30), ledger.request_move, ledger.end_move, worth_bytes=0
    )
    return (await preparation.prepare(fragment.digest, fragment.folder, 4 * MIB)).whole


def operators(path: Path) -> Counter[str]:
    graph = onnx.load(path, load_external_data=False).graph
    return Counter(node.op_type for node in graph.node)


@pytest.mark.parametrize("dequantises", [True, False])
def test_weights_that_are_dequantised_are_not_copied_when_the_fragment_is_opened(
    dequantises: bool, tmp_path: Path
) -> None:
    fragment = write_fragment(tmp_path, product(TensorProto.INT8), dequantises=dequantises)
    whole = whole_of(fragment.folder, None, None, 0)
    options = whole.options(1)
    options.optimized_model_filepath = str(tmp_path / "opened.onnx")
    open_session(str(whole.model), options, whole.recipe)
    assert (operators(tmp_path / "opened.onnx") == DEQUANTISED) == dequantises
    assert not whole.prepared


async def test_a_prepared_fragment_goes_on_to_dequantise_weights_of_eight_bits(
    tmp_path: Path,
) -> None:
    fragment = write_fragment(tmp_path, product(TensorProto.INT8), dequantises=True)
    prepared = await prepare(tmp_path, fragment)
    assert prepared is not None
    assert operators(prepared.model) == DEQUANTISED


async def test_weights_of_four_bits_are_packed_since_that_is_many_times_as_fast(
    tmp_path: Path,
) -> None:
    fragment = write_fragment(tmp_path, product(TensorProto.INT4), dequantises=True)
    prepared = await prepare(tmp_path, fragment)
    assert prepared is not None
    assert operators(prepared.model) == {"MatMulNBits": 1}
