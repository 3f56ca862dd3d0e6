"""One model on so many devices, with budgets from ample down to the smallest that it runs in.

Each step is a `shoal run` as a user starts it, with agents of its own in memory cgroups; what
counts is what its report and its results say. The first budget is ample, the second what the model
as one fragment needs, shared by the devices. Then the range between the smallest that ran and the
largest that was refused is halved, until they are close: so each budget that is feasible is a run.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnxruntime
from pool import read_results, write_items

from parity_with_whole import largest_difference
from real_models import Tensors
from shoal_agent.runtime.recipes import AS_IT_IS, SAVING, Recipe

KIB: Final = 1 << 10
MIB: Final = 1 << 20
HOPELESS_BYTES: Final = 2 * MIB
"""Less than a session of ONNX Runtime takes for itself."""
CLOSE: Final = 1.12
"""The search ends when the smallest budget that ran is at most so many times one that did not."""
_SECONDS: Final = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model and its items. `sensitive`: one rounding changes all of a result, so it may be that
    of the whole model with packed weights as well."""

    name: str
    path: Path
    items: Sequence[Tensors]
    tolerance: float = 1e-5
    sensitive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run. `outcome`: `ran`, `in part`, `refused` or `failed`, and `message` why. `need_bytes`
    is what the planner says its fragments need together, `peak` the largest share of its budget
    that a device took, `difference` the largest from the whole model."""

    model: str
    devices: int
    budget_bytes: int
    outcome: str
    message: str
    seconds: float
    need_bytes: int = 0
    fragments: int = 0
    peak: float = 0.0
    difference: float = 0.0

    def __str__(self) -> str:
        figures = f"{self.model:24} {self.devices} x {self.budget_bytes / MIB:7.1f} MiB"
        if self.outcome != "ran":
            return f"{figures}  {self.outcome}: peak {100 * self.peak:5.1f} %  {self.message}"
        return (
            f"{figures}  {self.fragments:3} fragments  peak {100 * self.peak:5.1f} %"
            f"  difference {self.difference:.0e}  {self.seconds:5.1f} s"
        )


def whole(subject: Subject, recipe: Recipe = AS_IT_IS) -> list[Tensors]:
    """What the whole model gives, opened as agents open fragments."""
    session = onnxruntime.InferenceSession(
        str(subject.path),
        recipe.options(os.cpu_count() or 1),
        providers=["CPUExecutionProvider"],
        disabled_optimizers=list(recipe.disabled),
    )
    names = [output.name for output in session.get_outputs()]
    return [dict(zip(names, session.run(names, dict(item)), strict=True)) for item in subject.items]


@dataclass(frozen=True, slots=True)
class Bench:
    """A folder in which a subject runs; its inputs are there, and what each item may give is
    known."""

    folder: Path
    subject: Subject
    expected: Sequence[Sequence[Tensors]]

    @classmethod
    def of(cls, subject: Subject, folder: Path) -> "Bench":
        write_items(folder / "in", subject.items)
        recipes = (AS_IT_IS, SAVING) if subject.sensitive else (AS_IT_IS,)
        results = [whole(subject, recipe) for recipe in recipes]
        return cls(folder, subject, list(zip(*results, strict=True)))

    def run(self, devices: int, budget_bytes: int) -> Row:
        """One run."""
        place = self.folder / f"{devices}-{budget_bytes}"
        started = time.monotonic()
        command = [sys.executable, "-m", "shoal_cli", "run", self.subject.path]
        command += ["--inputs", self.folder / "in", "--outputs", place / "out"]
        command += ["--devices", str(devices), "--budget", f"{budget_bytes // KIB}Ki"]
        command += ["--report", place / "report.json", "--work", place / "work", "--quiet"]
        environment = {**os.environ, "COLUMNS": "400", "NO_COLOR": "1"}
        try:
            ended = subprocess.run(
                list(map(str, command)),
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                env=environment,
                check=False,
            )
            return self._row(devices, budget_bytes, ended, place, time.monotonic() - started)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _row(
        self,
        devices: int,
        budget_bytes: int,
        ended: "subprocess.CompletedProcess[str]",
        place: Path,
        seconds: float,
    ) -> Row:
        report = _read(place / "report.json")
        job: dict[str, Any] = next(iter(report.get("jobs", ())), {})
        fragments = _fragments(place / "work")
        outcome = _outcome(report, job, fragments, ended.returncode)
        complete = outcome == "ran"
        message = "" if complete else job.get("message") or ended.stderr.strip()
        taken = [
            device["peak_bytes_above_floor"] / device["budget_bytes"]
            for device in report.get("devices", ())
        ]
        return Row(
            model=self.subject.name,
            devices=devices,
            budget_bytes=budget_bytes,
            outcome=outcome,
            message=" ".join(message.split()),
            seconds=seconds,
            need_bytes=sum(each["resident_bytes"] for each in fragments),
            fragments=len(job.get("stages", ())),
            peak=max(taken, default=0.0),
            difference=self._difference(place / "out") if complete else 0.0,
        )

    def _difference(self, folder: Path) -> float:
        given = read_results(folder)
        pairs = zip(given, self.expected, strict=True)
        return max(min(largest_difference(mine, one) for one in theirs) for mine, theirs in pairs)


def _outcome(
    report: Mapping[str, Any],
    job: Mapping[str, Any],
    fragments: Sequence[Mapping[str, Any]],
    status: int,
) -> str:
    """What became of a run. `in part`: it said that items may be too large, and those that were
    failed alone, for that. A plan has to know it. Only where sizes follow from what inputs hold may
    the run find out: it says then that no finer cut is possible."""
    if job.get("state") == "Complete":
        return "ran"
    if status == 2:
        return "refused"
    notes = report.get("notes", ())
    is_planned = any("larger than the plan covers" in note for note in notes)
    is_unknown = any(each["activation_bytes"] is None for each in fragments)
    is_found = is_unknown and any(note.startswith("it cannot be cut finer") for note in notes)
    reasons = [each["reason"] for each in job.get("failures", ())]
    is_of_items = bool(reasons) and all(each.startswith("Budget: ") for each in reasons)
    has_verdicts = job.get("succeeded", 0) + job.get("failed", 0) == job.get("items")
    if is_of_items and (is_planned or (is_found and has_verdicts)):
        return "in part"
    return "failed"


def descend(bench: Bench, devices: int, close: float = CLOSE) -> Iterator[Row]:
    """Runs from ample to the smallest budget; the first gives the need."""
    weights = sum(each.stat().st_size for each in bench.subject.path.parent.glob("*"))
    ample = _round(weights + 1024 * MIB)
    row = bench.run(1, ample)
    if devices == 1 or row.outcome != "ran":
        yield row
    largest_refused, smallest = HOPELESS_BYTES, ample
    budget = _round(row.need_bytes / devices) + 64 * KIB
    while row.outcome != "failed":
        row = bench.run(devices, budget)
        yield row
        if row.outcome == "ran":
            smallest = budget
        else:
            largest_refused = budget
        if smallest <= close * largest_refused:
            return
        budget = _round(math.sqrt(smallest * largest_refused))


def _round(size: float) -> int:
    return int(size) // (64 * KIB) * 64 * KIB


def _fragments(work: Path) -> list[dict[str, Any]]:
    """Those of the one partition in a work folder."""
    documents = [_read(path) for path in work.rglob("partitions/*/partition.json")]
    return [each for made in documents for each in made["fragments"]]


def _read(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return read
