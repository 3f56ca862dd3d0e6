"""Comparing what a pool gives with what ONNX Runtime gives for the whole model.

The peer is a default session. A difference is measured against the size of the output, for outputs
that are not of order one.
"""

from pathlib import Path

import numpy as np
import onnxruntime
from pool import Pool, cut, read_results, write_items

from real_models import MODELS, Tensors, find
from shoal_protocol.v1 import coordinator_pb2 as pb

TOLERANCE = 1e-5
ITEMS = 2


def whole(path: Path, items: list[Tensors]) -> list[dict[str, np.ndarray]]:
    """What a default session over the whole model gives."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # Threads that spin while they wait compute nothing, and take the processor from other tests.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    taken = {value.name for value in session.get_inputs()}
    return [
        dict(
            zip(
                names,
                session.run(names, {n: v for n, v in item.items() if n in taken}),
                strict=True,
            )
        )
        for item in items
    ]


def largest_difference(given: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Over all outputs, against the size of each (at least one)."""
    assert given.keys() == expected.keys()
    worst = 0.0
    for name, value in expected.items():
        assert given[name].shape == value.shape
        if value.dtype.kind == "O":  # text
            assert given[name].tolist() == value.tolist()
            continue
        assert given[name].dtype == value.dtype
        if value.size:
            size = max(1.0, float(np.abs(value.astype(np.float64)).max()))
            gap = np.abs(given[name].astype(np.float64) - value.astype(np.float64)).max()
            worst = max(worst, float(gap) / size)
    return worst


async def difference(pool: Pool, name: str, fragments: int, folder: Path) -> float:
    """Cut a model, stream items through the pool, compare."""
    model, path = MODELS[name], find(name)
    document = cut(path, pool.store, fragments, model.shapes())
    assert len(document.fragments) == fragments
    items = [model.inputs(seed) for seed in range(ITEMS)]
    inputs = write_items(folder / "in", items)
    job = f"{name.replace('_', '-')}-{fragments}"
    homes = [[pool.device_names[index % len(pool.device_names)]] for index in range(fragments)]
    status = await pool.run(job, document, inputs, folder / "out", homes=homes)
    assert status.state == pb.JobStatus.COMPLETE, status
    results, expected = read_results(folder / "out"), whole(path, items)
    return max(largest_difference(a, b) for a, b in zip(results, expected, strict=True))
