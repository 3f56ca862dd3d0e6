"""What the operator's metrics, the kernel and the audit log say, as figures."""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

from operator_processes import RunningOperator
from shoal_cluster.control_plane import ApiWrite


@dataclass(frozen=True, slots=True)
class Sample:
    """The operator at one moment."""

    at: float
    processor_seconds: float
    resident_bytes: int
    peak_bytes: int
    buckets: Mapping[float, float]
    reconciles: Mapping[str, float]


def sample(operator: RunningOperator) -> Sample:
    """What the operator's metrics and the kernel say."""
    buckets: dict[float, float] = defaultdict(float)
    reconciles: dict[str, float] = defaultdict(float)
    text = operator.ask("/metrics")[1]
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("shoal_operator_reconcile_seconds_bucket"):
            buckets[float(name.partition('le="')[2].partition('"')[0])] += float(value)
        elif name.startswith("shoal_operator_reconcile_seconds_count"):
            reconciles[name.partition('kind="')[2].partition('"')[0]] += float(value)
    status = Path(f"/proc/{operator.process.pid}/status").read_text().splitlines()
    kernel = {line.partition(":")[0]: line.partition(":")[2] for line in status}
    return Sample(
        at=time.monotonic(),
        processor_seconds=operator.metric("process_cpu_seconds_total"),
        resident_bytes=int(kernel["VmRSS"].split()[0]) * 1024,
        peak_bytes=int(kernel["VmHWM"].split()[0]) * 1024,
        buckets=buckets,
        reconciles=reconciles,
    )


def quantile(before: Sample, after: Sample, which: float) -> float:
    """A quantile of the reconciles in between, interpolated in its bucket as Prometheus does it."""
    bounds = sorted(after.buckets)
    counts = [after.buckets[bound] - before.buckets.get(bound, 0.0) for bound in bounds]
    rank = which * counts[-1]
    place = next(index for index, count in enumerate(counts) if count >= rank)
    lower, below = (bounds[place - 1], counts[place - 1]) if place else (0.0, 0.0)
    upper = bounds[place] if bounds[place] != float("inf") else lower
    share = (rank - below) / (counts[place] - below) if counts[place] > below else 1.0
    return lower + (upper - lower) * share


def latency(writes: Sequence[ApiWrite], which: int) -> float:
    """A percentile of the API server's own time for patches."""
    seconds = [each.seconds for each in writes if each.verb in ("patch", "update", "create")]
    return quantiles(seconds, n=100)[which - 1]


def what_was_written(writes: Sequence[ApiWrite], jobs: int) -> str:
    """Writes per job by what was written, for people."""
    kinds = Counter(
        f"{each.verb} {each.resource}{'/' if each.subresource else ''}{each.subresource}"
        f"{'' if each.status < 300 else f' -> {each.status}'}"
        for each in writes
    )
    lines = (f"  {count / jobs:7.2f}  {name}" for name, count in kinds.most_common(14))
    return "\n".join(("writes per job:", *lines))
