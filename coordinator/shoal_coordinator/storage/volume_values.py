"""What a coordinator's volume answers: files, and why it does not take one."""

from dataclasses import dataclass

from shoal_protocol.digests import Digest
from shoal_protocol.units import format_downwards, format_upwards


class FileRefused(Exception):
    """A file that the volume does not take, however often it is sent."""


class ContentRefused(Exception):
    """The file exists with another content, which remains."""


class FileMissing(LookupError):
    """There is no such file."""


class NoRoom(Exception):
    """The volume cannot take it."""

    def __init__(self, need_bytes: int, free_bytes: int, size_bytes: int | None = None) -> None:
        """`size_bytes`: of all of the volume, where that is known."""
        whole = "" if size_bytes is None else f" of {format_downwards(size_bytes)}"
        super().__init__(
            f"would need {format_upwards(need_bytes)}, {format_downwards(free_bytes)}{whole} are "
            f"free on the coordinator's volume; make room there, or enlarge it (of a DevicePool: "
            f"coordinator.storage.size)"
        )
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file in its place; `digest` where it was computed."""

    name: str
    size_bytes: int
    digest: Digest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a volume has room for. `size_bytes` is what may be in it, `free_bytes` what may be
    written now, `used_bytes` what is there. Of its `fragments` those `unused` go where more is
    needed, which gives `removable_bytes`. `jobs`: those with files."""

    size_bytes: int
    free_bytes: int
    used_bytes: int
    fragments: tuple[Digest, ...] = ()
    unused: frozenset[Digest] = frozenset()
    removable_bytes: int = 0
    jobs: tuple[str, ...] = ()
