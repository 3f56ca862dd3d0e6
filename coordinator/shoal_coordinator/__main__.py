"""`python -m shoal_coordinator`: the coordinator as a process (`shoal coordinator`)."""

import gc
import os
import sys

if __name__ == "__main__":
    # numpy's linear algebra is not used: to start threads for it takes longer than numpy itself.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # What is imported stays: to look through it for garbage, while it comes and again when the
    # process ends, takes a third of the time that a start takes.
    gc.disable()
    from shoal_coordinator.command import main

    gc.freeze()
    gc.enable()
    sys.exit(main())
