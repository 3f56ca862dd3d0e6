"""What ONNX Runtime's CPU kernels take in memory while a node runs, besides inputs and outputs.

The rules are those of its sources, and measured (1.31): each is an upper bound for the sizes that
are known. Where kernels differ from processor to processor, or from one number of threads to
another, the one that takes the most counts. So attention counts as if no kernel made its products
piece by piece where that depends on what is known of the processor's cache, as on ARM it is not.

Nearly all comes from the arena, and stays in it. Some kernels take memory from the system itself,
and give it back when the node has run: it is never in the place of what other nodes had, and no
limit of the arena holds it back.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from onnx import TensorProto

from shoal_compiler.safety import bits_of, is_standard
from shoal_compiler.shaped import Dims, Shaped, Unknown

STRIP_BYTES: Final = 1 << 18
"""A strip of a convolution's input, spread out, for two threads; it is small, whatever they are."""
THREADS: Final = 4
"""So many have what each needs for itself, where that is much."""
TILES_BYTES: Final = 1 << 20
"""What attention works in that makes its products piece by piece: by the second-level cache."""
_FLOAT: Final = 4


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes of the arena, one after the other, and beside it."""

    arena: tuple[int, ...] = ()
    beside_bytes: int = 0


Rule = Callable[[Shaped], Workspace]


def workspace(shaped: Shaped) -> Workspace:
    """What the runtime needs while the node runs; nothing where no rule is known, or a size."""
    try:
        return _RULES.get(shaped.node.op_type, _nothing)(shaped)
    except (Unknown, LookupError, ValueError, ArithmeticError):
        return Workspace()


def _floats(*numbers: int, beside: int = 0) -> Workspace:
    """So many numbers in single precision."""
    return Workspace(tuple(_FLOAT * each for each in numbers if each), _FLOAT * beside)


def _nothing(shaped: Shaped) -> Workspace:
    return Workspace()


def _convolution(shaped: Shaped) -> Workspace:
    """A kernel of more than one element is made a matrix product. With more filters than output
    positions, the input is spread out whole; else in strips of a fixed size per thread."""
    output, kernel = shaped.output(0), shaped.input(1)
    if prod(kernel[2:]) == 1 and set(shaped.integers("strides") or [1]) == {1}:
        return Workspace()
    filters, places = kernel[0] // shaped.integer("group", 1), prod(output[2:])
    return _floats(places * prod(kernel[1:])) if filters > places else Workspace((STRIP_BYTES,))


def _transposed_convolution(shaped: Shaped) -> Workspace:
    """The product is made first, whole, and gathered from."""
    return _floats(prod(shaped.input(0)[2:]) * prod(shaped.input(1)[1:]))


def _where(shaped: Shaped) -> Workspace:
    """It selects from each operand before it joins the two. Halves are made numbers before."""
    size = max(_FLOAT, (bits_of(shaped.type(1)) or 0) // 8)
    condition = shaped.input(0)
    chosen = (prod(_joined(condition, shaped.input(place))) for place in (1, 2))
    return Workspace(tuple(size * each for each in chosen if each))


def _joined(one: Dims, two: Dims) -> Dims:
    longest = max(len(one), len(two))
    padded = ((1,) * (longest - len(each)) + each for each in (one, two))
    return tuple(map(max, *padded))


def _like_its_output(shaped: Shaped) -> Workspace:
    """Operators that are made of several nodes."""
    return _floats(prod(shaped.output(0)))


def _few_bits(shaped: Shaped) -> Workspace:
    """Unless weights were packed, all are made numbers at once, whatever the rows, the blocks, the
    bits and the accuracy that is asked for. What is read and given in halves is there as numbers
    too: together what it counts as by itself, and half of that."""
    rows, given = shaped.input(0), shaped.output(0)
    halves = prod(rows) + prod(given) if shaped.type(0) == TensorProto.FLOAT16 else 0
    return _floats(beside=rows[-1] * given[-1] + halves // 2)


def _few_bits_of_a_table(shaped: Shaped) -> Workspace:
    return _floats(shaped.input(0)[-1] * shaped.output(0)[-1])


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
        return _floats(every, mask)
    threads = min(THREADS, batch * heads)
    multiplied = products + length * query[-1] + keys * key[-1]
    return _floats(every // 2, mask // 2, *[products] * threads, beside=threads * multiplied)


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
    return _floats(apart, *_in_heads(shaped, length * keys, given, is_masked=is_masked))


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
    return _floats(
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
        return _floats(*(each // 2 for each in apart), products, given, *converted)
    asks = shaped.number("softcap") or shaped.integer("smooth_softmax") or shaped.has(11)
    if not asks and shaped.gives(1) and shaped.gives(2) and not shaped.gives(3):
        products = min(products, TILES_BYTES // _FLOAT)
    return _floats(*apart, products)


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
    return _floats(buffers, sums, beside=2 * each.routed * each.inner)


def _quantised_experts(shaped: Shaped) -> Workspace:
    """The same, and of each thread's expert numbers are made."""
    each = _Experts.of(shaped)
    buffers = each.routed * (2 * each.width + 2 * each.inner)
    numbers = each.threads * 2 * each.width * each.inner
    sums = (each.threads + 2) * each.rows * each.width
    return _floats(buffers + numbers, sums)


_RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("Conv", "FusedConv"), _convolution),
    "ConvTranspose": _transposed_convolution,
    "Where": _where,
    **dict.fromkeys(("HardSwish", "Mish"), _like_its_output),
    **dict.fromkeys(("Attention", "QAttention"), _attention),
    "MultiHeadAttention": _multi_head_attention,
    "GroupQueryAttention": _grouped_attention,
    "MatMulNBits": _few_bits,
    "MatMulBnb4": _few_bits_of_a_table,
    "MoE": _experts,
    "QMoE": _quantised_experts,
}
