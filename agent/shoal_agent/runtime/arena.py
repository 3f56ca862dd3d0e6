"""The arena of ONNX Runtime that all sessions of an agent share."""

from typing import Final

import onnxruntime

from shoal_protocol.arena_regions import REGION_BYTES, SMALL_REGION_BYTES, UNSPLIT_BYTES

_GROW_BY_DOUBLING: Final = 0
_LEAST_REGION_BYTES: Final = 1 << 20
_GRANULE: Final = 256
"""The arena refuses every region that is not a multiple of it, as half of `20M` is not."""


def register_arena(limit_bytes: int) -> int:
    """Have all sessions of this process take their activations from one arena, of at most so many
    bytes. Returns the limit as the runtime keeps it."""
    limit_bytes -= limit_bytes % (2 * _GRANULE)
    region_bytes = max(_LEAST_REGION_BYTES, min(limit_bytes - SMALL_REGION_BYTES, REGION_BYTES))
    configuration = {
        "max_mem": limit_bytes,
        "arena_extend_strategy": _GROW_BY_DOUBLING,
        "initial_chunk_size_bytes": SMALL_REGION_BYTES,
        "initial_growth_chunk_size_bytes": region_bytes,
        "max_dead_bytes_per_chunk": UNSPLIT_BYTES,
    }
    onnxruntime.create_and_register_allocator(
        onnxruntime.OrtMemoryInfo(
            "Cpu",
            onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR,
            0,
            onnxruntime.OrtMemType.DEFAULT,
        ),
        onnxruntime.OrtArenaCfg(configuration),
    )
    return limit_bytes
