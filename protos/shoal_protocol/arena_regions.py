"""The regions of the arena that holds activations: agents configure them, plans replay them."""

from typing import Final

SMALL_REGION_BYTES: Final = 64 << 10
"""The first region, which the arena never gives back."""
REGION_BYTES: Final = 32 << 20
"""The second; each further one is twice as large as the one before. The arena keeps a number for
each 256 bytes of a region, here 1 MiB in all. In smaller regions freed blocks join less: text
detection takes 57 MiB in regions from 8 MiB on, and 47 in these."""
UNSPLIT_BYTES: Final = 64 << 10
"""What the arena leaves of a block that is larger than asked for, rather than split it off."""
