"""What a run did, as a value and as JSON (`--report FILE`); the format is docs/report.md.

`report.schema.json` beside this file is its JSON Schema. A reader must accept fields that it does
not know; a field that goes or changes its meaning raises `VERSION`.
"""

import json
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shoal_cli.local.run_record import CutReport, Death, Timeline
from shoal_planner.figures import PlanFigures
from shoal_protocol.durable_files import write_named
from shoal_protocol.partition import MODEL, Outgrown
from shoal_protocol.seen_sizes import Sizes

if TYPE_CHECKING:
    from pydantic import TypeAdapter

VERSION: Final = 2
REPORT_NAME: Final = "report.json"
"""In the work folder of a run."""
_MOST: Final = 1 << 63
"""The largest number, of whatever unit."""
SCHEMA_PATH: Final = Path(__file__).with_name("report.schema.json")


@dataclass(frozen=True, slots=True)
class TierHits:
    """Tasks by what their device had to do first."""

    resident: int = 0
    cached: int = 0
    idle: int = 0
    evict: int = 0

    def __add__(self, other: "TierHits") -> "TierHits":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return TierHits(*(one + another for one, another in pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentHeld:
    """A fragment that a device held during the run. `granted_bytes`: it ran there in blocks, since
    the plan granted it less than it needs to be resident.
    """

    partition: str
    index: int
    digest: str
    granted_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One device. Bytes above the floor are measured by the agent: the kernel's mark of resident
    memory, without library pages up to the floor's reserve for them.

    Counters run from the start of the run; those of an agent that died, up to its last report.
    `limit_bytes` is what may be charged to its cgroup: what was charged while it was idle, and the
    budget; None where nothing limits it. `has_exceeded`: what a coordinator says of budgets that
    may have changed; None: the budget was the same all the time.
    """

    name: str
    budget_bytes: int
    floor_bytes: int
    peak_bytes_above_floor: int
    fragments: tuple[FragmentHeld, ...]
    loads: int
    evictions: int
    tier_hits: TierHits
    tasks: int
    sent_bytes: int
    received_bytes: int
    fetched_bytes: int
    restarts: int = 0
    limit_bytes: int | None = None
    limit_failures: int = 0
    out_of_memory_kills: int = 0
    has_exceeded: bool | None = None

    @property
    def within_budget(self) -> bool:
        if self.has_exceeded is not None:
            return not self.has_exceeded
        return self.peak_bytes_above_floor <= self.budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Of an item, from its admission to its result."""

    p50_seconds: float = 0.0
    p90_seconds: float = 0.0
    p99_seconds: float = 0.0
    maximum_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedItem:
    item: int
    input: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTime:
    """What a task of a stage took on a device, averaged over the last ones, and what the plan
    predicted; None where it predicts no time."""

    device: str
    measured_seconds: float
    predicted_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """One stage: who served it, tasks that ended, and the median time of one in ONNX Runtime; and
    the times on each device that ran some of them."""

    index: int
    devices: tuple[str, ...]
    finished: int
    compute_seconds: float
    times: tuple[TaskTime, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The whole model in ONNX Runtime over the same inputs, in a process of its own.

    Differences are over every output element of every compared item. The relative one is
    |difference| / (1 + |whole model's|): it equals the absolute one near zero. `agreements` are the
    items whose outputs have their maxima along the last axis at the same places; `mismatched` are
    those that differ in name, shape, type, text or in where they are not finite: no difference can
    be given for them. `different_items` are mismatched or beyond the tolerance; `matched_items` of
    them equal the whole model under other options. `rounded_items` are beyond the tolerance, and
    not different: they differ as two results of half precision may that are rounded apart.
    `of_items` have results; `skipped` are those that failed. The `reference_`
    differences are between that session and others of the same model, with the options of agents
    and without any optimisation, over `reference_items` items: how far ONNX Runtime's own rounding
    goes. Bytes are above the floor of a process with ONNX Runtime loaded, measured as an agent
    measures its own.
    """

    items: int
    of_items: int
    skipped: int
    mismatched: int
    max_abs_diff: float
    max_rel_diff: float
    worst_item: str
    agreements: int
    tolerance: float
    different_items: int = 0
    matched_items: int = 0
    rounded_items: int = 0
    reference_items: int
    reference_abs_diff: float
    reference_rel_diff: float
    floor_bytes: int
    peak_bytes: int
    seconds: float

    @property
    def within_tolerance(self) -> bool:
        return self.mismatched == 0 and self.max_rel_diff <= self.tolerance

    @property
    def matches_other_options(self) -> bool:
        """Each item that differs equals the whole model under other options of ONNX Runtime: the
        difference is the model's own."""
        return 0 < self.different_items == self.matched_items

    @property
    def rounded_apart(self) -> bool:
        """Where items are beyond the tolerance, the model's numbers are no finer."""
        return self.mismatched == 0 and self.rounded_items > 0 == self.different_items

    @property
    def own_rounding(self) -> bool:
        """The difference is as large as the model's own: the whole model differs from itself as
        much, give or take a rounding in each of the two. So do quantised models, and those that
        draw numbers."""
        most = 2 * self.reference_rel_diff
        return self.mismatched == 0 and self.tolerance < self.max_rel_diff <= most

    @property
    def passed(self) -> bool:
        return (
            self.within_tolerance
            or self.rounded_apart
            or self.matches_other_options
            or self.own_rounding
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """One job. `succeeded` counts the `resumed` items too, whose results existed before.

    `state` is Complete only if every item succeeded; with failed items it is Failed, and `reason`
    ItemsFailed. `reason` is one word, `message` the same for people. `verification_error` says why
    it could not be verified. `outgrown` are the fragments for which it failed that fit on no
    device, `seen` the largest sizes that items had there, where no plan knows them. `plan` is the
    one that it ran by, with what was predicted and what was measured; None where nothing ran.
    """

    name: str
    state: str
    reason: str
    message: str
    model: str
    model_digest: str
    partition: str
    items: int
    succeeded: int
    failed: int = 0
    resumed: int
    retries: int = 0
    seconds: float = 0.0
    items_per_second: float = 0.0
    latency: Latency = Latency()
    tier_hits: TierHits = TierHits()
    stages: tuple[StageReport, ...] = ()
    failures: tuple[FailedItem, ...] = ()
    outputs: str
    verification: Verification | None = None
    verification_error: str = ""
    cut: CutReport | None = None
    plan: PlanFigures | None = None
    outgrown: tuple[Outgrown, ...] = ()
    seen: Sizes = field(default_factory=dict)

    def verified(self, found: Verification | str | None) -> "JobReport":
        """With the comparison, or why it failed; None where none was asked for."""
        if isinstance(found, str):
            return replace(self, verification_error=found)
        return replace(self, verification=found)

    @property
    def complete(self) -> bool:
        """Every item succeeded."""
        return self.state == "Complete"

    @property
    def ran_nothing(self) -> bool:
        """All of its results existed before the run."""
        return self.complete and 0 < self.items <= self.resumed

    @property
    def refused(self) -> bool:
        """Not one item was begun: what was asked for was refused. Results that may be in its
        folder are of another run."""
        return self.state == "Failed" and not self.items


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforcement:
    """What limits the devices: `cgroup v1`, `cgroup v2`, or `none` (measured only) and why."""

    mode: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything that a run did. `interrupted` by Ctrl-C or SIGTERM. `notes`: what did not go as
    it was planned."""

    shoal_version: str
    started: str
    seconds: float
    work: str
    enforcement: Enforcement
    coordinator_restarts: int
    interrupted: bool
    jobs: tuple[JobReport, ...]
    devices: tuple[DeviceReport, ...]
    notes: tuple[str, ...] = ()
    deaths: tuple[Death, ...] = ()
    timelines: tuple[Timeline, ...] = ()

    @property
    def succeeded(self) -> bool:
        """Every item and every verification succeeded."""
        return not self.interrupted and all(
            job.complete
            and not job.verification_error
            and (job.verification is None or job.verification.passed)
            for job in self.jobs
        )

    @property
    def within_budget(self) -> bool:
        """No device was measured over its budget."""
        return all(device.within_budget for device in self.devices)

    @property
    def enforced(self) -> bool:
        """No device could exceed its budget, and none did: each was limited to it while it ran."""
        limited = [device.limit_bytes is not None for device in self.devices]
        return self.within_budget and any(limited) and all(limited)


def to_json(report: RunReport) -> dict[str, object]:
    """The report as JSON values. A job has its verification's main figures itself, null if none."""
    document = asdict(report)
    for job, source in zip(document["jobs"], report.jobs, strict=True):
        for name in ("max_abs_diff", "max_rel_diff", "reference_abs_diff"):
            job[name] = getattr(source.verification, name, None)
        job["whole_model_peak_bytes"] = getattr(source.verification, "peak_bytes", 0) or None
    for device, held in zip(document["devices"], report.devices, strict=True):
        device["within_budget"] = held.within_budget
    return {
        "version": VERSION,
        "succeeded": report.succeeded,
        "within_budget": report.within_budget,
        "enforced": report.enforced,
        **document,
    }


class ReportRefused(Exception):
    """A file is no report that this version can read."""


@cache
def _adapter() -> "TypeAdapter[RunReport]":
    from pydantic import TypeAdapter  # noqa: PLC0415 - takes a while, seldom used

    return TypeAdapter(RunReport)


def read_report(path: Path) -> RunReport:
    """Read what `write_report` wrote, of any run whose report has this `VERSION`: fields that are
    not known are ignored, newer ones may be absent. Raises `ReportRefused`."""
    from pydantic import ValidationError  # noqa: PLC0415 - takes a while, seldom used

    try:
        document = json.loads(path.read_bytes())
        version = document.get("version") if isinstance(document, dict) else None
        if version != VERSION:
            raise ReportRefused(f"{path} is no report of version {VERSION} (docs/report.md)")
        report = _adapter().validate_python(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ReportRefused(f"{path} is no report: {where}: {first['msg']}") from error
    except ValueError as error:
        raise ReportRefused(f"{path} is no report: it is not JSON: {error}") from error
    except RecursionError as error:
        raise ReportRefused(f"{path} is no report: it is nested too deeply") from error
    if (wrong := _contradiction(report)) is not None:
        raise ReportRefused(f"{path} is no report: {wrong}; name one as `shoal run` has written it")
    return report


def _contradiction(report: RunReport) -> str | None:
    """What no run writes, as in a report that somebody has edited: whoever reads one may count on
    numbers that can be reckoned with, and on parts that belong together."""
    if (where := _odd_number(asdict(report), ())) is not None:
        return f"{where}: is no number that a run has"
    for number, job in enumerate(report.jobs):
        if job.cut is not None and (wrong := _contradiction_of_cut(job.cut)) is not None:
            return f"jobs.{number}.cut.{wrong}"
    for number, timeline in enumerate(report.timelines):
        if not timeline.column_seconds > 0:
            return f"timelines.{number}.column_seconds: is no length of time"
    return None


def _odd_number(value: object, path: tuple[str, ...]) -> str | None:
    """Where there is a number that is not finite, or beyond `_MOST`."""
    match value:
        case float() | int():
            return None if abs(value) <= _MOST else ".".join(path)
        case dict():
            inside = iter(value.items())
        case list() | tuple():
            inside = iter(enumerate(value))
        case _:
            return None
    found = (_odd_number(each, (*path, str(name))) for name, each in inside)
    return next((where for where in found if where is not None), None)


def _contradiction_of_cut(cut: CutReport) -> str | None:
    """Fragments are in order, and what goes between them goes forward."""
    count = len(cut.fragments)
    if [each.index for each in cut.fragments] != list(range(count)):
        return "fragments: are not numbered from 0 on"
    for place, edge in enumerate(cut.edges):
        if not {edge.producer, edge.consumer} <= {MODEL, *range(count)}:
            return f"edges.{place}: one of its ends is no fragment of the cut"
        if edge.producer >= (count if edge.consumer == MODEL else edge.consumer):
            return f"edges.{place}: it does not lead forward"
        if (edge.bytes_per_item or 0) < 0:
            return f"edges.{place}.bytes_per_item: is no size"
    return None


def write_report(report: RunReport, path: Path) -> None:
    """Write the JSON; of a file a reader sees the old one or the new one, never a part. The many
    numbers of the timelines are on one line."""
    document = to_json(report)
    timelines = json.dumps(document.pop("timelines"), separators=(",", ":"), allow_nan=False)
    text = json.dumps(document, indent=2, allow_nan=False).removesuffix("\n}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_named(path, f'{text},\n  "timelines": {timelines}\n}}\n'.encode())
