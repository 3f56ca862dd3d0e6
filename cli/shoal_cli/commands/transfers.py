"""What `inspect`, `partition` and `copy` share: fetching a model, and progress of transfers.

Progress goes to standard error, as lines: these commands run as workers, whose logs are read later.
Standard output is for what was found; its last line, where JSON was asked for.
"""

import asyncio
import sys
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final

from shoal_protocol.units import format_bytes
from shoal_protocol.visible import visible_line

if TYPE_CHECKING:
    from shoal_cli.transfer.addresses import Access
    from shoal_cli.transfer.copying import Progress

_SECONDS: Final = 5.0
"""Between two lines."""


class TransferLines:
    """Prints every few seconds how many bytes were transferred, of `total_bytes` if known."""

    def __init__(self, what: str, total_bytes: int | None = None) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._begun = self._printed = monotonic()
        self._bytes = 0

    def add(self, size_bytes: int) -> None:
        """More bytes were transferred."""
        self._bytes += size_bytes
        if monotonic() - self._printed >= _SECONDS:
            self._printed = monotonic()
            self._print()

    def show(self, progress: "Progress") -> None:
        """Take over the progress of a copy."""
        self._total_bytes = progress.bytes
        self.add(progress.done_bytes - self._bytes)

    def _print(self) -> None:
        rate = format_bytes(int(self._bytes / max(1e-3, monotonic() - self._begun)))
        done = format_bytes(self._bytes)
        whole = "" if self._total_bytes is None else f" of {format_bytes(self._total_bytes)}"
        line = visible_line(f"{self._what}: {done}{whole}, {rate}/s")
        print(line, file=sys.stderr, flush=True)


def fetch_model(
    uri: str, access: "Access", digest: str | None, cache: Path | None, limit_bytes: int
) -> Path:
    """The model at an address, on this disk. Raises what `Fetching.model` raises."""
    from shoal_cli.transfer.cache_folder import default_cache
    from shoal_cli.transfer.models import Fetching

    fetching = Fetching(
        access=access,
        cache=cache or default_cache(),
        limit_bytes=limit_bytes,
        on_bytes=TransferLines("fetching").add,
    )
    return asyncio.run(fetching.model(uri, digest))
