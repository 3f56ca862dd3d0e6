"""A model's functions, written out where they are called."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from copy import deepcopy

import onnx
from onnx import inliner

from shoal_compiler.errors import ModelRefused
from shoal_compiler.nodes import all_nodes, node_label
from shoal_compiler.safety import called_by, function_of
from shoal_compiler.trees import check_trees

_Name = tuple[str, str]


def written_out(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model without functions. Raises `ModelRefused`."""
    made = deepcopy(proto)
    if made.functions:
        _raise_opsets(made)
    while made.functions:
        made = _without_outermost(made)
    # A function's caller may have given it the attributes that make a tree.
    for index, node in enumerate(all_nodes(made.graph.node) if proto.functions else ()):
        check_trees(node, node_label(node, index))
    return made


def _without_outermost(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model without those functions that no other calls; where none has an attribute with a
    default, without any. A default counts where the call leaves the attribute out, and a call in a
    function may leave out what that function's own caller has not given: so from the outside in."""
    try:
        if any(each.attribute_proto for each in proto.functions):
            _give_defaults(proto)
            outermost = _outermost(proto.functions)
            made = inliner.inline_selected_functions(proto, outermost)
        else:
            outermost = [(each.domain, each.name) for each in proto.functions]
            made = inliner.inline_local_functions(proto)
    except (onnx.checker.ValidationError, RuntimeError, ValueError) as error:
        raise ModelRefused(f"has functions that cannot be written out: {error}") from error
    _check_written_out(made, outermost)
    kept = [each for each in made.functions if (each.domain, each.name) not in outermost]
    del made.functions[:]
    made.functions.extend(kept)
    return made


def _raise_opsets(proto: onnx.ModelProto) -> None:
    """Give functions the model's operator sets, where all their operators are the same in both: the
    inliner writes out no function of others."""
    versions = _versions(proto.opset_import)
    for function in proto.functions:
        nodes = list(all_nodes(function.node))
        for imported in function.opset_import:
            version = versions.setdefault(_named(imported), imported.version)
            own = [each for each in nodes if (each.domain or "ai.onnx") == _named(imported)]
            if all(_since(each, version) == _since(each, imported.version) for each in own):
                imported.version = version


def _since(node: onnx.NodeProto, version: int) -> int:
    """With which version of its set the operator became what it is; 0: it is none of onnx."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        return onnx.defs.get_schema(node.op_type, version, domain).since_version
    except onnx.defs.SchemaError:
        return 0


def _check_written_out(proto: onnx.ModelProto, names: Iterable[_Name]) -> None:
    """No call to one of these functions is left. Raises `ModelRefused`."""
    left = {(node.domain, node.op_type) for node in all_nodes(proto.graph.node)}
    versions = _versions(proto.opset_import)
    for function in proto.functions:
        if (function.domain, function.name) not in left.intersection(names):
            continue
        sets = "; ".join(
            f"{domain} {version}, the model {versions[domain]}"
            for domain, version in _versions(function.opset_import).items()
            if versions.get(domain, version) != version
        )
        raise ModelRefused(
            f"has a function {function.name} that cannot be written out: its operators are not "
            f"those of the model's operator sets (it imports {sets}); export both for one opset"
        )


def _versions(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    return {_named(each): each.version for each in imports}


def _named(imported: onnx.OperatorSetIdProto) -> str:
    return imported.domain or "ai.onnx"


def _outermost(functions: Iterable[onnx.FunctionProto]) -> list[_Name]:
    """The functions that no other calls."""
    calls: dict[_Name, set[_Name]] = defaultdict(set)
    for each in functions:
        calls[each.domain, each.name].update(_called(each))
    called = {name for own, names in calls.items() for name in names - {own}}
    # Functions that call overloads of one another in a circle are written out together.
    return [name for name in calls if name not in called] or list(calls)


def _called(function: onnx.FunctionProto) -> Iterator[_Name]:
    yield from ((node.domain, node.op_type) for node in all_nodes(function.node))


def _give_defaults(proto: onnx.ModelProto) -> None:
    """Write the defaults of attributes, which onnx's inliner does not know of, into the calls in
    the graph that leave them out."""
    functions = {function_of(each): each for each in proto.functions}
    for node in all_nodes(proto.graph.node):
        if (function := functions.get(called_by(node))) is not None:
            given = {each.name for each in node.attribute}
            node.attribute.extend(
                each for each in function.attribute_proto if each.name not in given
            )
