"""Several items as the inputs of one run, and the outputs of that run as those of each item. Pure.

A fragment whose manifest has the key `batched` computes each item by itself, along the first axis
of its tensors (the compiler has proved it). Items are *alike* when their tensors have equal types
and shapes. Only such are joined, and only when one like them has run alone: then it is known what
each item's outputs are to look like, and outputs that look otherwise are refused.

*Counted* tensors are a few integers, some of which grow with the number of items, as the size of a
first axis does: those are multiplied, the others are equal in all items.
"""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from shoal_protocol.tensors import Array

Counted = Mapping[str, Sequence[int]]
"""The positions of the elements that grow, by tensor."""
Tensors = Mapping[str, Array]


class NotSplit(Exception):
    """The outputs of a batch are not those of its items."""


def likeness(tensors: Tensors, counted: Counted) -> Hashable:
    """Equal for items that may be joined; None: the item has nothing to be joined along."""
    parts: list[Hashable] = []
    for name in sorted(tensors):
        array = tensors[name]
        if name in counted and max(counted[name], default=0) < array.size:
            parts.append((name, array.dtype.str, array.shape, array.tobytes()))
        elif array.ndim and array.size and name not in counted:
            parts.append((name, array.dtype.str, array.shape))
        else:
            return None
    return tuple(parts)


def join(items: Sequence[Tensors], counted: Counted) -> dict[str, Array]:
    """The inputs of one run for items that are alike."""
    joined: dict[str, Array] = {}
    for name, first in items[0].items():
        if name in counted:
            joined[name] = first.copy()
            for position in counted[name]:
                joined[name].flat[position] *= len(items)
        else:
            joined[name] = np.concatenate([each[name] for each in items])
    return joined


def split(
    outputs: Tensors, count: int, alone: Mapping[str, tuple[int, ...]], counted: Counted
) -> list[dict[str, Array]]:
    """The outputs of each of `count` items; `alone` are their shapes for one. They share no memory:
    one may go while others stay. Raises `NotSplit`."""
    items: list[dict[str, Array]] = [{} for _ in range(count)]
    for name, array in outputs.items():
        if name in counted:
            part = _divided(name, array, count, counted[name])
            for item in items:
                item[name] = part.copy()
            continue
        first, *others = alone[name]
        if array.shape != (count * first, *others):
            raise NotSplit(f"{name} has the shape {list(array.shape)} for {count} items")
        for number, item in enumerate(items):
            item[name] = array[number * first : (number + 1) * first].copy()
    return items


def _divided(name: str, array: Array, count: int, positions: Sequence[int]) -> Array:
    part = array.copy()
    for position in positions:
        if part.flat[position] % count:
            raise NotSplit(f"{name} counts {part.flat[position]} for {count} items")
        part.flat[position] //= count
    return part
