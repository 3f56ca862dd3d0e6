"""Whether a fragment may run several items at once, and the proof of it."""
