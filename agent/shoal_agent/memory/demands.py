"""What the ledger of a device's memory answers: how a load ends, and what is to be done for the
budget to hold."""

from dataclasses import dataclass
from enum import Enum, auto

from shoal_protocol.units import Bytes


class NoRoom(Exception):
    """Something does not fit; carries what it would take and what there is, in bytes."""

    def __init__(self, need_bytes: int, have_bytes: int, reason: str) -> None:
        super().__init__(reason)
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes


class Load(Enum):
    """Answers to a load that fits."""

    ADMITTED = auto()
    """Load it; the bytes are its own from now on."""
    ALREADY_THERE = auto()
    """It is resident, or on the way."""
    POSTPONED = auto()
    """It fits as soon as what moves has ended: ask again then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeRoom:
    """It fits as soon as that many bytes of activations are on disk: spill them, then ask again."""

    size: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """It is admitted, and is to begin when others run within less."""

    grants: "tuple[Grant, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """It does not fit."""

    need: Bytes
    have: Bytes
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """Bring at least that many bytes of activations to disk; `digest` is the fragment that needs
    their room, None: no single one does."""

    size: Bytes
    digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """Unload a fragment, or give up loading it: it has no place in the ledger any more."""

    digest: str
    need: Bytes
    have: Bytes
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Run a fragment within that many bytes from now on."""

    digest: str
    size: Bytes


Demand = Spill | Evict | Grant
