"""The agent around its pure cores: session, transfers, ONNX Runtime, disk, measuring. All IO."""

import os

# Since 1.29 ONNX Runtime reports to its maker, from ten seconds after its import on, unless this is
# set before that. A device tells nobody what it runs, and needs the megabyte for something else.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
