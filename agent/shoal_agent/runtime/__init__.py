"""Fragments in ONNX Runtime, and the memory that they and this process take."""
