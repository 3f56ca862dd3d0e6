"""Shoal's data plane on one device: fragments under a memory budget, activations in and out.

Light on purpose: it imports neither `onnx` nor `kubernetes` nor `kopf`.
"""

__version__ = "0.1.0"
