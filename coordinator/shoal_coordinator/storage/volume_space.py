"""How much a coordinator's volume may take, has, and has left.

Two bounds hold: what its disk has free, and what is left of the volume's own size, if it has one. A
storage class may enforce no size, so the second is kept by counting what is here (`usage`). Both
leave `RESERVE_BYTES` for what nobody asks room for.

An open upload counts as a whole, so that nobody else takes what it was promised; on the disk, which
has seen what came, the rest of it does.
"""

import errno
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol

from shoal_coordinator.storage.usage import Usage
from shoal_coordinator.storage.volume_paths import FOLDERS
from shoal_coordinator.storage.volume_values import NoRoom, Room
from shoal_protocol.transfers import PartialFile

RESERVE_BYTES: Final = 16 << 20
"""Left free for the ledger and the journals of jobs."""
LOOK_SECONDS: Final = 5.0
"""Between two times that everything is counted since there seems to be no room."""
COUNTED_SECONDS: Final = 600.0
"""Between two times that everything is counted anyway."""
_LEAST_SHARE: Final = 20
"""To count everything takes at most one part in so many of a processor's time."""


class Promised(Protocol):
    """An upload that has room reserved."""

    @property
    def part(self) -> PartialFile:
        """Where it arrives."""
        ...


class Space:
    """The space of the volume at `root`. Methods block on the disk, and may raise `OSError`."""

    def __init__(self, root: Path, size: Callable[[], int] | None) -> None:
        """`size` gives what all of the volume may take, which may change; None: what its disk
        has, and nothing is counted."""
        self._root = root
        self._size = size
        self._look_again_at = 0.0
        self.uploads: set[Promised] = set()
        self.usage = Usage(root, self._parts)

    def _parts(self) -> frozenset[str]:
        """The files of open uploads, which count with what they will be."""
        return frozenset(str(each.part.path) for each in tuple(self.uploads))

    # ---- what there is ---------------------------------------------------------------------------

    @property
    def promised_bytes(self) -> int:
        """What open uploads have announced and not sent yet."""
        return sum(each.part.size_bytes - each.part.offset for each in tuple(self.uploads))

    def sizes(self) -> tuple[int, int]:
        """What may be in the volume, and what of that is left; below 0: there is more than may."""
        self._root.mkdir(parents=True, exist_ok=True)
        disk = os.statvfs(self._root)
        size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        size, spare = size - RESERVE_BYTES, free - RESERVE_BYTES - self.promised_bytes
        if self._size is None:
            return size, spare
        own = self._size()
        own -= min(RESERVE_BYTES, own // 8)
        return min(own, size), min(spare, own - self.used_bytes())

    def room(self) -> Room:
        """The same for those who ask; where nothing is counted, all that the disk holds is used."""
        size, spare = self.sizes()
        used = self.used_bytes() if self.is_counted else max(0, size - spare)
        return Room(size_bytes=size, free_bytes=max(0, spare), used_bytes=used)

    def used_bytes(self) -> int:
        """What its files take, open uploads as a whole."""
        if not self.usage.is_known:
            self.look_at_all()
        return self.usage.total_bytes + sum(each.part.size_bytes for each in tuple(self.uploads))

    def no_room(self, need_bytes: int) -> NoRoom:
        """That there is none for so much."""
        size, spare = self.sizes()
        return NoRoom(need_bytes, max(0, spare), size)

    def for_results(
        self, folder: Path, make_room: Callable[[int], bool]
    ) -> Callable[[int], None] | None:
        """What asks for room for so many bytes more of a job's results in a folder, or (below 0)
        says that they are gone, and raises `OSError` as a full disk does. None: the folder is not
        in the volume, or its disk alone decides. `make_room` says whether there is so much now."""
        root = self._root.absolute()
        if self._size is None or not folder.absolute().is_relative_to(root):
            return None
        place = "/".join(folder.absolute().relative_to(root).parts[:3])

        def take(size: int) -> None:
            if size > 0 and size > self.sizes()[1] and not make_room(size):
                raise OSError(errno.EDQUOT, str(self.no_room(size)))
            self.usage.add(place, size)

        return take

    # ---- counting --------------------------------------------------------------------------------

    def look_at(self, *folders: Path) -> None:
        """Count folders anew that were changed, and what fragments share."""
        if self._size is None:
            return
        for folder in folders:
            for place in self.usage.places(folder.relative_to(self._root)):
                self.usage.look_at(place)
        self.usage.look_at("shared")

    def look_at_written(self, jobs: Iterable[str]) -> None:
        """Count anew what others write: records, and the files of these jobs."""
        for job in jobs:
            for folder in FOLDERS:
                self.usage.look_at(f"jobs/{job}/{folder}")
        self.usage.look_at("state")

    def look_at_all(self) -> None:
        """Count everything anew."""
        began = time.monotonic()
        self.usage.look_at_all()
        now = time.monotonic()
        self._look_again_at = now + max(LOOK_SECONDS, _LEAST_SHARE * (now - began))

    @property
    def may_look_again(self) -> bool:
        """Whether it was long enough ago that everything was counted, and it helps to do it."""
        return self.is_counted and time.monotonic() >= self._look_again_at

    @property
    def is_out_of_date(self) -> bool:
        """Whether that was very long ago."""
        return time.monotonic() >= self._look_again_at + COUNTED_SECONDS

    @property
    def is_counted(self) -> bool:
        """Whether the volume has a size of its own."""
        return self._size is not None

    def added(self, place: str, size: int) -> None:
        """A place has grown by so much."""
        if self.is_counted:
            self.usage.add(place, size)
