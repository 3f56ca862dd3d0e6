"""Inputs of the largest shapes that were planned for, made up for the trial of a fragment.

What they hold is no data: floats are one, numbers that may be indices or lengths are zero, unless
the manifest has them. All of it is written, since memory that nobody has written to is not there.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal_agent.runtime.described import description
from shoal_agent.runtime.inputs import InputSpec
from shoal_protocol.manifest import LARGEST, SEEN, VALUES
from shoal_protocol.tensors import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What a fragment took in a trial; where it was `stopped`, at least that. `fixed_bytes` of it
    are the open session and weights, `input_bytes` is the size of the inputs that it ran with.
    `prepared`: it ran as a whole, in the form prepared for it. `bounded`: only with less of the
    arena than work has. `reason`: why it was not tried."""

    taken_bytes: int | None = None
    fixed_bytes: int = 0
    input_bytes: int = 0
    stopped: bool = False
    prepared: bool = False
    bounded: bool = False
    reason: str = ""


class NotTried(Exception):
    """A fragment cannot be tried before it is given work; says why. That is no fault of it."""


def largest_inputs(folder: Path, specs: Iterable[InputSpec], most_bytes: int) -> dict[str, Array]:
    """One item. Raises `NotTried`, `FragmentDamaged`, `OSError`."""
    manifest = description(folder)
    shapes = _largest_shapes(manifest)
    known = _values(manifest)
    made: dict[str, Array] = {}
    left = most_bytes
    for spec in specs:
        shape = shapes.get(spec.name)
        if shape is None:
            raise NotTried(f"the size of its input {spec.name} is not known")
        if spec.dtype.hasobject:
            raise NotTried(f"its input {spec.name} is text")
        left -= spec.dtype.itemsize * math.prod(shape)
        if left < 0:
            raise NotTried("its inputs alone would take more than it is granted")
        made[spec.name] = np.empty(shape, spec.dtype)
        values = known.get(spec.name, ())
        if spec.dtype.kind in "iu" and len(values) == made[spec.name].size:
            _fill(made[spec.name], values)
        else:
            made[spec.name].fill(1 if spec.dtype.kind == "f" else 0)
    return made


def tried_inputs(feed: Mapping[str, Array]) -> Sequence[Mapping[str, Array]]:
    """The item, and another if it has truth values without an axis or one long: what they say may
    decide which branch runs, so both are tried. All of them twice: what a node takes outside of the
    arena, which no estimate may know of, is there beside what the last item has left in it."""
    items = [feed]
    switches = [name for name, each in feed.items() if each.dtype.kind == "b" and each.size == 1]
    if switches:
        items.append({**feed, **{name: np.ones_like(feed[name]) for name in switches}})
    return items * 2


def unplanned_inputs(folder: Path) -> dict[str, tuple[int, ...] | None]:
    """The inputs whose sizes no plan knows, each with those that the fragment was cut for because
    items had shown them; None: none had. Raises `FragmentDamaged`, `OSError`."""
    manifest = description(folder)
    planned, seen = _largest_shapes(manifest), dict[str, tuple[int, ...]]()
    _add_all(seen, manifest.get(SEEN))
    unplanned: dict[str, tuple[int, ...] | None] = {}
    match manifest.get("inputs"):
        case list(inputs):
            for each in inputs:
                match each:
                    case {"name": str(name)} if name not in planned:
                        unplanned[name] = seen.get(name)
    return unplanned


def _fill(made: Array, values: Sequence[int]) -> None:
    try:
        made.flat[:] = values
    except OverflowError as error:
        raise NotTried(f"what its manifest says of an input is no {made.dtype}") from error


def _values(manifest: Mapping[str, object]) -> dict[str, list[int]]:
    """Of inputs that are a few integers, by name; manifests of earlier versions have none."""
    found: dict[str, list[int]] = {}
    match manifest.get(VALUES):
        case dict(values):
            for name, each in values.items():
                if isinstance(each, list) and all(isinstance(value, int) for value in each):
                    found[name] = each
    return found


def _largest_shapes(manifest: Mapping[str, object]) -> Mapping[str, tuple[int, ...]]:
    """By input; those that are not known are absent."""
    shapes: dict[str, tuple[int, ...]] = {}
    match manifest.get("inputs"):
        case list(inputs):
            for each in inputs:
                match each:
                    case {"name": str(name), "shape": list(shape)}:
                        _add(shapes, name, shape)
    _add_all(shapes, manifest.get(LARGEST))
    return shapes


def _add_all(shapes: dict[str, tuple[int, ...]], found: object) -> None:
    if isinstance(found, dict):
        for name, shape in found.items():
            if isinstance(shape, list):
                _add(shapes, name, shape)


def _add(shapes: dict[str, tuple[int, ...]], name: str, shape: list[object]) -> None:
    sizes = tuple(size for size in shape if isinstance(size, int) and size >= 0)
    if len(sizes) == len(shape):
        shapes[name] = sizes
