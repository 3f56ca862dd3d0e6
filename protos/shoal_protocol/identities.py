"""Common names of certificates that mean something at a coordinator; any other is a device's."""

from typing import Final

WORKER: Final = "shoal-worker"
"""Brings and fetches files."""
OPERATOR: Final = "shoal-operator"
"""Gives work."""
