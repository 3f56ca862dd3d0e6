"""Products whose weights are quantised, and nothing else: how an agent opens and prepares them."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx.compose
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from agent.fragment_making import MadeFragment, write_fragment
from shoal_agent.cache.disk import FragmentCache
from shoal_agent.memory.residency import Ledger
from shoal_agent.runtime.preparation import Preparation
from shoal_agent.runtime.prepared import PreparedModel
from shoal_agent.runtime.recipes import DEQUANTISING, PREPARED
from shoal_agent.runtime.sessions import open_session
from shoal_agent.runtime.whole_fragment import whole_of
from shoal_protocol.manifest import MODEL
from shoal_protocol.units import Bytes

MIB = 1 << 20
ROWS, COLUMNS = 1024, 4096
DEQUANTISED = {"DequantizeLinear": 1, "MatMul": 1}
"""What runs then; the runtime would make one operator of it, which has weights of its own."""


def product(element_type: int, rows: int = ROWS) -> onnx.ModelProto:
    """One product of floats with dequantised weights."""
    packed = np.random.default_rng(0).integers(-7, 8, rows * COLUMNS, np.int8)
    if element_type == TensorProto.INT4:
        packed = (packed[::2] & 15) | (packed[1::2] << 4)
    scales = np.full(COLUMNS, 0.01, np.float32)
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, size])
        for name, size in (("x", rows), ("y", COLUMNS))
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
            helper.make_tensor("q", element_type, [rows, COLUMNS], packed.tobytes(), raw=True),
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


async def test_of_weights_of_eight_and_of_four_bits_in_one_fragment_each_are_kept_as_suits_them(
    tmp_path: Path,
) -> None:
    fragment = write_fragment(tmp_path, _both(), dequantises=True)
    prepared = await prepare(tmp_path, fragment)
    assert prepared is not None
    assert operators(prepared.model) == DEQUANTISED | {"MatMulNBits": 1}
    x = np.random.default_rng(1).random((2, ROWS), np.float32)
    made, wanted = (
        onnxruntime.InferenceSession(str(path), recipe.options(1)).run(None, {"x": x})
        for path, recipe in ((prepared.model, PREPARED), (fragment.folder / MODEL, DEQUANTISING))
    )
    assert len(made) == 1, "what was held is no result"
    np.testing.assert_allclose(made[0], wanted[0], rtol=1e-4, atol=1e-4)


def _both() -> onnx.ModelProto:
    """A product with weights of 8 bits, and one with weights of 4 bits of what that gives."""
    first, second = product(TensorProto.INT8), product(TensorProto.INT4, rows=COLUMNS)
    return onnx.compose.merge_models(
        onnx.compose.add_prefix(first, "a.", rename_inputs=False),
        onnx.compose.add_prefix(second, "b.", rename_outputs=False),
        [("a.y", "b.x")],
    )
