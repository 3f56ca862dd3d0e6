"""Fixtures that tests of every area may ask for."""

from cluster_fixtures import control_plane

__all__ = ["control_plane"]
