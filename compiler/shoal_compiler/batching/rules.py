"""What operators do to the items along the first axis: one rule for each operator that keeps them
apart (`proof` says what for).

A rule receives an `Application`, one node with what its inputs are, and returns what its outputs
are. It raises `Mixes` wherever items would meet, or might. What has no rows and no counts among its
inputs gives what is the same for every number of items, whatever the operator.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from shoal_compiler.batching.sizes import ELEMENTWISE, SIZES, with_first
from shoal_compiler.batching.values import (
    COUNT,
    Application,
    Element,
    Mixes,
    Value,
    elements_of,
    grows,
    rows,
)

Rule = Callable[[Application], Sequence[Value]]


def applied(node: Application) -> Sequence[Value]:
    """What a node makes. Raises `Mixes`."""
    kind = node.node.op_type
    if any(each.HasField("g") or each.graphs for each in node.node.attribute):
        raise Mixes("graphs inside it may do anything")
    if node.domain not in ("ai.onnx", "com.microsoft") or kind in _BY_CHANCE:
        raise Mixes(f"{kind} may do anything")
    if (sizes := SIZES.get(kind)) is not None and (found := sizes(node)) is not None:
        return node.made(found)
    if all(value is None or value.same for value in node.inputs):
        return [with_first(node, value) for value in node.inferred]
    rule = (_RULES if node.domain == "ai.onnx" else _CONTRIBUTED).get(kind)
    if rule is None:
        raise Mixes(f"no rule for {kind}")
    return rule(node)


_BY_CHANCE: Final = frozenset(
    (
        *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike"),
        *("RandomUniform", "RandomUniformLike"),
    )
)


def _target(value: Value | None) -> tuple[Element, ...]:
    """A shape that rows are to have: only its first size may count items."""
    elements = elements_of(value)
    if not elements or any(map(grows, elements[1:])):
        raise Mixes("the shape is not known")
    return elements


# ---- operators of one input with rows, that work within each row ---------------------------------


def _inner_axis(axis: int, rank: int, items: int = 0) -> int:
    """An axis that is not the one of the items."""
    axis += rank if axis < 0 else 0
    if axis == items or not 0 <= axis < rank:
        raise Mixes("it works along the axis of the items")
    return axis


def _inner_axes(axes: Sequence[int] | None, rank: int, items: int = 0) -> set[int]:
    """Axes, none of them that of the items."""
    if not axes:
        raise Mixes("it works along all axes")
    return {_inner_axis(axis, rank, items) for axis in axes}


def _without_axes(gone: set[int], rank: int, items: int) -> Value:
    return rows(rank - len(gone), items - sum(axis < items for axis in gone))


def _within(node: Application) -> Sequence[Value]:
    """Convolutions, pools and normalisations: each element of the first axis by itself."""
    _, rank = node.row_input()
    node.check_others_same()
    if rank < 2:
        raise Mixes("it works along the only axis")
    return node.made(rows(rank))


def _one_output(node: Application) -> Sequence[Value]:
    if sum(map(bool, node.node.output)) > 1:  # indices that count from the first item
        raise Mixes("its second output counts across items")
    return _within(node)


def _dropout(node: Application) -> Sequence[Value]:
    if node.version < 7 or node.input(2) is not None:
        raise Mixes("it may drop by chance")
    return _broadcast(node, node.inputs[:1])


def _one_hot(node: Application) -> Sequence[Value]:
    _, rank = node.row_input()
    node.check_others_same()
    _inner_axis(node.integer("axis", -1), rank + 1)
    return node.made(rows(rank + 1))


def _batch_normalization(node: Application) -> Sequence[Value]:
    if node.version < 7 or node.integer("training_mode", 0):
        raise Mixes("it normalises across items")
    return _one_output(node)


def _fused_convolution(node: Application) -> Sequence[Value]:
    node.check_same(node.inputs[1:3])
    return _broadcast(node, (node.input(0), node.input(3)))


def _along(default: int) -> Rule:
    def rule(node: Application) -> Sequence[Value]:
        _, rank = node.row_input()
        node.check_others_same()
        _inner_axis(node.integer("axis", default), rank)
        return node.made(rows(rank))

    return rule


def _softmax(node: Application) -> Sequence[Value]:
    return _along(-1 if node.version >= 13 else 1)(node)


def _reduce(node: Application) -> Sequence[Value]:
    _, rank = node.row_input()
    node.check_others_same()
    gone = _inner_axes(node.known(1, "axes"), rank)
    return node.made(rows(rank if node.integer("keepdims", 1) else rank - len(gone)))


def _arg_reduce(node: Application) -> Sequence[Value]:
    _, rank = node.row_input()
    _inner_axis(node.integer("axis", 0), rank)
    return node.made(rows(rank if node.integer("keepdims", 1) else rank - 1))


def _cumulative(node: Application) -> Sequence[Value]:
    _, rank = node.row_input()
    _inner_axes(node.known(1), rank)
    return node.made(rows(rank))


def _quantize(node: Application) -> Sequence[Value]:
    """With one scale, or one for each place along an axis that is not the first."""
    _, rank = node.row_input()
    node.check_others_same()
    scale = node.input(1)
    if scale is None or scale.rank is None or scale.rank > 1:
        raise Mixes("its scale has several axes")
    if scale.rank == 1 and scale.first != 1:
        _inner_axis(node.integer("axis", 1), rank)
    return node.made(rows(rank))


def _resize(node: Application) -> Sequence[Value]:
    _, rank = node.row_input()
    mode = node.attributes.get("coordinate_transformation_mode")
    policy = node.attributes.get("keep_aspect_ratio_policy")
    if (mode is not None and mode.s == b"tf_crop_and_resize") or (
        policy is not None and policy.s != b"stretch"
    ):
        raise Mixes("sizes of items follow from one another")
    scales, sizes = (
        elements_of(node.input(at)) for at in ((2, 3) if node.version >= 11 else (1, 3))
    )
    if "axes" in node.attributes:
        _inner_axes(node.attributes["axes"].ints, rank)
        node.check_others_same()
    elif sizes:
        node.check_same(node.inputs[1:3])
        if sizes[0] is not COUNT or any(map(grows, sizes[1:])):
            raise Mixes("the first axis is resized")
    else:
        node.check_others_same()
        if not scales or scales[0] != 1:
            raise Mixes("the first axis is resized")
    return node.made(rows(rank))


# ---- several inputs ------------------------------------------------------------------------------


def _broadcast(node: Application, inputs: Sequence[Value | None]) -> Sequence[Value]:
    """The axes of the items meet, and nothing else meets them."""
    given = [value for value in inputs if value is not None]
    places = {(value.rank, value.axis) for value in given if value.rows}
    if len(places) != 1:
        raise Mixes("rows meet another axis than that of the items")
    ((rank, axis),) = places
    if rank is None:
        raise Mixes("a rank is not known")
    for value in given:
        _check_beside(value, rank, axis)
    return node.made(rows(rank, axis))


def _check_beside(value: Value, rank: int, axis: int = 0) -> None:
    """That a tensor without rows does not reach the axis of the items in one of that rank."""
    if value.rows:
        return
    has_one = value.rank == rank and axis == 0 and value.first == 1
    if not value.same or value.rank is None or (value.rank >= rank - axis and not has_one):
        raise Mixes("something else than rows meets the axis of the items")


def _elementwise(node: Application) -> Sequence[Value]:
    return _broadcast(node, node.inputs)


def _matmul(left: int, right: int) -> Rule:
    def rule(node: Application) -> Sequence[Value]:
        factors = (node.input(left), node.input(right))
        node.check_same([value for at, value in enumerate(node.inputs) if at not in (left, right)])
        return node.made(_product(*factors))

    return rule


def _product(left: Value | None, right: Value | None) -> Value:
    if left is None or right is None or left.rank is None or right.rank is None:
        raise Mixes("a factor is not known")
    if left.rows and not right.rows and right.rank <= 2:
        if not right.same or left.rank < 2 or left.axis:
            raise Mixes("it adds up along the first axis")
        return rows(left.rank if right.rank == 2 else left.rank - 1)
    rank = max(left.rank, right.rank)
    if left.rank < 2:
        raise Mixes("it takes the last axis but one away")
    for value in (left, right):
        if value.rows and (value.rank != rank or rank < 3 or value.axis):
            raise Mixes("it adds up along the first axis")
        _check_beside(value, rank)
    return rows(rank)


def _fused_matmul(node: Application) -> Sequence[Value]:
    if any(node.integer(each, 0) for each in ("transBatchA", "transBatchB")):
        raise Mixes("the first axis moves")
    if any(node.integer(each, 0) for each in ("transA", "transB")):
        for value in node.inputs[:2]:
            if value is not None and value.rows and (value.rank or 0) < 3:
                raise Mixes("the first axis moves")
    return _matmul(0, 1)(node)


def _gemm(node: Application) -> Sequence[Value]:
    _, rank = node.row_input()
    node.check_same(node.inputs[1:2])
    if node.integer("transA", 0) or rank != 2:
        raise Mixes("the first axis moves")
    return _broadcast(node, (node.input(0), node.input(2)))


def _gather(node: Application) -> Sequence[Value]:
    data, at = node.input(0), node.input(1)
    if data is None or at is None or data.rank is None or at.rank is None:
        raise Mixes("a rank is not known")
    axis = node.integer("axis", 0)
    if data.rows and at.same:
        before = _inner_axis(axis, data.rank, data.axis) < data.axis
        return node.made(rows(data.rank - 1 + at.rank, data.axis + (at.rank - 1) * before))
    if not (data.same and at.rows and not at.axis and axis in (0, -data.rank)):
        raise Mixes("rows are picked across items")
    return node.made(rows(data.rank - 1 + at.rank))


def _concat(node: Application) -> Sequence[Value]:
    _, rank = node.row_input()
    if any(value != node.input(0) for value in node.inputs):
        raise Mixes("something else than rows is joined to rows")
    _inner_axis(node.integer("axis", 0), rank)
    return node.made(rows(rank))


def _added(indices: Sequence[int]) -> Rule:
    """Quantised operators: the tensors stand at these places, among scales and zero points."""

    def rule(node: Application) -> Sequence[Value]:
        node.check_same([value for at, value in enumerate(node.inputs) if at not in indices])
        return _broadcast(node, [node.input(at) for at in indices])

    return rule


# ---- shapes --------------------------------------------------------------------------------------


def _reshape(node: Application) -> Sequence[Value]:
    """Elements keep their order, so items do; the first axis must take up their number."""
    node.row_input()
    first, *others = _target(node.input(1))
    copied = () if node.integer("allowzero", 0) else (0,)
    if not grows(first) and first not in (-1, *copied):
        raise Mixes("the first axis is fixed")
    return node.made(rows(1 + len(others)))


def _flatten(node: Application) -> Sequence[Value]:
    _, rank = node.row_input()
    axis = node.integer("axis", 1)
    if axis != rank:
        _inner_axis(axis, rank)
    return node.made(rows(2))


def _squeeze(node: Application) -> Sequence[Value]:
    rank, items = node.moved_input()
    return node.made(_without_axes(_inner_axes(node.known(1, "axes"), rank, items), rank, items))


def _unsqueeze(node: Application) -> Sequence[Value]:
    _, rank = node.row_input()
    axes = node.known(1, "axes") or ()
    _inner_axes(axes, rank + len(axes))
    return node.made(rows(rank + len(axes)))


def _transpose(node: Application) -> Sequence[Value]:
    rank, items = node.moved_input()
    order = list(node.attributes["perm"].ints) if "perm" in node.attributes else None
    return node.made(rows(rank, rank - 1 - items if order is None else order.index(items)))


def _expand(node: Application) -> Sequence[Value]:
    value, target = node.input(0), _target(node.input(1))
    if value is None or value.rank is None or value.rank > len(target):
        raise Mixes("the shape is not known")
    if value.rows and (
        value.axis or value.rank < len(target) or (not grows(target[0]) and target[0] != 1)
    ):
        raise Mixes("rows meet another axis than the first")
    if not value.rows and not grows(target[0]):
        raise Mixes("its rank is not known")
    _check_beside(value, len(target))
    return node.made(rows(len(target)))


def _filled(node: Application) -> Sequence[Value]:
    return node.made(rows(len(_target(node.input(0)))))


def _tile(node: Application) -> Sequence[Value]:
    _, rank = node.row_input()
    repeats = _target(node.input(1))
    if repeats[0] != 1:
        raise Mixes("items are repeated")
    return node.made(rows(rank))


def _slice(node: Application) -> Sequence[Value]:
    rank, items = node.moved_input()
    node.check_others_same()
    _inner_axes(node.known(3, "axes"), rank, items)
    return node.made(rows(rank, items))


def _pad(node: Application) -> Sequence[Value]:
    _, rank = node.row_input()
    node.check_others_same()
    if node.input(3) is not None:
        _inner_axes(node.known(3), rank)
        return node.made(rows(rank))
    pads = tuple(node.attributes["pads"].ints) if "pads" in node.attributes else None
    padding = pads if pads is not None else elements_of(node.input(1))
    if not padding or padding[0] != 0 or padding[len(padding) // 2] != 0:
        raise Mixes("the first axis is padded")
    return node.made(rows(rank))


def _trilu(node: Application) -> Sequence[Value]:
    _, rank = node.row_input()
    node.check_others_same()
    if rank < 3:
        raise Mixes("it works along the first axis")
    return node.made(rows(rank))


_REDUCTIONS: Final = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum")

_RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(("Conv", "ConvInteger", "ConvTranspose", "DepthToSpace"), _within),
    **dict.fromkeys(("SpaceToDepth", "GlobalAveragePool", "GlobalLpPool"), _within),
    **dict.fromkeys(("GlobalMaxPool", "AveragePool", "LpPool", "LRN"), _within),
    **dict.fromkeys(("GroupNormalization", "InstanceNormalization", "QLinearConv"), _within),
    "MaxPool": _one_output,
    "BatchNormalization": _batch_normalization,
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _softmax),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "LpNormalization"), _along(-1)),
    "TopK": _along(-1),
    "OneHot": _one_hot,
    "Dropout": _dropout,
    "Split": _along(0),
    **dict.fromkeys((f"Reduce{each}" for each in (*_REDUCTIONS, "SumSquare")), _reduce),
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg_reduce),
    "CumSum": _cumulative,
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantize),
    **dict.fromkeys(("Resize", "Upsample"), _resize),
    **dict.fromkeys(("MatMul", "MatMulInteger"), _matmul(0, 1)),
    "QLinearMatMul": _matmul(0, 3),
    "Gemm": _gemm,
    "Gather": _gather,
    "Concat": _concat,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Expand": _expand,
    "ConstantOfShape": _filled,
    "Tile": _tile,
    "Slice": _slice,
    "Pad": _pad,
    "Trilu": _trilu,
}
_CONTRIBUTED: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("BiasGelu", "FastGelu", "Gelu", "QuickGelu"), _elementwise),
    **dict.fromkeys(("QLinearGlobalAveragePool", "MatMulNBits"), _within),
    **dict.fromkeys(("QLinearLeakyRelu", "QLinearSigmoid"), _within),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantize),
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), _added((0, 3))),
    "FusedConv": _fused_convolution,
    "FusedMatMul": _fused_matmul,
}
