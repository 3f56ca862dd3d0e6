"""Whether a transfer that has begun to come goes on coming."""

from typing import Final, Protocol

from shoal_protocol.limits import STALL_BYTES

LOOKS: Final = 4
"""In the time that so many bytes may take."""


class Heard(Protocol):
    """As of `Transport`."""

    def heard(self) -> int | None: ...


class Standstill:
    """What is granted for a transfer is kept until its last byte has come. So a peer that stops
    within one, or drips, is given up: `STALL_BYTES` are to come in the time of `LOOKS` looks, but
    for time in which this side has yet to take what is there."""

    def __init__(self, transport: Heard) -> None:
        self.within = False
        """Whether a transfer, or a frame, has begun and is not here as a whole."""
        self._transport = transport
        self._mark = self._looks = 0

    def look(self) -> bool:
        """Whether too little has come since this became so."""
        heard = self._transport.heard()
        if not self.within or heard is None or heard - self._mark >= STALL_BYTES:
            self._looks = 0
            self._mark = self._mark if heard is None else heard
            return False
        self._looks += 1
        return self._looks > LOOKS
