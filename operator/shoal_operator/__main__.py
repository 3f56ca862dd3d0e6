"""`python -m shoal_operator`: the operator as a process (`shoal operator` starts it too)."""

import gc
import sys

if __name__ == "__main__":
    # What is imported stays: to look through it for garbage, while it comes and again when the
    # process ends, takes a quarter of the time that a start takes.
    gc.disable()
    from shoal_operator.command import main

    gc.freeze()
    gc.enable()
    sys.exit(main())
