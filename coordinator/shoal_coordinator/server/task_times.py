"""What a task of each fragment takes on each device, as the devices measured it."""

from collections import OrderedDict
from typing import Final

from shoal_protocol.digests import Digest, is_digest
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.session_pb2 import CachedFragment, Executed, Hello

_MOST_FRAGMENTS: Final = 256
_MOST_DEVICES: Final = 4096
_LONGEST_SECONDS: Final = 3600.0


class TaskTimes:
    """By device, of the fragments that it has; those that it ran last."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[str, OrderedDict[str, float]] = OrderedDict()

    def joined(self, hello: Hello) -> None:
        """A device says what it knows from before."""
        self._seconds.pop(hello.device, None)
        while len(self._seconds) >= _MOST_DEVICES:
            self._seconds.popitem(last=False)
        for cached in hello.cached:
            self._note(hello.device, cached.digest, cached)

    def executed(self, device: str, digest: Digest, executed: Executed) -> None:
        """A device has finished a task."""
        self._note(device, digest, executed)

    def of(self, device: str) -> list[pb.FragmentTime]:
        """What is known of it, by digest."""
        known = sorted(self._seconds.get(device, OrderedDict[str, float]()).items())
        return [pb.FragmentTime(digest=digest, seconds=took) for digest, took in known]

    def _note(self, device: str, digest: str, message: CachedFragment | Executed) -> None:
        took = message.task_seconds
        if not (message.HasField("task_seconds") and 0 < took < _LONGEST_SECONDS):
            return
        if not is_digest(digest):
            return
        known = self._seconds.setdefault(device, OrderedDict())
        known[digest] = took
        known.move_to_end(digest)
        while len(known) > _MOST_FRAGMENTS:
            known.popitem(last=False)
