"""Fixtures that tests of every area may ask for."""

from cluster_fixtures import api_access, cluster, control_plane

__all__ = ["api_access", "cluster", "control_plane"]
