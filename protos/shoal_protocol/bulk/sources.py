"""Where the frames of a transfer come from: they are at hand, or a disk is read as they leave."""

from collections.abc import AsyncIterator, Callable, Iterable

from shoal_protocol.frames import Frame
from shoal_protocol.threads import in_thread

Frames = Callable[[int], Iterable[Frame] | AsyncIterator[Frame]]
"""The frames of a transfer, made from its number: those at hand, or as they come."""


async def read_in_thread(
    frames: Iterable[Frame], settle: Callable[[], None]
) -> AsyncIterator[Frame]:
    """Frames whose payloads are read from a disk."""
    remaining = map(Frame.copy, frames)
    while (frame := await in_thread(next, remaining, None)) is not None:
        settle()
        yield frame
