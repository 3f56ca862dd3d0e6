"""What waits for a link, or is under way on it: transfers that are answered, and frames that are
not; and what links have carried."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from shoal_protocol.bulk.sources import Frames
from shoal_protocol.codecs import LinkCodec
from shoal_protocol.eager import Prompt
from shoal_protocol.frame_sizes import DISK_PIECE_BYTES
from shoal_protocol.frames import Frame
from shoal_protocol.tensors import ActivationKey, Array, EncodedActivation, encode_activation
from shoal_protocol.threads import in_thread
from shoal_protocol.v1.tensors_pb2 import NONE, Acknowledgement

_ENCODE_IN_THREAD_FROM_BYTES: Final = 64 << 10


class Undelivered(Exception):
    """A transfer was not taken. `outcome` is the receiver's; None: it was not reached."""

    def __init__(self, reason: str, outcome: Acknowledgement.Outcome | None = None) -> None:
        super().__init__(reason)
        self.outcome = outcome


class OutboundActivation(NamedTuple):
    """What is to be sent: tensors on one edge, and the device they are for (empty: a result).

    `lossy` permits float16; `bfloat16` names the uint16 arrays that are that; `ticket` shows the
    receiver that the coordinator has asked for this transfer. `settle` is there where reading the
    tensors may wait for a disk: it lets go of the pages that were read for a frame.
    """

    key: ActivationKey
    device: str
    tensors: Mapping[str, Array]
    lossy: bool = False
    bfloat16: frozenset[str] = frozenset()
    ticket: bytes = b""
    settle: Callable[[], None] | None = None


async def encode(
    outbound: OutboundActivation, codec: LinkCodec | None, frame_bytes: int
) -> EncodedActivation:
    """What is sent of an activation, in frames of at most so many bytes; without a codec, where
    bytes cost less than coding. Raises `UnsupportedTensor`."""
    on_disk = outbound.settle is not None
    work = partial(
        encode_activation,
        outbound.key,
        outbound.device,
        outbound.tensors,
        transfer=0,
        codec=NONE if codec is None else codec,
        lossy=outbound.lossy,
        bfloat16=outbound.bfloat16,
        frame_bytes=DISK_PIECE_BYTES if on_disk else frame_bytes,
    )
    size, text = 0, False
    for tensor in outbound.tensors.values():
        size += tensor.nbytes
        text = text or tensor.dtype.kind in "OU"
    quick = (codec is None and not text) or size < _ENCODE_IN_THREAD_FROM_BYTES
    encoded = work() if quick and not on_disk else await in_thread(work)
    encoded.header.activation.ticket = outbound.ticket
    return encoded


@dataclass(slots=True, eq=False)
class Outgoing:
    """A transfer on its way: `frames` that carry `size` bytes; infinite: they are yet to come.

    `left_at` is when its turn came, `written_at` when the last frame was written; `behind` is how
    many frames that nobody acknowledges had left before.
    """

    number: int
    frames: Frames
    size: float
    answered: Prompt[Acknowledgement]
    left_at: float = math.inf
    written_at: float = math.inf
    behind: int = 0

    def forget(self) -> None:
        """Its frames have left: what they were made of is not kept until they are acknowledged."""
        self.frames = _none

    def fail(self, reason: str) -> None:
        """Nobody will acknowledge it."""
        if not self.answered.done():
            self.answered.set_exception(Undelivered(reason))
            self.answered.exception()  # a sender that gave up must not make it a warning


@dataclass(slots=True)
class Traffic:
    """What one or several links have carried: bytes of messages, and how often a sender had to
    wait because `WAITING_TRANSFERS` were waiting already."""

    sent_bytes: int = 0
    received_bytes: int = 0
    full_queues: int = 0


class Unanswered(NamedTuple):
    """A frame that nobody acknowledges; `left` is called once, when it needs no memory any more."""

    frame: Frame
    left: Callable[[], None]


class UnansweredFrames(deque[Unanswered]):
    """Those that wait for a link, in order."""

    left = 0
    """How many have been taken."""
    arrived = 0
    """How many the other side has received: it acknowledged what left behind them."""

    @property
    def number(self) -> int:
        """How many there have been: that of the newest."""
        return self.left + len(self)

    def take(self, count: int, size: int) -> list[Unanswered]:
        """The next, at most so many with so many bytes; one alone may be larger."""
        taken: list[Unanswered] = []
        while self and len(taken) < count:
            size -= self[0].frame.size
            if size < 0 and taken:
                break
            taken.append(self.popleft())
        self.left += len(taken)
        return taken

    def drop(self) -> None:
        """The link has ended."""
        while self:
            self.popleft().left()


def _none(_: int) -> tuple[Frame, ...]:
    return ()


class Leaving:
    """The large transfer whose frames are being written, if there is one."""

    def __init__(self) -> None:
        self._outgoing: Outgoing | None = None
        self._left = asyncio.Event()

    def __bool__(self) -> bool:
        return self._outgoing is not None

    @contextmanager
    def of(self, outgoing: Outgoing) -> Iterator[None]:
        """It is written meanwhile."""
        self._outgoing = outgoing
        self._left.clear()
        try:
            yield
        finally:
            outgoing.forget()
            self._outgoing = None
            self._left.set()

    async def until_left(self, outgoing: Outgoing) -> None:
        """Returns when it is not being written, however often this is cancelled: who gives a
        transfer up has the memory of its tensors back only then."""
        while self._outgoing is outgoing:
            with suppress(asyncio.CancelledError):
                await self._left.wait()
