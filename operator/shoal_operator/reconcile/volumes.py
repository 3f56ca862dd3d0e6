"""The volume of a coordinator: what was claimed for it, and what its store has room for. Pure."""

from dataclasses import dataclass
from typing import Final

from shoal_protocol.units import Bytes

_FOR_A_POD: Final = ("WaitForFirstConsumer:", "WaitForPodScheduled:")
"""How the message of a claim begins whose storage class provisions where the pod is scheduled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A persistent volume claim. `size` is what it requests, which a volume may exceed; `capacity`
    is what it has, as far as that is known. `message` says why it is not bound yet. `leaving`: it
    is being deleted, and goes when no pod has it mounted.
    """

    name: str
    bound: bool
    size: Bytes
    capacity: Bytes = Bytes(0)
    storage_class: str | None = None
    message: str = ""
    leaving: bool = False

    def is_of(self, size: int) -> bool:
        """Whether it is as large as that, and no resize of it is under way."""
        return self.size >= size and self.capacity >= self.size

    @property
    def waits_for_pod(self) -> bool:
        """Whether it is bound once its pod has a node: what keeps the pod from that keeps it."""
        return not self.bound and self.message.startswith(_FOR_A_POD)

    @property
    def room_bytes(self) -> int:
        """What may be in it: a storage class may give more than is asked for, or enforce nothing
        and never say that it has resized."""
        return max(self.size, self.capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRoom:
    """What the store of a coordinator has room for. `size_bytes` is what may be in it, inputs and
    results included, `free_bytes` what may be written now. Fragments that are `unused` go where
    room is needed, which gives `removable_bytes`.
    """

    size_bytes: int
    free_bytes: int
    removable_bytes: int = 0
    unused: frozenset[str] = frozenset()
