"""What carries a tensor takes in memory besides the tensor: agents count it, plans leave room."""

from typing import Final

INLINE_BYTES: Final = 16 << 10
"""Inputs up to this size travel with the instruction, results with its reply. A full batch of these
stays far below what a message may have."""
MAXIMUM_PAYLOAD_BYTES: Final = 1 << 20
DISK_PIECE_BYTES: Final = 64 << 10
"""What goes to a disk or comes from one is moved in such pieces: memory is short there, and has
each of them twice, mapped and copied. A full device moves it without counting them."""
AHEAD_BYTES: Final = 4 << 20
"""Measured: inputs of 4 and 13 MiB took 3.9 to 5.6 MiB more while they were received."""


def frame_bytes(size: int) -> int:
    """What the frames that carry an activation take on their way: the one that is made or taken
    apart, and its copy in gRPC, or what the kernel holds of it on a local link."""
    return 2 * min(size, MAXIMUM_PAYLOAD_BYTES)


def received_frame_bytes(size: int) -> int:
    """The same for one that is received: gRPC takes more frames meanwhile, of the next one too."""
    return frame_bytes(size) + (AHEAD_BYTES if size > MAXIMUM_PAYLOAD_BYTES else 0)


FETCH_BYTES: Final = received_frame_bytes(2 * MAXIMUM_PAYLOAD_BYTES)
"""What a fragment takes on its way to the disk, which is not held itself. Measured: 2.0 to 2.5 MiB,
and up to 4.4 where others take the processors from who writes it."""
