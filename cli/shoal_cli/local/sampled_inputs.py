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
from shoal_protocol.units import listed

_FEW: Final = 64
_NAMED_FILES: Final = 3


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
    return order.sample is not None and bool(order.open_inputs(inputs))


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


def rows_as_items(specs: Iterable[TensorSpec], inputs: InputSet, largest: Shapes) -> str:
    """How rows become items, where a file is one item of several rows because the model leaves the
    first axis open; empty: none is."""
    several = [
        spec.name
        for spec in specs
        if spec.shape is not None
        and len(spec.shape) > 1
        and not isinstance(spec.shape[0], int)
        and largest[spec.name][0] > 1
    ]
    alone = [
        file.name
        for file in inputs.files
        if file.contents.stacked is None and file.contents.problem is None
    ]
    if not several or not alone:
        return ""
    rows = max(largest[name][0] for name in several)
    found = f"is one item of {rows} rows"
    if len(alone) > 1:
        found = f"are one item each, of up to {rows} rows"
    return (
        f"; {listed(alone, _NAMED_FILES)} {found}; if each row is an item, give "
        f"{listed(several, _NAMED_FILES)} one more axis: numpy.expand_dims(array, 1)"
    )
