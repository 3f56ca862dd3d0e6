"""How ONNX Runtime opens a model: which optimisations, and whether it packs weights."""

from dataclasses import dataclass
from typing import Final

import onnxruntime

from shoal_protocol.session_options import (
    COPYING_OPTIMIZERS,
    EXACT_PRODUCTS,
    FUSES_DEQUANTISED,
    LEVEL,
    UNPACKED,
    UNSOUND_OPTIMIZERS,
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """`level` is a name of `GraphOptimizationLevel`; `disabled` are optimizers of that level."""

    level: str
    packs: bool
    disabled: tuple[str, ...] = ()

    def options(self, threads: int) -> onnxruntime.SessionOptions:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, self.level)
        options.add_session_config_entry(*EXACT_PRODUCTS)
        if not self.packs:
            options.add_session_config_entry(*UNPACKED)
        return options


_OFF: Final = (*UNSOUND_OPTIMIZERS, *COPYING_OPTIMIZERS)

AS_IT_IS: Final = Recipe(LEVEL, packs=False, disabled=_OFF)
"""A model that is not prepared: whatever copies weights is off."""
DEQUANTISING: Final = Recipe(LEVEL, packs=False, disabled=(*_OFF, FUSES_DEQUANTISED))
"""The same, of a model that is to dequantise its weights at each run, in place of copying them."""
UNPREPARED: Final = (AS_IT_IS, DEQUANTISING)
SAVING: Final = Recipe("ORT_ENABLE_ALL", packs=True, disabled=UNSOUND_OPTIMIZERS)
"""To prepare a model, in a child process."""
PREPARED: Final = Recipe("ORT_DISABLE_ALL", packs=True)
"""A prepared model: packed weights are found among its external data, and mapped."""
PREPARED_UNPACKED: Final = Recipe("ORT_DISABLE_ALL", packs=False)
"""The same, where packing would take too much memory."""
