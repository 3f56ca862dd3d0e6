"""What both planes share: the messages (`v1`), their bulk encoding, units, channel settings.

Nothing here decides anything. What only one plane needs belongs to that plane.
"""
