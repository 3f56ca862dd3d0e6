"""The `shoal` command.

commands/    options, what a terminal shows, and how errors read
live/        coordinators that run: found, and what they do explained
page/        a report as one HTML page
standalone/  a coordinator without Kubernetes: who may join it, and jobs sent to it
local/       local mode: a coordinator and its agents as processes of one machine
drawing/     charts, and the SVG files that are made of them
transfer/    files between folders, buckets, web servers, registries and coordinators
"""

import contextlib
import gc
import os
import sys

# Since 1.29 ONNX Runtime reports to its maker, unless this is set before it is imported. `--verify`
# and `bench-device` run whole models in it, in processes of this package.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"


def main() -> None:
    """Entry point of `shoal`."""
    # What numpy's linear algebra does here is small: to start its threads takes longer. Not where
    # `shoal_cli` is imported, for that may be a program which has other uses for them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A command imports what it needs when it runs, and that stays: to look through it for garbage,
    # time and again, takes a sixth of the time that the start takes.
    gc.set_threshold(50_000)
    _open_streams()
    try:
        from shoal_cli.commands.app import run_app  # noqa: PLC0415 - `import shoal_cli` stays light

        status = run_app(sys.argv[1:])
    except KeyboardInterrupt:  # while all of that was imported
        status = 130
    if "obstore" in sys.modules:
        # Its threads may still call Python, and abort the process when they do so while the
        # interpreter is taken down. All is closed by now, so end without that.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(status)
    gc.freeze()  # the interpreter would look through all of it for garbage as it ends
    sys.exit(status)


def _open_streams() -> None:
    """Where the caller has closed a standard stream, nothing is read there, and what is written
    goes nowhere. The first opened takes the number of the first that is closed."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - as long as the process
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
