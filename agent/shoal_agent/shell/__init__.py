"""The agent around its pure cores: session, transfers, ONNX Runtime, disk, measuring. All IO."""
