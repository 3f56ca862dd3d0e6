"""How large a store may become: as its user says, or as a file says that may change."""

import logging
import time
from pathlib import Path
from typing import Final

from shoal_protocol.units import Bytes, format_bytes, parse_bytes

LEAST_BYTES: Final = 1 << 20
"""No model is smaller with its inputs; who writes less has left a unit out."""

READ_SECONDS: Final = 5.0
"""For so long a file says what it said: each result asks."""

logger = logging.getLogger(__name__)


def read_size(text: str) -> Bytes:
    """The size that a text says. Raises `ValueError` where that makes no sense."""
    size = parse_bytes(text.strip())
    if size < LEAST_BYTES:
        raise ValueError(f"{text.strip()!r} is less than {format_bytes(LEAST_BYTES)}")
    return size


class ToldSize:
    """The size that a file says, which another process replaces when that changes. Where it says
    nothing that makes sense, what it said before holds."""

    def __init__(self, file: Path, seconds: float = READ_SECONDS) -> None:
        """It is read again after so many `seconds`. Raises `OSError` or `ValueError` where it says
        no size."""
        self._file = file
        self._seconds = seconds
        self._size = read_size(file.read_text())
        self._read_at = time.monotonic()

    def __call__(self) -> int:
        """As it is now, or was some seconds ago."""
        if (now := time.monotonic()) - self._read_at < self._seconds:
            return self._size
        self._read_at = now
        try:
            size = read_size(self._file.read_text())
        except (OSError, ValueError) as error:
            logger.warning("%s: %s; %s stays", self._file, error, format_bytes(self._size))
            return self._size
        if size != self._size:
            logger.info("the store may take %s now", format_bytes(size))
            self._size = size
        return self._size
