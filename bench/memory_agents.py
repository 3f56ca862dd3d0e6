"""Through real agents: a model over three devices whose budgets are a fraction of what their
fragments need, against the same with budgets that fit. Both pools run, and get items in turns.
"""

import asyncio
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from measurement import Measurement, Report, compared
from memory_items import SUBJECTS
from memory_subjects import QUICK, QUICK_TURNS, TURNS, model_of
from pool import Pool, cut, read_results, running_pool, write_items

from shoal_planner.costs import PoolDevice
from shoal_planner.outcome import Infeasible
from shoal_planner.placement import Pin, plan
from shoal_protocol.choices import Objective, PinPolicy
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import Bytes
from shoal_protocol.v1 import coordinator_pb2 as pb

MIB = 1 << 20
MODELS = ("resnet152", "distilbert_sst2")
DEVICES = ("one", "two", "three")
_FRACTION = 5
_SPARE = 8
"""Of what blocks need at the least, one part in so many is free for items on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pin:
    fragment: int
    device: str
    policy: PinPolicy = PinPolicy.REQUIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """The fragments on the devices, each on its own, within budgets."""

    document: PartitionDocument
    budgets: Sequence[int]

    def homes_and_grants(self) -> tuple[Any, Any]:
        devices = [
            PoolDevice(name=name, budget_bytes=Bytes(size))
            for name, size in zip(DEVICES, self.budgets, strict=True)
        ]
        pins: list[Pin] = [_Pin(fragment=i, device=name) for i, name in enumerate(DEVICES)]
        found = plan(self.document, devices, Objective.LATENCY, pins=pins)
        assert not isinstance(found, Infeasible), found.problem
        return found.homes(), found.grants()


def agents(report: Report, options: Namespace) -> None:
    """Each of the models in turn."""
    chosen = QUICK if report.quick else MODELS
    for name in options.model or chosen:
        with tempfile.TemporaryDirectory(prefix="shoal-agents-") as folder:
            turns = QUICK_TURNS if report.quick else TURNS
            asyncio.run(over_three_devices(report, name, model_of(name), Path(folder), turns))


async def over_three_devices(
    report: Report, name: str, model: Path, folder: Path, turns: int
) -> None:
    feeds = SUBJECTS[name].inputs()
    shapes = {key: each.shape for key, each in feeds.items()}
    document = cut(model, folder / "few" / "store", len(DEVICES), shapes)
    cut(model, folder / "all" / "store", len(DEVICES), shapes)
    whole = [each.resident_bytes + each.resident_bytes // _SPARE for each in document.fragments]
    small = [
        max(each.resident_bytes // _FRACTION, each.least_bytes + each.least_bytes // _SPARE)
        for each in document.fragments
    ]
    shares = ", ".join(
        f"{size / MIB:.0f} of {each.resident_bytes / MIB:.0f}"
        for size, each in zip(small, document.fragments, strict=True)
    )
    report.note(f"{name}: budgets of {shares} MiB, a fifth or the least that blocks run in")
    inputs = write_items(folder / "in", [feeds])
    async with (
        _pool(folder / "few", small) as few,
        _pool(folder / "all", whole) as ample,
    ):
        times: dict[str, list[float]] = {"few": [], "all": []}
        pools = {"few": (few, small), "all": (ample, whole)}
        for turn in range(-2, turns):  # the first two load and warm up
            for key in ("few", "all") if turn % 2 else ("all", "few"):
                pool, budgets = pools[key]
                planned = _Planned(document=document, budgets=budgets)
                seconds, outputs = await _one(pool, planned, inputs, folder / key, turn)
                _check(name, model, outputs)
                if turn >= 0:
                    times[key].append(seconds)
        report.add(
            compared(
                f"{name} on three small devices: an item", times["few"], times["all"], unit="s"
            )
        )
        worst = max(each.peak_bytes / each.budget_bytes for each in (await few.devices()).values())
        report.add(
            Measurement(
                name=f"{name} on three small devices: largest share of a budget",
                value=100 * worst,
                unit="%",
            )
        )


def _pool(folder: Path, budgets: Sequence[int]) -> Any:
    devices = [{"name": name, "memory": size} for name, size in zip(DEVICES, budgets, strict=True)]
    return running_pool(folder, devices)


async def _one(
    pool: Pool, planned: _Planned, inputs: Path, folder: Path, turn: int
) -> tuple[float, dict[str, Any]]:
    """One item: its seconds from admission to result, and the result."""
    homes, grants = planned.homes_and_grants()
    out = folder / f"out-{turn}"
    status = await pool.run(
        f"item{turn + 2}", planned.document, inputs, out, homes=homes, grants=grants
    )
    assert status.state == pb.JobStatus.COMPLETE, status
    (outputs,) = read_results(out)
    return status.latency.maximum_seconds, outputs


_expected: dict[str, list[Any]] = {}


def _check(name: str, model: Path, outputs: dict[str, Any]) -> None:
    if name not in _expected:
        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        _expected[name] = list(session.run(None, SUBJECTS[name].inputs()))
    for one, two in zip(outputs.values(), _expected[name], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-3)
