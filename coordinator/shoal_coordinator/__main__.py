"""`python -m shoal_coordinator`: the coordinator as a process (`shoal coordinator`)."""

import os
import sys

if __name__ == "__main__":
    # numpy's linear algebra is not used: to start threads for it takes longer than numpy itself.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from shoal_coordinator.command import main

    sys.exit(main())
