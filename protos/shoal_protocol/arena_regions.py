"""The regions of the arena that holds activations: agents configure them, plans replay them."""

from typing import Final

SMALL_REGION_BYTES: Final = 64 << 10
"""The first region, which the arena never gives back."""
REGION_BYTES: Final = 96 << 20
"""The second, but no more than a device has and one part in `MORE_THAN_BUDGET` besides; each
further one is twice as large as the one before. Where regions are small freed blocks join less, and
near the end of one tensors lie otherwise than in the replay: a fragment of text detection takes 48
MiB in one region, and 55 to 73 in regions from 32 MiB on, whatever limit the budget sets. In larger
ones the table would be too much for an agent whose budget becomes much smaller."""
MORE_THAN_BUDGET: Final = 4
"""So that behind what fits more is left than holes are large, mostly."""
TABLE_SHARE: Final = 32
"""The arena keeps a number for each 256 bytes of a region: one byte for so many."""
UNSPLIT_BYTES: Final = 64 << 10
"""What the arena leaves of a block that is larger than asked for, rather than split it off."""
OUTSIDE_BYTES: Final = 1 << 20
"""Outputs of a fragment that are at least so large have a place outside of the arena:
less is copied in no time."""
