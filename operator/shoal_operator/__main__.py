"""`python -m shoal_operator`: the operator as a process (`shoal operator` starts it too)."""

import sys

from shoal_operator.command import main

sys.exit(main())
