"""Signals that ask a run to end."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Final

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def handling(handlers: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Call these in the event loop when their signals come, instead of ending the process."""
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
