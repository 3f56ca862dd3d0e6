"""Options of ONNX Runtime that change what it computes: agents run fragments with these, and a
comparison with the whole model has to know them."""

from typing import Final

LEVEL: Final = "ORT_ENABLE_EXTENDED"
"""A name of `GraphOptimizationLevel`: the level above re-orders weights into copies."""
COPYING_OPTIMIZERS: Final = (
    "ConstantFolding",
    "UnsqueezeElimination",
    "ConvAddFusion",
    "ConvMulFusion",
    "ConvBNFusion",
    "MatMul_BatchNormalization_Fusion",
    "AttentionFusion",
    "QAttentionFusion",
    "GatherSliceToSplitFusion",
)
"""They fold or fuse weights into copies, and are switched off; the last makes all rows that are
gathered of a tensor by constants at once, where one after the other was reckoned with."""
UNSOUND_OPTIMIZERS: Final = ("TransposeOptimizer_CPUExecutionProvider",)
"""It moves transpositions behind a Resize, and some cubic ones have no kernel for what comes then.
A whole model may have folded that away, a fragment may not."""
FUSES_DEQUANTISED: Final = "QDQSelectorActionTransformer"
"""It makes layers of floats into quantised ones, where their weights are: those are copied, in
another order."""
EXACT_PRODUCTS: Final = ("session.qdq_matmulnbits_accuracy_level", "1")
"""By default a product with quantised weights rounds its other operand to 8 bits."""
UNPACKED: Final = ("session.disable_prepacking", "1")
"""Packed weights are copies."""
