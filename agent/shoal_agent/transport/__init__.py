"""Bulk streams of activations, to and from the coordinator and peers."""
