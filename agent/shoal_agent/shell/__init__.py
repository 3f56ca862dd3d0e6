"""The agent around its pure cores: sessions, transfers, ONNX Runtime, disk, measuring. All IO is here."""
