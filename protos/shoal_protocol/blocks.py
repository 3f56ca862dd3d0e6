"""The blocks of a fragment: its computation in parts, for a device that cannot hold all of it.

A fragment is a model, and its blocks are a cut of it: run one after the other, each with what the
ones before it gave, they compute what the fragment computes. The models of all blocks lie one after
the other in `blocks.bin`; their weights are external data in the fragment's own `weights.bin`, so
nothing is stored twice. A device that swaps has all blocks open, and of their weights only those in
memory that the block needs that runs now (FlexNN, section 4; SwapNet, section 5).

Of a table of which items read a few rows all over it, no block has any weight: the device reads
these rows from the file, and a block takes them as an input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

MOST_BLOCKS: Final = 256
_MOST_BYTES: Final = 2**63 - 1
_FLAGS: Final = ("empties_arena", "dequantises")
"""Written where they are true."""
_BESIDE: Final = "beside_bytes"
"""Written where there are some."""
_GATHERS: Final = "gathers"
"""Written where there are some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Rows that a device reads from the file of a table, one of the fragment's initializers, and
    gives to a block as the input `rows`: what `Gather` gives for these `indices`, which an input of
    the fragment is, or an output of an earlier block."""

    table: str
    indices: str
    rows: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One part. Its model is `model_bytes` of `blocks.bin`, from `model_offset`.

    `takes` and `gives` are names of tensors. `held_bytes` is memory that it needs for as long as it
    is open: the session, and the weights inside the model. `weight_bytes` are the weights that it
    reads of `weights.bin`. `working_bytes` is what there is besides while it runs: activations, and
    the tensors for later blocks that only pass it by. Of these, `beside_bytes` are what a node
    takes for itself outside of the arena of activations, and gives back. `empties_arena`: before it
    runs, those tensors are moved out of the arena of activations, and the arena is given back, on a
    device that has no room for it all. `dequantises`: all that is quantised in it are weights, or
    products of floats have such. The runtime would fuse them with the layers that read them, and
    hold a copy; it is not to.
    `gathers`: what the device reads of tables before it runs the block.
    """

    model_offset: int
    model_bytes: int
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    held_bytes: int
    weight_bytes: int
    working_bytes: int
    beside_bytes: int = 0
    empties_arena: bool = False
    dequantises: bool = False
    gathers: tuple[Gathered, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """What it takes, and the indices of what is read for it."""
        return (*self.takes, *(each.indices for each in self.gathers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """An output of the fragment that blocks give in parts: the device joins them along `axis`, in
    this order, as each is made. `sizes` are those of the parts along that axis. In a block of its
    own, the join would need all parts beside the whole."""

    output: str
    axis: int
    parts: tuple[str, ...]
    sizes: tuple[int, ...]


def least_bytes(blocks: Sequence[Block]) -> int:
    """The smallest budget in which the blocks run: all open, the weights of one in memory."""
    pairs = zip(blocks, arena_beside(blocks), strict=True)
    held = sum(block.held_bytes for block in blocks)
    return held + max(block.weight_bytes + working for block, working in pairs)


def arena_beside(blocks: Sequence[Block]) -> tuple[int, ...]:
    """What there is beside the weights of each block while it runs, over many items."""
    pairs = zip(blocks, arena_kept(blocks), strict=True)
    return tuple([kept + block.beside_bytes for block, kept in pairs])


def arena_kept(blocks: Sequence[Block]) -> tuple[int, ...]:
    """What there is of it in the arena of activations.

    That keeps what the neediest block took, from one item to the next, so that counts beside any
    weights; unless it is emptied on the way, and before the first block too: then what counts is
    what blocks took since.
    """
    taken = [block.working_bytes - block.beside_bytes for block in blocks]
    if not blocks[0].empties_arena:
        return (max(taken),) * len(blocks)
    kept: list[int] = []
    for block, size in zip(blocks, taken, strict=True):
        kept.append(size if block.empties_arena else max(kept[-1], size))
    return tuple(kept)


def blocks_as_json(blocks: Sequence[Block]) -> list[dict[str, object]]:
    """What a fragment's manifest says of its blocks."""
    return [_as_json(block) for block in blocks]


def blocks_from_json(value: object, blocks_bin_bytes: int) -> tuple[Block, ...]:
    """Read what `blocks_as_json` wrote. Raises `ValueError`, which says what is wrong."""
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_BLOCKS:
        raise ValueError(f"blocks are not a list of 1 to {MOST_BLOCKS}")
    blocks = tuple(_block(index, each) for index, each in enumerate(value))
    for index, block in enumerate(blocks):
        if block.model_offset + block.model_bytes > blocks_bin_bytes:
            raise ValueError(f"block {index} is beyond the end of its file")
    return blocks


def joins_as_json(joins: Sequence[Join]) -> list[dict[str, object]]:
    """What a fragment's manifest says of its joins."""
    return [asdict(join) for join in joins]


def joins_from_json(value: object) -> tuple[Join, ...]:
    """Read what `joins_as_json` wrote; None: there are none. Raises `ValueError`, which says what
    is wrong."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError("joins are not a list")
    joins = tuple(map(_join, value))
    parts = [name for join in joins for name in join.parts]
    if len(set(parts)) < len(parts):
        raise ValueError("a part is joined twice")
    return joins


def _join(value: object) -> Join:
    match value:
        case {"output": str(output), "axis": int(axis), "parts": list(parts), "sizes": list(sizes)}:
            named = all(isinstance(name, str) for name in parts) and len(parts) == len(sizes) > 0
            sized = all(isinstance(size, int) and 0 < size <= _MOST_BYTES for size in sizes)
            if named and sized and axis >= 0:
                return Join(output=output, axis=axis, parts=tuple(parts), sizes=tuple(sizes))
    raise ValueError("a join does not name an output, its axis, and parts with their sizes")


def _as_json(block: Block) -> dict[str, object]:
    value = asdict(block)
    for key in (*_FLAGS, _GATHERS, _BESIDE):
        if not value[key]:
            del value[key]
    return value


def _block(index: int, value: object) -> Block:
    if not isinstance(value, Mapping):
        raise ValueError(f"block {index} is not an object")
    working = _size(index, value, "working_bytes")
    beside = _size(index, {_BESIDE: 0, **value}, _BESIDE)
    if beside > working:
        raise ValueError(f"block {index}: {_BESIDE} is {beside}, working_bytes is {working}")
    return Block(
        model_offset=_size(index, value, "model_offset"),
        model_bytes=_size(index, value, "model_bytes"),
        takes=_names(index, value, "takes"),
        gives=_names(index, value, "gives"),
        held_bytes=_size(index, value, "held_bytes"),
        weight_bytes=_size(index, value, "weight_bytes"),
        working_bytes=working,
        beside_bytes=beside,
        **{flag: value.get(flag) is True for flag in _FLAGS},
        gathers=_gathers(index, value.get(_GATHERS, [])),
    )


def _gathers(index: int, value: object) -> tuple[Gathered, ...]:
    gathers = []
    for each in value if isinstance(value, list) else [None]:
        match each:
            case {"table": str(table), "indices": str(indices), "rows": str(rows)}:
                gathers.append(Gathered(table=table, indices=indices, rows=rows))
            case _:
                raise ValueError(f"block {index}: gathers do not name table, indices and rows")
    return tuple(gathers)


def _size(index: int, value: Mapping[object, object], key: str) -> int:
    size = value.get(key)
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"block {index}: {key} is {size!r}, not a size")
    return size


def _names(index: int, value: Mapping[object, object], key: str) -> tuple[str, ...]:
    names = value.get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"block {index}: {key} are not names")
    return tuple(names)
