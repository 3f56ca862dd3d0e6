"""`python -m shoal_agent`: the agent as a process (`shoal agent` starts it too)."""

import os
import sys

from shoal_agent.unused_modules import execute_when_used

execute_when_used()

from shoal_agent.command import main  # noqa: E402 - it imports what need not be executed

if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    # Not `exit`: that would wait for a run in ONNX Runtime whose result nobody wants any more.
    os._exit(status)
