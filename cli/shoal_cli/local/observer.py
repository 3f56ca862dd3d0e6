"""What the runner tells whoever looks on: the seam between running and showing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal_protocol.v1 import coordinator_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment; `limits` are the cgroups' limits in bytes.

    Devices have the names that are theirs alone in the whole run.
    """

    seconds: float
    jobs: tuple[pb.JobStatus, ...]
    devices: tuple[pb.DeviceStatus, ...]
    limits: Mapping[str, int] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)


def joined(parts: Sequence[Snapshot]) -> Snapshot:
    """One snapshot of several pools."""
    return Snapshot(
        seconds=max(part.seconds for part in parts),
        jobs=tuple(job for part in parts for job in part.jobs),
        devices=tuple(device for part in parts for device in part.devices),
        limits={name: size for part in parts for name, size in part.limits.items()},
        restarts={name: count for part in parts for name, count in part.restarts.items()},
    )


class Observer(Protocol):
    """ConditionUpdate as things happen; must return at once and not fail."""

    def phase(self, text: str) -> None:
        """A phase of the run begins: `cutting ppocr-rec into 3 fragments`."""

    def note(self, text: str) -> None:
        """Something worth a line of its own: `agent pi-4 killed by SIGKILL, started again`."""

    def cutting(self, partition: str, done: int, total: int) -> None:
        """How many fragments are written."""

    def verifying(self, job: str, done: int, total: int) -> None:
        """How many items are compared."""

    def running(self, snapshot: Snapshot) -> None:
        """The jobs run; comes about twice a second."""

    def ended(self) -> None:
        """Nothing more comes: clear what moves."""
