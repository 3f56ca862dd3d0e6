"""Shoal's control plane: the kinds, cutting, planning, dispatch, and the shells around them."""

__version__ = "0.1.0"
