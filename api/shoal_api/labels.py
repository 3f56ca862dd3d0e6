"""Labels and annotations that the operator writes and the command line reads."""

from typing import Final

POOL: Final = "shoal.dev/pool"
"""The DevicePool that an object is of."""
COMPONENT: Final = "app.kubernetes.io/component"
"""What an object is: `coordinator`, `agent`, or the task of a worker."""
VIEWED_WITH: Final = "shoal.dev/viewed-with"
"""Annotation of a coordinator's Service: the Secret with the certificate to look at it with."""
