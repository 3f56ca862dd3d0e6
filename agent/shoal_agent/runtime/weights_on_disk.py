"""Weights of a run beside which memory has no room for all of them: what was let go is to be on the
disk, and not in the page cache, from where 4 MiB come back before a guard has looked once."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from shoal_agent.runtime.guard import READ_BYTES
from shoal_agent.runtime.mapped_pages import PageRange, cached_bytes, drop, page_out, size_of
from shoal_protocol.page_cache import uncache


class WeightsOnDisk:
    """Mapped pages, and the files that they are of."""

    def __init__(self, pages: Sequence[PageRange], files: Iterable[str]) -> None:
        self._pages = pages
        self.size_bytes = size_of(pages)
        self._files = frozenset(files)

    def let_go(self) -> None:
        """Have them leave this process and the page cache, also while a run reads them."""
        page_out(self._pages)
        if cached_bytes(self._pages) <= READ_BYTES:
            return
        drop(self._pages)
        for path in self._files:
            with suppress(OSError), open(path, "rb", buffering=0) as file:  # it may be removed
                uncache(file.fileno())

    def leave(self) -> bool:
        """`let_go`; whether nearly all did leave: another process may have them mapped, or they be
        on no disk."""
        self.let_go()
        return cached_bytes(self._pages) <= READ_BYTES
