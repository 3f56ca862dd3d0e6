"""What is known of a job's inputs when its model is cut: their shapes, and what a few hold."""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Final

from shoal_cli.local.cut_orders import CutOrder
from shoal_coordinator.storage.inputs import (
    InputSet,
    InputsRefused,
    InputUnsuitable,
    Shapes,
    scan_inputs,
)
from shoal_planner.profile import Profile
from shoal_protocol.partition import TensorSpec

_FEW: Final = 64


def sampled(order: CutOrder, inputs: tuple[TensorSpec, ...]) -> InputSet | None:
    """The inputs, where it depends on them what the model needs; None also where they are refused:
    the job says why."""
    if order.sample is None or not depends_on_inputs(order, inputs):
        return None
    try:
        return scan_inputs(order.sample, inputs)
    except InputsRefused:
        return None


def depends_on_inputs(order: CutOrder, inputs: Iterable[TensorSpec]) -> bool:
    return order.sample is not None and not all(_is_fixed(spec, order.shapes) for spec in inputs)


def _is_fixed(spec: TensorSpec, shapes: Shapes) -> bool:
    known = spec.shape is not None and all(isinstance(size, int) for size in spec.shape)
    return known or spec.name in shapes


def with_values(profile: Profile, inputs: InputSet) -> Profile:
    """With what the first item has in inputs that are a few integers, such as a sampling rate:
    fragments are tried with that."""
    few = [
        spec.name
        for spec in profile.inputs
        if spec.dtype in ("int32", "int64")
        and spec.shape is not None
        and prod(each if isinstance(each, int) else _FEW + 1 for each in spec.shape) <= _FEW
    ]
    try:
        item = inputs.read(0, few)
    except (InputUnsuitable, OSError):
        return profile
    finally:
        inputs.close()
    known = {
        name: replace(profile.tensors[name], values=tuple(map(int, array.flat)))
        for name, array in item.items()
    }
    return replace(profile, tensors={**profile.tensors, **known})
