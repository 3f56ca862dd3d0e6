"""`python -m shoal_agent.calibration FOLDER`: measures one thread, and prints it as JSON."""

import os
import sys
from pathlib import Path
from typing import Final

_BUDGET_BYTES: Final = 64 << 20


def main() -> None:
    """Measure the disk in a folder, and this machine's processors; what the agents of one machine
    share."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    import onnxruntime  # noqa: PLC0415 - after the threads of numpy

    from shoal_agent.calibration.probes import measure  # noqa: PLC0415
    from shoal_protocol.speed_files import speed_json, subject  # noqa: PLC0415

    of = subject(1.0, onnxruntime.__version__)
    sys.stdout.write(speed_json(measure(1, Path(sys.argv[1]), _BUDGET_BYTES), of))


if __name__ == "__main__":
    main()
