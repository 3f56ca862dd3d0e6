"""Common names of certificates that have a role of their own; any other name is a device's."""

from typing import Final

CLIENT: Final = "shoal"
"""Submits jobs from the command line."""
OPERATOR: Final = "shoal-operator"
"""Submits jobs for a cluster."""
WORKER: Final = "shoal-worker"
"""Uploads and downloads files."""
VIEWER: Final = "shoal-viewer"
"""Reads what a coordinator does."""
RESERVED: Final = frozenset({CLIENT, OPERATOR, WORKER, VIEWER})
"""No device may have one of these names."""
