"""The most memory that processes were seen to have resident, in the same way for everybody."""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

SECONDS_BETWEEN_SAMPLES: Final = 0.02
_PAGE: Final = os.sysconf("SC_PAGESIZE")


@contextlib.contextmanager
def watched(process_ids: Sequence[int]) -> Iterator[list[int]]:
    """Sample these processes while the body runs; the list is the peak of each, in bytes.

    The kernel's own mark would count what a process had when it started, or not, depending on
    whether the process has reset it.
    """
    peaks = [0] * len(process_ids)
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(SECONDS_BETWEEN_SAMPLES):
            for index, number in enumerate(process_ids):
                peaks[index] = max(peaks[index], _resident_bytes(number))

    thread = threading.Thread(target=sample, name="resident", daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        thread.join()


def _resident_bytes(process_id: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * _PAGE
    return 0
