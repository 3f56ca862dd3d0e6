"""What a run reports while it goes: the seam between running and showing."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal_protocol.v1 import coordinator_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All pools of a run at one moment; device names are unique in it. `restarts` are by device."""

    jobs: tuple[pb.JobStatus, ...]
    devices: tuple[pb.DeviceStatus, ...]
    restarts: Mapping[str, int]


class Observer:
    """Receives what happens, and shows nothing. Methods return at once and do not fail."""

    def phase(self, text: str) -> None:
        """A phase of the run begins: `cutting ppocr-rec into 3 fragments`."""

    def note(self, text: str) -> None:
        """Something worth a line of its own: `agent pi-4 killed by SIGKILL, started again`."""

    def cutting(self, partition: str, done: int, total: int) -> None:
        """How many fragments are written."""

    def verifying(self, job: str, done: int, total: int) -> None:
        """How many items are compared."""

    def measuring(self, what: str, done: int, total: int) -> None:
        """How many measurements are taken: of `device of 64 MiB`."""

    def running(self, snapshot: Snapshot) -> None:
        """The jobs run; comes about twice a second."""

    def ended(self) -> None:
        """Nothing more comes: clear what moves."""
