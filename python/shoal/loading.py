"""From a model's file to the first message of its call: checked, cut into the pool's store, planned
on its devices."""

from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path

from shoal.errors import ModelFailed
from shoal.running import Running
from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.orders import dns_label
from shoal_cli.local.preparation import Prepared, prepare
from shoal_cli.local.steps import StepCrashed, StepRefused
from shoal_planner.outcome import Infeasible
from shoal_planner.placement import plan
from shoal_protocol.choices import Objective
from shoal_protocol.partition import document_to_json
from shoal_protocol.units import seconds
from shoal_protocol.v1 import coordinator_pb2 as pb

_TRIES = 3
"""Of an item, beyond the first: as for a job that says nothing."""


def integer(value: object) -> int | None:
    """A whole number, also of NumPy's types; None: it is something else."""
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def whole_number(name: str, value: object, least: int, most: int | None = None) -> int:
    """A number of something. Raises `ValueError`."""
    number = integer(value)
    if number is None or number < least or (most is not None and number > most):
        upward = f"from {least} on" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={value!r} is no whole number {upward}")
    return number


def sizes_by_name(shapes: object) -> Mapping[str, tuple[int, ...]]:
    """The `shapes` of `load`, checked. Raises `ValueError`."""
    if not isinstance(shapes, Mapping):
        raise ValueError(f"shapes={shapes!r} is no dictionary such as {{'x': (8, 1024)}}")
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if not isinstance(shape, Sequence) or isinstance(shape, str):
            raise ValueError(f"shapes of {name!r}: {shape!r} is no sequence such as (8, 1024)")
        found[name] = tuple(whole_number(f"shapes of {name!r}: size", size, 0) for size in shape)
    return found


async def load(
    path: Path, pool: Running, shapes: Mapping[str, tuple[int, ...]], fragments: int | None
) -> pb.SubmitJobRequest:
    """Cut and plan a model, whose fragments are then the coordinator's. Raises `ModelFailed`,
    `PoolFailed`."""
    name = dns_label(path.stem)
    order = CutOrder(
        name=name,
        model=name,
        path=path.absolute(),
        shapes=shapes,
        fragments=fragments,
        devices=pool.devices,
        planned=fragments is None,
    )
    try:
        prepared = await prepare(order, pool.store, lambda _done, _total: None)
    except StepCrashed as error:
        raise ModelFailed(str(error)) from error
    except StepRefused as error:
        need = error.need_bytes
        most = max(order.devices, key=lambda each: each.budget_bytes)
        have, device = (None, None) if need is None else (most.budget_bytes, most.name)
        raise ModelFailed(str(error), need=need, have=have, device=device) from error
    request = _planned(order, prepared)
    await pool.deliver([fragment.digest for fragment in prepared.document.fragments])
    return request


def _planned(order: CutOrder, prepared: Prepared) -> pb.SubmitJobRequest:
    found = plan(prepared.document, order.devices, Objective.THROUGHPUT)
    if isinstance(found, Infeasible):
        device, have = max(found.budgets, key=lambda each: each[1], default=(None, None))
        what = found.message(order.name, prepared.advice)
        raise ModelFailed(what, need=found.need_bytes, have=have, device=device)
    return pb.SubmitJobRequest(
        name=order.name,
        partition=document_to_json(prepared.document).encode(),
        stages=[
            pb.StagePlacement(
                devices=devices, granted_bytes=granted, predicted_seconds=map(seconds, predicted)
            )
            for devices, granted, predicted in zip(
                found.homes(), found.grants(), found.predictions(), strict=True
            )
        ],
        backoff_limit=_TRIES,
    )
