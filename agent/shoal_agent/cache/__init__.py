"""Fragments on this device's disk, and how they get there."""
