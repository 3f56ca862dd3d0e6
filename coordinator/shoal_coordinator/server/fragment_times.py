"""What each fragment takes on a device, as the device measured it: its tasks, and its loads.

Of tasks the device says itself what is usual. A load counts that found the fragment in the disk
cache, with what its first task takes beyond the usual: weights are mapped, and that task reads
them. Where the fragment was unloaded before, that counts too: giving its memory back takes half as
long as the load, and where fragments are loaded in turn, one goes for each that comes. One of the
loads prepares the fragment for the device, and tries it, which later ones need not; so a load takes
the median of the last few. What is known changes only when it has changed much: plans are made anew
for it.

All of this is time in the long run. Under a quota of processor time a device that has rested does a
load at the speed of a whole thread, and one that has not is held meanwhile. So a load, and its
first task, take the processor time that was counted, by the device's part of a processor, and no
less than they took: the disk may have been slower (`_lasting_seconds`). Of tasks the device has
done that itself.
"""

from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice
from statistics import median_low
from typing import Final

from shoal_protocol.digests import is_digest
from shoal_protocol.speeds import sane
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.session_pb2 import (
    CachedFragment,
    Executed,
    Hello,
    Loaded,
    MeasuredTask,
    Reply,
    TimeWithin,
    Unloaded,
)

_MOST_FRAGMENTS: Final = 256
_LONGEST_SECONDS: Final = 3600.0
_LOADS: Final = 5
_GRANTS: Final = 4
_CHANGE: Final = 1.25


@dataclass(slots=True)
class _Known:
    """Of one fragment; None: not known. `loading` is its last load, until a task has run,
    `unloading` its last unload. `within`: what tasks took as they ran, by grants."""

    task_seconds: float | None = None
    load_seconds: float | None = None
    loading: float | None = None
    unloading: float = 0.0
    within: tuple[TimeWithin, ...] = ()
    loads: deque[float] = field(default_factory=lambda: deque(maxlen=_LOADS))

    def loaded(self, seconds: float) -> None:
        """A load and what its first task took more have taken so long."""
        self.loads.append(self.unloading + seconds)
        now, before = median_low(self.loads), self.load_seconds
        if before is None or not before / _CHANGE < now < before * _CHANGE:
            self.load_seconds = now


_UNKNOWN: Final = _Known()


class FragmentTimes:
    """In one session: what the device knew before, and what it says with each answer. Of the
    fragments that it ran or loaded last."""

    def __init__(self, hello: Hello) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._processors = sane(hello.speed, "processors") or 1.0
        for cached in hello.cached:
            self.ran(cached.digest, cached)

    def ran(self, digest: str, message: CachedFragment | MeasuredTask | Executed) -> None:
        """What the device says of a fragment's tasks, if it does."""
        if message.HasField("task_seconds") and _is_time(message.task_seconds):
            self._of(digest).task_seconds = message.task_seconds
        if message.within:
            its = [each for each in message.within[:_GRANTS] if _is_time(each.seconds)]
            self._of(digest).within = tuple(sorted(its, key=lambda each: each.granted_bytes))

    def executed(self, digest: str, message: Executed) -> None:
        """A task has ended."""
        self.ran(digest, message)
        known = self._of(digest)
        if known.loading is not None and known.task_seconds is not None:
            took = self._lasting_seconds(message.compute_seconds, message.processor_seconds)
            known.loaded(known.loading + max(0.0, took - known.task_seconds))
        known.loading = None

    def moved(self, digest: str, reply: Reply) -> None:
        """A fragment has become resident, or is so no more."""
        if reply.HasField("loaded"):
            self.loaded(digest, reply.loaded)
        elif reply.HasField("unloaded"):
            self.unloaded(digest, reply.unloaded)

    def loaded(self, digest: str, message: Loaded) -> None:
        """A fragment has become resident."""
        if not message.fetched_bytes and _is_time(message.seconds):
            took = self._lasting_seconds(message.seconds, message.processor_seconds)
            self._of(digest).loading = took

    def unloaded(self, digest: str, message: Unloaded) -> None:
        """A fragment has given its memory back."""
        if _is_time(message.seconds):
            took = self._lasting_seconds(message.seconds, message.processor_seconds)
            self._of(digest).unloading = took

    def read(self, cached: Collection[str] = ()) -> list[pb.FragmentTime]:
        """What is known, by digest; also of what is in the cache, the last to come at the end."""
        ran = {
            digest
            for digest, each in self._known.items()
            if each.task_seconds is not None or each.within
        }
        on_disk = set(islice(reversed([*cached]), _MOST_FRAGMENTS))
        return [
            pb.FragmentTime(
                digest=digest,
                seconds=known.task_seconds or 0.0,
                load_seconds=known.load_seconds,
                cached=digest in cached,
                within=known.within,
            )
            for digest in sorted(ran | on_disk)
            for known in (self._known.get(digest, _UNKNOWN),)
        ]

    def _lasting_seconds(self, seconds: float, processor_seconds: float) -> float:
        """What took so long takes in the long run."""
        if not _is_time(processor_seconds):  # of an agent that does not say
            return seconds
        return max(seconds, processor_seconds / self._processors)

    def _of(self, digest: str) -> _Known:
        if not is_digest(digest):
            return _Known()  # which nobody will read
        known = self._known.setdefault(digest, _Known())
        self._known.move_to_end(digest)
        while len(self._known) > _MOST_FRAGMENTS:
            self._known.popitem(last=False)
        return known


def _is_time(seconds: float) -> bool:
    return 0 < seconds < _LONGEST_SECONDS
