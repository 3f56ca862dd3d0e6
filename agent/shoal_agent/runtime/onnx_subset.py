"""As much of ONNX's messages as the agent reads and edits: it does without the package `onnx`.

protobuf preserves the fields that are not declared here.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto

_PACKAGE: Final = "shoal.onnx_subset"
_ONE: Final = Field.LABEL_OPTIONAL
_MANY: Final = Field.LABEL_REPEATED
_MESSAGES: Final[
    dict[str, tuple[tuple[str, int, Field.Label.ValueType, str | Field.Type.ValueType], ...]]
] = {
    "Entry": (("key", 1, _ONE, Field.TYPE_STRING), ("value", 2, _ONE, Field.TYPE_STRING)),
    "Tensor": (
        ("dims", 1, _MANY, Field.TYPE_INT64),
        ("data_type", 2, _ONE, Field.TYPE_INT32),
        ("name", 8, _ONE, Field.TYPE_STRING),
        ("external_data", 13, _MANY, "Entry"),
    ),
    "Attribute": (
        ("name", 1, _ONE, Field.TYPE_STRING),
        ("i", 3, _ONE, Field.TYPE_INT64),
        ("g", 6, _ONE, "Graph"),
        ("ints", 8, _MANY, Field.TYPE_INT64),
        ("graphs", 11, _MANY, "Graph"),
        ("type", 20, _ONE, Field.TYPE_INT32),
    ),
    "Node": (
        ("input", 1, _MANY, Field.TYPE_STRING),
        ("output", 2, _MANY, Field.TYPE_STRING),
        ("name", 3, _ONE, Field.TYPE_STRING),
        ("op_type", 4, _ONE, Field.TYPE_STRING),
        ("attribute", 5, _MANY, "Attribute"),
        ("domain", 7, _ONE, Field.TYPE_STRING),
    ),
    "Dimension": (("dim_value", 1, _ONE, Field.TYPE_INT64),),
    "Shape": (("dim", 1, _MANY, "Dimension"),),
    "TensorType": (("elem_type", 1, _ONE, Field.TYPE_INT32), ("shape", 2, _ONE, "Shape")),
    "Type": (("tensor_type", 1, _ONE, "TensorType"),),
    "ValueInfo": (("name", 1, _ONE, Field.TYPE_STRING), ("type", 2, _ONE, "Type")),
    "Graph": (
        ("node", 1, _MANY, "Node"),
        ("initializer", 5, _MANY, "Tensor"),
        ("input", 11, _MANY, "ValueInfo"),
        ("output", 12, _MANY, "ValueInfo"),
    ),
    "Model": (("graph", 7, _ONE, "Graph"),),
}
"""Fields by name, number in onnx.proto, label, and type (a name: that message)."""


def parse(content: bytes) -> Any:
    """A model. Raises `google.protobuf.message.DecodeError`."""
    return _model_type().FromString(content)


def tensors(graph: Any) -> Iterator[Any]:
    """The initializers of a graph and of the graphs inside it."""
    yield from graph.initializer
    for inner in inner_graphs(graph):
        yield from tensors(inner)


def reads_rows(graph: Any) -> bool:
    """Whether a graph, or one inside it, has a table of which items read some rows."""
    tables = {tensor.name for tensor in graph.initializer}
    return any(node.op_type == "Gather" and node.input[0] in tables for node in graph.node) or any(
        reads_rows(inner) for inner in inner_graphs(graph)
    )


def inner_graphs(graph: Any) -> Iterator[Any]:
    """The graphs in attributes of a graph's nodes."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g
            yield from attribute.graphs


@cache
def _model_type() -> Any:
    file = FileDescriptorProto(name="onnx_subset.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, label, kind in fields:
            field = message.field.add(name=field_name, number=number, label=label)
            if isinstance(kind, str):
                field.type, field.type_name = Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Model"))
