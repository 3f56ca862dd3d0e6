"""Fixtures that tests of every area may ask for."""

from cluster_fixtures import cluster, control_plane

__all__ = ["cluster", "control_plane"]
