"""Errors that a process contains and logs: for a fuzzer they are faults all the same."""

import contextlib
import logging
from collections.abc import Iterator


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])


@contextlib.contextmanager
def no_logged_errors() -> Iterator[None]:
    """Raise the first exception that is logged inside the context, also by asyncio."""
    collector, root = _Collector(), logging.getLogger()
    root.addHandler(collector)
    try:
        yield
    finally:
        root.removeHandler(collector)
    if collector.errors:
        raise collector.errors[0]
