"""Machines whose pages are larger than 4 KiB, as those of a Raspberry Pi 5 are."""

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal_agent.runtime.mapped_weights import map_weights
from shoal_protocol.onnx_subset_pb2 import Entry, Graph, Model, Tensor

PAGE_BYTES = 16 << 10
FLOAT, BOOL = 1, 9


def external(name: str, data_type: int, offset: int, length: int, size: int) -> Tensor:
    where = {"location": "weights.bin", "offset": str(offset), "length": str(length)}
    entries = [Entry(key=key, value=value) for key, value in where.items()]
    return Tensor(name=name, data_type=data_type, dims=[size], external_data=entries)


def test_weights_are_mapped_that_begin_in_the_middle_of_a_large_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind weights of a type that is left to the runtime, a mask for one."""
    real, numbers = mmap.mmap, np.arange(1024, dtype=np.float32)

    def with_large_pages(*given: Any, **options: Any) -> mmap.mmap:
        if options["offset"] % PAGE_BYTES:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(*given, **options)

    tensors = [
        external("mask", BOOL, 0, 4096, 4096),
        external("w", FLOAT, 4096, numbers.nbytes, numbers.size),
    ]
    model = Model(graph=Graph(initializer=tensors))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "weights.bin").write_bytes(bytes(4096) + numbers.tobytes())
    monkeypatch.setattr(mmap, "ALLOCATIONGRANULARITY", PAGE_BYTES)
    monkeypatch.setattr(mmap, "mmap", with_large_pages)
    weights = map_weights(tmp_path / "model.onnx")
    assert list(weights) == ["w"]
    np.testing.assert_array_equal(weights["w"].numpy(), numbers)
