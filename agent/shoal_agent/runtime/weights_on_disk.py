"""Weights of a run beside which memory has no room for all of them: what was let go is to be on the
disk, and not in the page cache, from where 4 MiB come back before a guard has looked once."""

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType

from shoal_agent.runtime.guard import READ_BYTES
from shoal_agent.runtime.mapped_pages import PageRange, cached_bytes, drop, size_of
from shoal_protocol.page_cache import uncache


class WeightsOnDisk:
    """Mapped pages of files, as long as one run lasts."""

    def __init__(self, pages: Sequence[PageRange], files: Iterable[str]) -> None:
        self._pages = pages
        self.size_bytes = size_of(pages)
        self._files = frozenset(files)
        self._descriptors: list[int] = []
        self._opened = ExitStack()

    def __enter__(self) -> "WeightsOnDisk":
        for path in self._files:
            with suppress(OSError):  # it was removed
                self._descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                self._opened.callback(os.close, self._descriptors[-1])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.close()

    def let_go(self) -> None:
        """Have them leave this process and the page cache."""
        drop(self._pages)
        for each in self._descriptors:
            with suppress(OSError):
                uncache(each)

    def leave(self) -> bool:
        """`let_go`; whether nearly all did leave: another process may have them mapped, or they be
        on no disk."""
        self.let_go()
        return cached_bytes(self._pages) <= READ_BYTES
