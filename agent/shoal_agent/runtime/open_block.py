"""One block that is open, and the values that pass to it and from it."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime

from shoal_agent.runtime.failures import RuntimeFailed, Stopper, Terminated, failure_of
from shoal_agent.runtime.inputs import InputSpec, input_spec
from shoal_agent.runtime.mapped_pages import MappedFile, PageRange
from shoal_agent.runtime.mapped_weights import Weights
from shoal_protocol.blocks import Gathered, Join
from shoal_protocol.tensors import Array

Values = dict[str, onnxruntime.OrtValue]
"""By name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBlock:
    """`gathers` is what is read of tables before it runs; `spent` are the values that nothing needs
    once it has run. The session refers to `mapped`. `weights` are where it has its weights, and
    `files` says what of files that is."""

    session: onnxruntime.InferenceSession
    mapped: Weights
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    gathers: tuple[Gathered, ...]
    spent: tuple[str, ...]
    weights: tuple[PageRange, ...]
    files: tuple[MappedFile, ...]


def as_value(array: Array) -> onnxruntime.OrtValue:
    """A view: nothing is copied that is in order already."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"))


def run_both_ways(session: onnxruntime.InferenceSession, feed: Mapping[str, Array]) -> None:
    """As whole and as blocks; raises `RuntimeFailed`."""
    try:
        for _ in range(2):  # the first run differs: kernels prepare what they keep
            session.run(None, feed)
        values = {name: as_value(array) for name, array in feed.items()}
        for value in session.run_with_ort_values(None, values):
            value.numpy()
    except Exception as error:  # the runtime's exceptions have no common base but this
        raise failure_of(error) from error


def run_block(
    block: OpenBlock,
    values: Values,
    stopper: Stopper,
    placed: Mapping[str, Array],
) -> None:
    """Take from the values, and put what it gives there, or where it is `placed`."""
    if stopper.stopped:
        raise Terminated("stopped between two of its blocks")
    try:
        if placed.keys().isdisjoint(block.gives):
            # As `run_with_ort_values` of the session does, but for a loop over what was made.
            inner = {name: values[name]._ortvalue for name in block.takes}
            made = block.session._sess.run_with_ort_values(inner, block.gives, stopper.options)
        else:
            taken = {name: values[name] for name in block.takes}
            made = run_bound(block.session, taken, block.gives, stopper, placed)
    except Exception as error:  # the runtime's exceptions have no common base but this
        raise failure_of(error, stopped=stopper.stopped) from error
    # The end of the runtime's vector is a C++ exception. It takes a tenth of a millisecond where a
    # block has left nothing else in the processor's caches; so nobody asks for it.
    for name, value in zip(block.gives, made, strict=False):
        values[name] = onnxruntime.OrtValue(value)
    for name in block.spent:
        del values[name]


def move_out(values: Values, own: Collection[str]) -> dict[str, Array]:
    """Have values in memory of this process's own that are in the arena: all but those that are
    there already. Each leaves the arena when it has been copied. The arrays that they are in now,
    which live no longer than their values unless somebody keeps them."""
    moved = {}
    for name in values.keys() - own:
        moved[name] = np.array(values[name].numpy())
        values[name] = as_value(moved[name])
    return moved


def put(
    part: Array, name: str, join: Join, joined: dict[str, Array], placed: Mapping[str, Array]
) -> None:
    """Write a part where it belongs in its whole, which is `placed` if its shape was known before.
    Raises `RuntimeFailed`."""
    axis, index = join.axis, join.parts.index(name)
    if axis >= part.ndim or part.shape[axis] != join.sizes[index]:
        raise RuntimeFailed(f"{name} has the shape {part.shape}, which is not what was planned")
    if join.output not in joined:
        shape = (*part.shape[:axis], sum(join.sizes), *part.shape[axis + 1 :])
        whole = placed.get(join.output)
        if whole is None or (whole.shape, whole.dtype) != (shape, part.dtype):
            whole = np.empty(shape, part.dtype)
        joined[join.output] = whole
    start = sum(join.sizes[:index])
    place = (slice(None),) * axis + (slice(start, start + join.sizes[index]),)
    try:
        joined[join.output][place] = part
    except ValueError as error:  # parts that do not suit each other
        raise RuntimeFailed(f"{name} cannot be joined: {error}") from error


def run_bound(
    session: onnxruntime.InferenceSession,
    taken: Mapping[str, onnxruntime.OrtValue],
    gives: Iterable[str],
    stopper: Stopper,
    placed: Mapping[str, Array],
) -> Iterable[Any]:
    """What a session gives, in the arena or where it is `placed`. Raises what the runtime does."""
    binding = session.io_binding()
    for name, value in taken.items():
        binding.bind_ortvalue_input(name, value)
    for name in gives:
        if name in placed:
            binding.bind_ortvalue_output(name, as_value(placed[name]))
        else:
            binding.bind_output(name)
    session.run_with_iobinding(binding, stopper.options)
    return [value._ortvalue for value in binding.get_outputs()]


def inputs_of(blocks: Sequence[OpenBlock], indices: Sequence[InputSpec]) -> Iterator[InputSpec]:
    """Of the fragment: the inputs that are `indices` of rows, and what else blocks take and none
    gives. Raises `RuntimeFailed`."""
    yield from indices
    seen = {spec.name for spec in indices}
    for block in blocks:
        seen.update(each.rows for each in block.gathers)
        for value in block.session.get_inputs():
            if value.name not in seen:
                seen.add(value.name)
                spec = input_spec(value)
                if spec.dtype.hasobject:
                    raise RuntimeFailed(f"input {spec.name} is text, which blocks do not take")
                yield spec
        seen.update(block.gives)
