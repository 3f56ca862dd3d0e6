"""The closed choices that the kinds offer; their values are what a manifest writes."""

from enum import StrEnum
from typing import Final

LARGEST_BATCH: Final = 1024
"""Items that a job may have run at once."""


class Mode(StrEnum):
    """What a task waits for: its own predecessors only, or all of the stages before it."""

    STREAMING = "Streaming"
    BARRIER = "Barrier"


class Policy(StrEnum):
    """How devices of one tier are ranked (CROWDio, section "4-Tier Affinity Scheduler")."""

    FIFO = "Fifo"
    LEAST_LOADED = "LeastLoaded"
    EDAS = "Edas"
    ARAS = "Aras"
    MABAC = "Mabac"


class Precision(StrEnum):
    """How exactly float32 tensors travel: bit for bit, or as float16 where that is faster."""

    EXACT = "Exact"
    HALF = "Half"


class Objective(StrEnum):
    """What a plan makes best: items per second, one item's time, or the time of the whole job."""

    THROUGHPUT = "Throughput"
    LATENCY = "Latency"
    MAKESPAN = "Makespan"


class Residency(StrEnum):
    """How many fragments a device may hold at once: as many as the budget takes, or one."""

    ADAPTIVE = "Adaptive"
    SINGLE = "Single"


class PinPolicy(StrEnum):
    """Whether a plan must follow a pin, or only where it costs nothing."""

    REQUIRED = "Required"
    PREFERRED = "Preferred"


class Cutting(StrEnum):
    """Who decides where a model is cut: the plan, together with which devices run what."""

    PLANNED = "Planned"
