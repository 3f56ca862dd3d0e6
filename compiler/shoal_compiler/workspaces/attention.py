"""Attention of several kinds, weights of few bits, and mixtures of experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from onnx import TensorProto

from shoal_compiler.nodes import attribute_of, is_standard
from shoal_compiler.shaped import Shaped
from shoal_compiler.workspaces.workspace import FLOAT_BYTES, THREADS, Rule, Workspace, floats

TILES_BYTES: Final = 1 << 20
"""What attention works in that makes its products piece by piece: by the second-level cache."""
_PANEL: Final = 16384


def _few_bits(shaped: Shaped) -> Workspace:
    """Unless weights were packed, all are made numbers at once, whatever the rows, the blocks, the
    bits and the accuracy that is asked for. What is read and given in halves, and what scales the
    weights, is there as numbers too. Each thread that multiplies has a panel on its stack."""
    rows, given = shaped.input(0), shaped.output(0)
    halves = 0
    if shaped.type(0) == TensorProto.FLOAT16:
        halves = prod(rows) + prod(given) + prod(shaped.input(2))
    return floats(beside=rows[-1] * given[-1] + halves + THREADS * _PANEL)


def _few_bits_of_a_table(shaped: Shaped) -> Workspace:
    return floats(shaped.input(0)[-1] * shaped.output(0)[-1])


def _standard_attention(shaped: Shaped) -> Workspace:
    """The products of all queries with all keys, and a mask that has to be made, or made numbers.
    Of halves, each thread makes numbers of what it multiplies."""
    query, key = shaped.input(0), shaped.input(1)
    if len(query) == 3:
        batch, length, _ = query
        heads, keys = shaped.integer("q_num_heads", 1), key[1]
    else:
        (batch, heads, length, _), keys = query, key[2]
    keys += shaped.input(4)[2] if shaped.has(4) else 0
    products = length * keys
    is_causal = shaped.integer("is_causal")
    mask = products if is_causal else 0
    if shaped.has(3):
        is_made = is_causal or shaped.type(3) == TensorProto.BOOL
        mask = prod(shaped.input(3)[:-1]) * keys if is_made else 0
    every = batch * heads * products
    if shaped.type(0) != TensorProto.FLOAT16:
        return floats(every, mask)
    threads = min(THREADS, batch * heads)
    multiplied = products + length * query[-1] + keys * key[-1]
    return floats(every // 2, mask // 2, *[products] * threads, beside=threads * multiplied)


def _attention(shaped: Shaped) -> Workspace:
    """Either attention that is called so, or the runtime's own whose keys and values come from the
    same input."""
    if is_standard(shaped.node, "Attention"):
        return _standard_attention(shaped)
    mask, past = (5, 8) if shaped.node.op_type == "QAttention" else (3, 4)
    batch, length, _ = shaped.input(0)
    columns = shaped.input(1)[1]
    keys = length + (shaped.input(past)[3] if shaped.has(past) else 0)
    given = (shaped.integers("qkv_hidden_sizes") or [columns // 3])[-1]
    is_masked = shaped.has(mask) or shaped.integer("unidirectional") != 0
    apart = batch * length * columns
    return floats(apart, *_in_heads(shaped, length * keys, given, is_masked=is_masked))


def _multi_head_attention(shaped: Shaped) -> Workspace:
    """Queries, keys and values of each head by themselves, unless they are so already."""
    (batch, length, width), heads = shaped.input(0), shaped.integer("num_heads", 1)
    key, value = shaped.input(1), shaped.input(2)
    if len(key) == 4:
        keys, given, apart = key[2], heads * value[3], [length * width]
    else:
        keys, given = key[1], value[2]
        apart = [length * width, keys * key[2], keys * value[2]]
    biased = [max(apart)] if shaped.has(3) else []
    keys += shaped.input(6)[2] if shaped.has(6) else 0
    is_masked = shaped.has(4) or shaped.integer("unidirectional") != 0
    return floats(
        *(batch * each for each in (*apart, *biased)),
        *_in_heads(shaped, length * keys, given, is_masked=is_masked),
    )


def _in_heads(
    shaped: Shaped, products: int, given: int, *, is_masked: bool
) -> tuple[int, int, int]:
    """Numbers of a mask, of each head's products, and of what comes of them, before it is in the
    order of the output."""
    batch, length, _ = shaped.input(0)
    heads = shaped.integer("num_heads", 1)
    return is_masked * batch * products, batch * heads * products, batch * length * given


def _grouped_attention(shaped: Shaped) -> Workspace:
    """The products are made piece by piece, unless they are halves, or something is asked for that
    this cannot do. Positions are put in where all is apart by heads, once more."""
    (batch, length, width), heads = shaped.input(0), shaped.integer("num_heads", 1)
    groups = 0 if shaped.has(1) else 2 * shaped.integer("kv_num_heads", 1)
    head = width // (heads + groups)
    key = prod(shaped.input(1)[1:]) if shaped.has(1) else 0
    keys = length + (shaped.input(3)[2] if shaped.has(3) else 0)
    apart = [length * width, key, key]
    if shaped.integer("do_rotary"):
        apart += [length * width, key]
    if shaped.integer("sliding_window_cache"):
        apart += [shaped.integer("kv_num_heads", 1) * keys * head] * 2
    apart = [batch * each for each in apart]
    products = batch * heads * length * keys
    if shaped.type(0) == TensorProto.FLOAT16:
        given = batch * heads * length * head
        converted = [head * (length + 2 * keys)] * THREADS
        return floats(*(each // 2 for each in apart), products, given, *converted)
    asks = (
        attribute_of(shaped.node, "softcap").f or shaped.integer("smooth_softmax") or shaped.has(11)
    )
    if not asks and shaped.gives(1) and shaped.gives(2) and not shaped.gives(3):
        products = min(products, TILES_BYTES // FLOAT_BYTES)
    return floats(*apart, products)


@dataclass(frozen=True, slots=True)
class _Experts:
    """A mixture's rows, `routed` rows that its experts have in all, their width, that inside an
    expert, and how many threads have an expert at once."""

    rows: int
    routed: int
    width: int
    inner: int
    threads: int

    @classmethod
    def of(cls, shaped: Shaped) -> "_Experts":
        *batch, width = shaped.input(0)
        number, inner, *_ = shaped.input(2)
        rows, each = prod(batch), shaped.integer("k", 1)
        threads = min(THREADS, number, rows * each)
        return cls(rows, rows * min(THREADS, each), width, inner, threads)


def _experts(shaped: Shaped) -> Workspace:
    """An expert may get all rows; what the threads give is summed up."""
    each = _Experts.of(shaped)
    buffers = each.routed * (3 * each.width + 2 * each.inner)
    sums = (each.threads + 1) * each.rows * each.width
    return floats(buffers, sums, beside=2 * each.routed * each.inner)


def _quantised_experts(shaped: Shaped) -> Workspace:
    """The same, and of each thread's expert numbers are made."""
    each = _Experts.of(shaped)
    buffers = each.routed * (2 * each.width + 2 * each.inner)
    numbers = each.threads * 2 * each.width * each.inner
    sums = (each.threads + 2) * each.rows * each.width
    return floats(buffers + numbers, sums)


RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("Attention", "QAttention"), _attention),
    "MultiHeadAttention": _multi_head_attention,
    "GroupQueryAttention": _grouped_attention,
    "MatMulNBits": _few_bits,
    "MatMulBnb4": _few_bits_of_a_table,
    "MoE": _experts,
    "QMoE": _quantised_experts,
}
