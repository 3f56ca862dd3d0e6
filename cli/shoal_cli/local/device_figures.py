"""What `shoal bench-device` measures: values, and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median, quantiles

from shoal_cli.local.resident import Sample


class NoItem(Exception):
    """No item can be made for the model; the text says what to give instead."""


class DeviceFailed(Exception):
    """The device did not compute an item."""


class ModelTooSlow(Exception):
    """ONNX Runtime does not end the whole model's run; the text says within what."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one thing that was measured again and again."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        lower, _, upper = quantiles(self.seconds, n=4, method="inclusive")
        return lower, upper

    def over(self, others: "Times") -> float:
        """The median of the ratios to what was measured in the same turns."""
        return median(a / b for a, b in zip(self.seconds, others.seconds, strict=True))

    def to_json(self) -> Mapping[str, object]:
        lower, upper = self.quartiles
        return {"median": self.median, "lower_quartile": lower, "upper_quartile": upper}


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapping:
    """How a device runs the model in what it is granted, as planned from the sizes in the manifest.

    `blocks` is 0 where it runs whole. Weights that are kept stay in memory; those of the other
    blocks are dropped when their block has run, and read again for the next item. `prefetches`:
    where they come from the disk, the next block's are read while one runs.
    """

    granted_bytes: int
    least_bytes: int
    resident_bytes: int
    weight_bytes: int
    blocks: int = 0
    kept_blocks: int = 0
    kept_bytes: int = 0
    prefetches: bool = False

    @property
    def dropped_blocks(self) -> int:
        return self.blocks - self.kept_blocks

    @property
    def dropped_bytes(self) -> int:
        return self.weight_bytes - self.kept_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigures:
    """The whole model in ONNX Runtime: `way` says how it was loaded. `problem`: why there are no
    figures."""

    way: str
    problem: str = ""
    peak_bytes: int = 0
    load_seconds: float = 0.0
    first_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The agent's memory from its session to the end of the items in a row. Moments are in seconds
    by the samples' clock: the first item was given, the items in a row began and ended."""

    samples: tuple[Sample, ...]
    begun: float
    items_begun: float
    items_ended: float
    floor: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What the items on one device took.

    `first_seconds`: from the job to its result, the model fetched, prepared and opened meanwhile.
    `compute` and `cold` are times in ONNX Runtime: with the weights in the page cache, and with
    those that were dropped on the disk. `latency` is an item's whole way. `peers` are times of the
    same turns as `compute`. `kept_bytes` of the weights were in memory between two items.
    """

    first_seconds: float
    kept_bytes: int
    items_per_second: float
    compute: Times
    latency: Times
    cold: Times
    peers: Mapping[str, Times]
    traced: Traced


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetFigures:
    """One device of one budget. `enforced` says by what the budget was held; nothing if it was only
    measured.
    """

    budget_bytes: int
    floor_bytes: int
    peak_bytes: int
    swapping: Swapping
    runs: Runs
    enforced: str
    out_of_memory_kills: int
    restarts: int

    @property
    def within_budget(self) -> bool:
        return self.peak_bytes <= self.budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """All of a model's. It runs in no smaller budget than the smallest."""

    model: str
    digest: str
    threads: int
    turns: int
    smallest_budget_bytes: int
    budgets: tuple[BudgetFigures, ...]
    peers: tuple[PeerFigures, ...]


def to_json(figures: DeviceFigures) -> dict[str, object]:
    """As JSON values, without the samples: those are in the picture."""
    return {
        "model": figures.model,
        "digest": figures.digest,
        "threads": figures.threads,
        "turns": figures.turns,
        "smallest_budget_bytes": figures.smallest_budget_bytes,
        "budgets": [_budget_to_json(each) for each in figures.budgets],
        "peers": [asdict(each) for each in figures.peers],
    }


def _budget_to_json(figures: BudgetFigures) -> dict[str, object]:
    runs, swapping = figures.runs, figures.swapping
    return {
        "budget_bytes": figures.budget_bytes,
        "floor_bytes": figures.floor_bytes,
        "peak_bytes": figures.peak_bytes,
        "within_budget": figures.within_budget,
        "enforced": figures.enforced,
        "out_of_memory_kills": figures.out_of_memory_kills,
        "restarts": figures.restarts,
        "kept_bytes": runs.kept_bytes,
        "first_seconds": runs.first_seconds,
        "items_per_second": runs.items_per_second,
        "compute_seconds": runs.compute.to_json(),
        "latency_seconds": runs.latency.to_json(),
        "cold_seconds": runs.cold.to_json(),
        "peers": {
            way: {**times.to_json(), "ratio": runs.compute.over(times)}
            for way, times in runs.peers.items()
        },
        "plan": {
            **asdict(swapping),
            "dropped_blocks": swapping.dropped_blocks,
            "dropped_bytes": swapping.dropped_bytes,
        },
    }
