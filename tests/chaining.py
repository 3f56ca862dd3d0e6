"""Fragments of a store, run one after the other in this process, as devices would run them.

A fragment that has blocks is run in them too, and must give the same to the bit.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import helper

from shoal_protocol.blocks import Block, joins_from_json
from shoal_protocol.manifest import BLOCKS, MANIFEST, parse_manifest
from shoal_protocol.partition import MODEL, PartitionDocument

Tensors = Mapping[str, npt.NDArray[np.generic]]


def run_whole(path: Path, feeds: Tensors) -> dict[str, npt.NDArray[np.generic]]:
    """The whole model in ONNX Runtime."""
    return _run(path, feeds)


def run_chained(
    store: Path,
    document: PartitionDocument,
    feeds: Tensors,
    made: dict[int, Tensors] | None = None,
    within: float = 0.0,
) -> dict[str, npt.NDArray[np.generic]]:
    """Every fragment with nothing but what its edges bring; the model's outputs.

    What each fragment makes is put into `made`. Its blocks must make the same, `within` a share of
    the largest value.
    """
    made = {} if made is None else made
    made[MODEL] = feeds
    for fragment in document.fragments:
        folder = store / "fragments" / fragment.digest.removeprefix("sha256:")
        taken = arriving(document, made, fragment.index)
        assert sorted(taken) == sorted(spec.name for spec in fragment.inputs)
        made[fragment.index] = _run(folder / "model.onnx", taken)
        blocks = parse_manifest((folder / MANIFEST).read_bytes(), fragment.digest).blocks
        if blocks:
            in_blocks = run_blocks(folder, blocks, (folder / BLOCKS).read_bytes(), taken)
            for join in joins_from_json(manifest(store, fragment.digest).get("joins")):
                parts = [in_blocks[name] for name in join.parts]
                in_blocks[join.output] = np.concatenate(parts, join.axis)
            for name, value in made[fragment.index].items():
                if within:
                    wanted, got = (each.astype(np.float64) for each in (value, in_blocks[name]))
                    most = within * float(np.abs(wanted).max(initial=0))
                    np.testing.assert_allclose(got, wanted, 0, most, err_msg=name)
                else:
                    np.testing.assert_array_equal(in_blocks[name], value, err_msg=name)
        assert sorted(made[fragment.index]) == sorted(spec.name for spec in fragment.outputs)
    return arriving(document, made, MODEL)


def run_blocks(
    folder: Path, blocks: Sequence[Block], content: bytes, feeds: Tensors
) -> dict[str, npt.NDArray[np.generic]]:
    """The blocks of the fragment in a folder, each with nothing but what it takes, and rows that a
    device reads of its tables; all values."""
    values = dict(feeds)
    described = json.loads((folder / MANIFEST).read_text())["initializers"]
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".onnx") as skeleton:
        for block in blocks:
            for each in block.gathers:
                table = _table(folder, described[each.table])
                values[each.rows] = table[values[each.indices].astype(np.int64)]
            end = block.model_offset + block.model_bytes
            Path(skeleton.name).write_bytes(content[block.model_offset : end])
            given = _run(Path(skeleton.name), {name: values[name] for name in block.takes})
            assert sorted(given) == sorted(block.gives)
            values |= given
    return values


def _table(folder: Path, described: Mapping[str, Any]) -> npt.NDArray[np.generic]:
    """An initializer, as the manifest describes it."""
    data_type = onnx.TensorProto.DataType.Value(described["dtype"].upper())
    with (folder / described.get("file", "weights.bin")).open("rb") as file:
        file.seek(described["offset"])
        content = file.read(described["bytes"])
    dtype = helper.tensor_dtype_to_np_dtype(data_type)
    return np.frombuffer(content, dtype).reshape(described["shape"])


def manifest(store: Path, digest: str) -> dict[str, object]:
    """A fragment's fragment.json."""
    path = store / "fragments" / digest.removeprefix("sha256:") / "fragment.json"
    content: dict[str, object] = json.loads(path.read_text())
    return content


def arriving(
    document: PartitionDocument, made: Mapping[int, Tensors], consumer: int
) -> dict[str, npt.NDArray[np.generic]]:
    return {
        name: made[edge.producer][name] for edge in document.into(consumer) for name in edge.tensors
    }


def _run(path: Path, feeds: Tensors) -> dict[str, npt.NDArray[np.generic]]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    # Without optimisation both compute the same operations in the same order: equal to the bit.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    wanted = {each.name for each in session.get_inputs()}
    results = session.run(names, {name: feeds[name] for name in wanted})
    return dict(zip(names, results, strict=True))
