"""Scores of devices by several criteria at once: EDAS, ARAS and MABAC with entropy weights.

CROWDio, section "4-Tier Affinity Scheduler", ranks within a tier by telemetry, weighted by Shannon
entropy: a criterion in which the devices differ more tells more, and weighs more.

Rows are devices, columns criteria (`CRITERIA`). The methods are the textbook ones:

- entropy: p = x / sum(x), E = -sum(p ln p) / ln(rows), weight = (1 - E) / sum(1 - E);
- EDAS (Keshavarz Ghorabaee et al., 2015): weighted distances above and below the average;
- ARAS (Zavadskas and Turskis, 2010): share of the ideal device's weighted, normalised sum;
- MABAC (Pamucar and Cirovic, 2015): distance from the border area, the geometric mean of the rows.

A reading that is missing is unknown, never zero: it counts as the mean of the devices that have
one, which moves no comparison. A column without any reading, or in which all agree, says nothing
and has no weight. ARAS and the entropy divide by values, so each criterion is stated such that it
is positive.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.events import Policy
from shoal_coordinator.dispatch.servers import reorder
from shoal_coordinator.dispatch.state import State

Matrix = NDArray[np.float64]

COST: Final = -1
BENEFIT: Final = 1
CRITERIA: Final[tuple[tuple[str, int], ...]] = (
    ("processor load", COST),
    ("memory available", BENEFIT),
    ("temperature", COST),
    ("battery", BENEFIT),
    ("round trip", COST),
    ("queue length", COST),
    ("measured speed", BENEFIT),
)


def entropy_weights(matrix: Matrix) -> Matrix:
    """Weights of the columns, summing to 1; equal ones where no column tells devices apart."""
    rows, columns = matrix.shape
    if rows < 2:
        return np.full(columns, 1 / columns)
    shares = matrix / matrix.sum(axis=0)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    diversity = np.clip(1 + (shares * logs).sum(axis=0) / np.log(rows), 0, None)
    diversity[diversity < 1e-12] = 0.0
    total = diversity.sum()
    return np.asarray(diversity / total) if total else np.full(columns, 1 / columns)


def edas(matrix: Matrix, weights: Matrix, types: Matrix) -> Matrix:
    """Appraisal scores in 0..1, higher is better; `types` is 1 for benefit, -1 for cost."""
    average = matrix.mean(axis=0)
    distance = types * (matrix - average) / average
    above = (np.clip(distance, 0, None) * weights).sum(axis=1)
    below = (np.clip(-distance, 0, None) * weights).sum(axis=1)
    above_most, below_most = above.max(), below.max()
    above = above / above_most if above_most else np.ones_like(above)
    below = 1 - below / below_most if below_most else np.ones_like(below)
    return np.asarray((above + below) / 2)


def aras(matrix: Matrix, weights: Matrix, types: Matrix) -> Matrix:
    """Degrees of utility in 0..1 against the ideal device, higher is better."""
    ideal = np.where(types > 0, matrix.max(axis=0), matrix.min(axis=0))
    extended = np.vstack([ideal, matrix])
    extended = np.where(types > 0, extended, 1 / extended)
    value = (extended / extended.sum(axis=0) * weights).sum(axis=1)
    return np.asarray(value[1:] / value[0])


def mabac(matrix: Matrix, weights: Matrix, types: Matrix) -> Matrix:
    """Sums of distances from the border approximation area, around 0, higher is better."""
    low, high = matrix.min(axis=0), matrix.max(axis=0)
    span = np.where(high > low, high - low, 1.0)
    scaled = np.where(types > 0, (matrix - low) / span, (high - matrix) / span)
    weighted = weights * (scaled + 1)
    # The geometric mean by logarithms: a product over a thousand devices would underflow.
    logs = np.log(weighted, out=np.full_like(weighted, -np.inf), where=weighted > 0)
    border = np.exp(logs.mean(axis=0))
    return np.asarray((weighted - border).sum(axis=1))


SCORED: Final = {Policy.EDAS: edas, Policy.ARAS: aras, Policy.MABAC: mabac}


def score(readings: Sequence[Sequence[float | None]], policy: Policy) -> list[float]:
    """Scores of the rows of `readings` (columns as `CRITERIA`) under a policy; higher is better."""
    known = np.array(readings, dtype=np.float64).reshape(len(readings), len(CRITERIA))
    types = np.array([kind for _, kind in CRITERIA], dtype=np.float64)
    telling = ~np.isnan(known).all(axis=0)
    known, types = known[:, telling], types[telling]
    if not known.size:
        return [0.0] * len(readings)
    matrix = np.where(np.isnan(known), np.nanmean(known, axis=0), known)
    weights = entropy_weights(matrix)
    return [float(value) for value in SCORED[policy](matrix, weights, types)]


def refresh(state: State) -> None:
    """Score all devices again: at most once an interval, or when a policy has no scores yet."""
    used = dict.fromkeys(service.policy for service in state.services.values())
    policies = [policy for policy in used if policy in SCORED]
    if not policies or not state.devices:
        return
    devices = list(state.devices.values())
    due = state.now - state.refreshed_at >= state.limits.ranking_interval
    new = any(policy not in devices[0].scores for policy in policies)
    if not new and not (due and state.telemetry_changed):
        return
    state.refreshed_at = state.now
    state.telemetry_changed = False
    readings = _readings(devices)
    for policy in policies:
        for device, value in zip(devices, score(readings, policy), strict=True):
            device.scores[policy] = value
    for service in state.services.values():
        if service.policy in policies:
            reorder(service)


def _readings(devices: Sequence[Device]) -> list[list[float | None]]:
    speeds = _speeds(devices)
    return [
        [
            _positive(device.telemetry.cpu_fraction, 0.01),
            _positive(device.telemetry.memory_available, 1),
            _positive(device.telemetry.temperature_celsius, 1),
            _positive(device.telemetry.battery_fraction, 0.01),
            _positive(device.telemetry.round_trip, 1000),
            device.work.load + 1,
            speed,
        ]
        for device, speed in zip(devices, speeds, strict=True)
    ]


def _positive(reading: float | None, least: float) -> float | None:
    return None if reading is None else max(float(reading), least)


def _speeds(devices: Sequence[Device]) -> Iterable[float | None]:
    """Per device, how much faster than the mean it ran the fragments that it has run."""
    sums: dict[str, list[int]] = {}
    for device in devices:
        for digest, time in device.work.times.items():
            sums.setdefault(digest, []).append(time)
    means = {digest: sum(times) / len(times) for digest, times in sums.items()}
    for device in devices:
        ratios = [means[digest] / max(time, 1) for digest, time in device.work.times.items()]
        yield sum(ratios) / len(ratios) if ratios else None
