"""The cluster of these tests."""

from e2e_cluster import on_nodes

__all__ = ["on_nodes"]
