"""Through real agents: a model over three devices whose budgets are a fraction of what their
fragments need, against the same with budgets that fit. All six run, and take items in turns.
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
from measurement import VALUE, Measurement, Report, compared
from memory_items import SUBJECTS
from memory_subjects import QUICK, QUICK_TURNS, TURNS, model_of
from pool import cut, read_results, running_pool, write_items

from shoal_planner.costs import Costs, Span
from shoal_planner.devices import PoolDevice
from shoal_planner.outcome import Infeasible
from shoal_planner.placement import plan
from shoal_protocol.choices import Objective, PinPolicy
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import Bytes
from shoal_protocol.v1 import coordinator_pb2 as pb

MIB = 1 << 20
MODELS = ("resnet152", "distilbert_sst2")
FRAGMENTS = 3
_FRACTION = 5
_SPARE = 8
"""One part in so many is free beside what fragments, and items on their way, are planned with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pin:
    fragment: int
    device: str
    policy: PinPolicy = PinPolicy.REQUIRED


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
    document = cut(model, folder / "store", FRAGMENTS, shapes)
    costs, spans = Costs(document), [Span(number, number + 1) for number in range(FRAGMENTS)]
    ways = {
        "few": [
            max(costs.resident(each) // _FRACTION, _spared(costs.least(each))) for each in spans
        ],
        "all": [_spared(costs.resident(each)) for each in spans],
    }
    shares = ", ".join(
        f"{size / MIB:.0f} of {each.resident_bytes / MIB:.0f}"
        for size, each in zip(ways["few"], document.fragments, strict=True)
    )
    report.note(f"{name}: budgets of {shares} MiB: a fifth, or the least that the blocks run in")
    inputs = write_items(folder / "in", [feeds])
    planned = {way: _planned(document, way, budgets) for way, budgets in ways.items()}
    devices = [
        {"name": _device(way, number), "memory": size}
        for way, budgets in ways.items()
        for number, size in enumerate(budgets)
    ]
    times: dict[str, list[float]] = {way: [] for way in ways}
    async with running_pool(folder, devices) as pool:
        for turn in range(-2, turns):  # the first two load and warm up
            for way in ways if turn % 2 else reversed(ways):
                label = f"{way}-{turn + 2}"
                homes, grants = planned[way]
                out = folder / f"out-{label}"
                status = await pool.run(label, document, inputs, out, homes=homes, grants=grants)
                assert status.state == pb.JobStatus.COMPLETE, status
                _check(name, model, read_results(out)[0])
                if turn >= 0:
                    times[way].append(status.latency.maximum_seconds)
        known = await pool.devices()
    title = f"{name} on three small devices"
    report.add(compared(f"{title}: an item", times["few"], times["all"], unit="s"))
    for number in range(FRAGMENTS):
        each = known[_device("few", number)]
        share = 100 * each.peak_bytes / each.budget_bytes
        what = f"{title}: share of the budget of device {number + 1}"
        report.add(Measurement(name=what, value=share, unit="%", goal=VALUE <= 100))


def _spared(size: int) -> int:
    return size + size // _SPARE


def _device(way: str, number: int) -> str:
    return f"{way}-{number}"


def _planned(
    document: PartitionDocument, way: str, budgets: Sequence[int]
) -> tuple[Sequence[Sequence[str]], Sequence[Sequence[int]]]:
    """Each fragment on a device of its own: which, and what it is granted there."""
    names = [_device(way, number) for number in range(FRAGMENTS)]
    devices = [
        PoolDevice(name=name, budget_bytes=Bytes(size))
        for name, size in zip(names, budgets, strict=True)
    ]
    pins = [_Pin(fragment=number, device=name) for number, name in enumerate(names)]
    found = plan(document, devices, Objective.LATENCY, pins=pins)
    assert not isinstance(found, Infeasible), found.problem
    return found.homes(), found.grants()


_expected: dict[str, list[Any]] = {}


def _check(name: str, model: Path, outputs: dict[str, Any]) -> None:
    if name not in _expected:
        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        _expected[name] = list(session.run(None, SUBJECTS[name].inputs()))
    for one, two in zip(outputs.values(), _expected[name], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-3)
