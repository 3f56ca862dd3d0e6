"""What an input file holds, by the kinds of its arrays: how many items, and whether they suit the
model."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from shoal_coordinator.storage.array_limits import Limits, UnreadableArrays
from shoal_coordinator.storage.arrays import SOLE, ArrayHeader, ArrayKind
from shoal_protocol.partition import TensorSpec
from shoal_protocol.units import format_bytes

_KNOWN_CONTENTS: Final = 256
"""Of files that differ in their arrays."""
_SAME_NAMES: Final = (
    *("bool", "float16", "complex64", "complex128"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)
_NUMPY_NAMES: Final = {
    **{name: name for name in _SAME_NAMES},
    "float": "float32",
    "double": "float64",
    "bfloat16": "uint16",
    "string": "str",
}


Kinds = tuple[ArrayKind, ...]
"""Of the arrays of a file."""


@dataclass(frozen=True, slots=True)
class FileContents:
    """What a file holds: `stacked` names the arrays that have one row per item (None: the file is
    one item as it is), `problem` says why no item of it can run. `joined`: the rows lie along
    the model's own first axis, not along one more. `item_bytes` is what reading one item takes,
    `shapes` are those of one item, in the order of the model's inputs."""

    items: int
    stacked: tuple[str, ...] | None = None
    problem: str | None = None
    joined: bool = False
    item_bytes: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()


def kinds_of(headers: Mapping[str, ArrayHeader]) -> Kinds:
    return tuple([header.kind for header in headers.values()])


def classifier(
    model_inputs: tuple[TensorSpec, ...], limits: Limits, fixed: Collection[str] = ()
) -> Callable[[Kinds], FileContents]:
    """Says what files hold; those with arrays of the same kinds share the answer."""

    @lru_cache(_KNOWN_CONTENTS)
    def classify(kinds: Kinds) -> FileContents:
        try:
            return contents_by_kinds(kinds, model_inputs, limits, fixed)
        except UnreadableArrays as problem:
            return FileContents(1, problem=str(problem))

    return classify


def contents_by_kinds(
    kinds: Kinds,
    model_inputs: tuple[TensorSpec, ...],
    limits: Limits,
    fixed: Collection[str] = (),
) -> FileContents:
    """What a file holds; raises `UnreadableArrays` where not even the number of items is known.
    `fixed` are inputs that the model has a value for, and that no file can give one."""
    headers = {kind.name: kind for kind in kinds}
    if SOLE in headers:
        if len(model_inputs) != 1:
            names = ", ".join(spec.name for spec in model_inputs)
            raise UnreadableArrays(
                f"is an .npy file, but the model takes {names}; use an .npz of these"
            )
        headers = {model_inputs[0].name: headers[SOLE]}
    missing = [spec.name for spec in model_inputs if spec.name not in headers]
    if missing:
        found = ", ".join(sorted(headers)) or "no array"
        raise UnreadableArrays(f"lacks {', '.join(missing)}; it holds {found}")
    lengths: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in model_inputs:
        length, shapes[spec.name] = _rows(spec, headers[spec.name])
        if length is not None:
            lengths[spec.name] = length
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UnreadableArrays(f"stacks arrays of different lengths: {listed}")
    items = next(iter(lengths.values()), 1)
    sizes = {name: headers[name].dtype.itemsize * math.prod(shapes[name]) for name in shapes}
    if items > 1 and not any(sizes[name] for name in lengths):
        # Otherwise some hundred bytes could ask for millions of runs.
        raise UnreadableArrays(f"stacks {items} rows, none of which holds an element")
    problem = _unsuitable(headers, shapes, model_inputs) or _overrides(headers, fixed)
    item_bytes = sum(sizes.values())
    if problem is None and item_bytes > limits.item_bytes:
        problem = (
            f"needs {format_bytes(item_bytes)} for one item, and {format_bytes(limits.item_bytes)} "
            "is the most that this coordinator reads; give it more memory, or smaller items"
        )
    ranks = {spec.name: len(spec.shape or ()) for spec in model_inputs}
    return FileContents(
        items=items,
        stacked=tuple(lengths) if lengths else None,
        problem=problem,
        joined=all(len(headers[name].shape) == ranks[name] for name in lengths),
        item_bytes=item_bytes,
        shapes=tuple(shapes.values()),
    )


def _rows(spec: TensorSpec, header: ArrayKind) -> tuple[int | None, tuple[int, ...]]:
    """The rows of an array that is stacked (else None), and the shape that one item has of it."""
    shape = header.shape
    if spec.shape is None:
        return None, shape
    rank = len(spec.shape)
    if len(shape) == rank + 1:
        return shape[0], shape[1:]
    if len(shape) != rank:
        misfit = _misfit(spec, header, "has rank", len(shape))
        letters = _wrong_dtype(spec, header) if header.dtype.kind in "SU" else None
        raise UnreadableArrays(letters or misfit)
    if rank and spec.shape[0] == 1 and shape[0] != 1:
        return shape[0], (1, *shape[1:])
    return None, shape


def _unsuitable(
    headers: Mapping[str, ArrayKind],
    shapes: Mapping[str, tuple[int, ...]],
    model_inputs: tuple[TensorSpec, ...],
) -> str | None:
    """Why items of these shapes do not suit the model; None if they do.

    A symbolic size is any size: exporters give one symbol to axes that differ, and the runtime
    takes them.
    """
    for spec in model_inputs:
        header, shape = headers[spec.name], shapes[spec.name]
        problem = _wrong_dtype(spec, header)
        if problem is not None:
            return problem
        for axis, (have, want) in enumerate(zip(shape, spec.shape or shape, strict=True)):
            if isinstance(want, int) and have != want:
                return _misfit(spec, header, f"has {have} where axis {axis} is", want)
    return None


def _overrides(names: Iterable[str], fixed: Collection[str]) -> str | None:
    """Passed over, such an array would be taken for used."""
    if not (given := sorted(set(names).intersection(fixed))):
        return None
    return (
        f"has an array for {', '.join(given)}, to which the model gives a value of its own; leave "
        "it out, or remove the initializer of that name from the model"
    )


def _wrong_dtype(spec: TensorSpec, header: ArrayKind) -> str | None:
    have, wanted = header.dtype.newbyteorder("="), _NUMPY_NAMES.get(spec.dtype)
    if wanted is None:
        return f"cannot be read for {spec.name}: arrays of type {spec.dtype} are not supported"
    if have.kind == "U" if wanted == "str" else have == wanted:
        return None
    name = {"S": "bytes", "U": "text"}.get(have.kind, str(have))
    if spec.dtype == "bfloat16":  # as a number, a value would become another one
        return (
            f"has {spec.name} of type {name}, the model takes bfloat16, whose bits a file has as "
            f"{wanted}: save it with .astype(ml_dtypes.bfloat16).view({wanted!r})"
        )
    remedy = f"; convert it with .astype({wanted!r})"
    if name != str(have) and wanted != "str":  # letters do not become numbers so
        remedy = ""
    return f"has {spec.name} of type {name}, the model takes {wanted}{remedy}"


def _misfit(spec: TensorSpec, header: ArrayKind, what: str, value: int) -> str:
    wanted = ", ".join("?" if size is None else str(size) for size in spec.shape or ())
    have = list(header.shape)
    return f"{what} {value} in {spec.name}: the array is {have}, the model takes [{wanted}]"
