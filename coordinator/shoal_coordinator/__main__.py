"""`python -m shoal_coordinator`: the coordinator as a process (`shoal coordinator`)."""

import sys

from shoal_coordinator.command import main

sys.exit(main())
