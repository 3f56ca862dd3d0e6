"""What a task of each fragment takes on a device, as the device measured it."""

from collections import OrderedDict
from typing import Final

from shoal_protocol.digests import is_digest
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.session_pb2 import CachedFragment, Executed, Hello, MeasuredTask

_MOST_FRAGMENTS: Final = 256
_LONGEST_SECONDS: Final = 3600.0


class TaskTimes:
    """In one session: what the device knew before, and what it says with each task. Of the
    fragments that it ran last."""

    def __init__(self, hello: Hello) -> None:
        self._seconds: OrderedDict[str, float] = OrderedDict()
        for cached in hello.cached:
            self.note(cached.digest, cached)

    def note(self, digest: str, message: CachedFragment | Executed | MeasuredTask) -> None:
        """What the device says of a fragment, if it does."""
        took = message.task_seconds
        known = message.HasField("task_seconds") and 0 < took < _LONGEST_SECONDS
        if known and is_digest(digest):
            self._seconds[digest] = took
            self._seconds.move_to_end(digest)
            while len(self._seconds) > _MOST_FRAGMENTS:
                self._seconds.popitem(last=False)

    def read(self) -> list[pb.FragmentTime]:
        """What is known, by digest."""
        known = sorted(self._seconds.items())
        return [pb.FragmentTime(digest=digest, seconds=took) for digest, took in known]
