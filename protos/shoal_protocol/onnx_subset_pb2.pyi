from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Model(_message.Message):
    __slots__ = ("graph",)
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    graph: Graph
    def __init__(self, graph: _Optional[_Union[Graph, _Mapping]] = ...) -> None: ...

class Graph(_message.Message):
    __slots__ = ("node", "initializer", "input", "output")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    node: _containers.RepeatedCompositeFieldContainer[Node]
    initializer: _containers.RepeatedCompositeFieldContainer[Tensor]
    input: _containers.RepeatedCompositeFieldContainer[ValueInfo]
    output: _containers.RepeatedCompositeFieldContainer[ValueInfo]
    def __init__(self, node: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., initializer: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., input: _Optional[_Iterable[_Union[ValueInfo, _Mapping]]] = ..., output: _Optional[_Iterable[_Union[ValueInfo, _Mapping]]] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("input", "output", "name", "op_type", "attribute", "domain")
    INPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OP_TYPE_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTE_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    input: _containers.RepeatedScalarFieldContainer[str]
    output: _containers.RepeatedScalarFieldContainer[str]
    name: str
    op_type: str
    attribute: _containers.RepeatedCompositeFieldContainer[Attribute]
    domain: str
    def __init__(self, input: _Optional[_Iterable[str]] = ..., output: _Optional[_Iterable[str]] = ..., name: _Optional[str] = ..., op_type: _Optional[str] = ..., attribute: _Optional[_Iterable[_Union[Attribute, _Mapping]]] = ..., domain: _Optional[str] = ...) -> None: ...

class Attribute(_message.Message):
    __slots__ = ("name", "i", "g", "ints", "graphs", "type")
    NAME_FIELD_NUMBER: _ClassVar[int]
    I_FIELD_NUMBER: _ClassVar[int]
    G_FIELD_NUMBER: _ClassVar[int]
    INTS_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    i: int
    g: Graph
    ints: _containers.RepeatedScalarFieldContainer[int]
    graphs: _containers.RepeatedCompositeFieldContainer[Graph]
    type: int
    def __init__(self, name: _Optional[str] = ..., i: _Optional[int] = ..., g: _Optional[_Union[Graph, _Mapping]] = ..., ints: _Optional[_Iterable[int]] = ..., graphs: _Optional[_Iterable[_Union[Graph, _Mapping]]] = ..., type: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dims", "data_type", "name", "external_data")
    DIMS_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_DATA_FIELD_NUMBER: _ClassVar[int]
    dims: _containers.RepeatedScalarFieldContainer[int]
    data_type: int
    name: str
    external_data: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, dims: _Optional[_Iterable[int]] = ..., data_type: _Optional[int] = ..., name: _Optional[str] = ..., external_data: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class ValueInfo(_message.Message):
    __slots__ = ("name", "type")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: Type
    def __init__(self, name: _Optional[str] = ..., type: _Optional[_Union[Type, _Mapping]] = ...) -> None: ...

class Type(_message.Message):
    __slots__ = ("tensor_type",)
    TENSOR_TYPE_FIELD_NUMBER: _ClassVar[int]
    tensor_type: TensorType
    def __init__(self, tensor_type: _Optional[_Union[TensorType, _Mapping]] = ...) -> None: ...

class TensorType(_message.Message):
    __slots__ = ("elem_type", "shape")
    ELEM_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    elem_type: int
    shape: Shape
    def __init__(self, elem_type: _Optional[int] = ..., shape: _Optional[_Union[Shape, _Mapping]] = ...) -> None: ...

class Shape(_message.Message):
    __slots__ = ("dim",)
    DIM_FIELD_NUMBER: _ClassVar[int]
    dim: _containers.RepeatedCompositeFieldContainer[Dimension]
    def __init__(self, dim: _Optional[_Iterable[_Union[Dimension, _Mapping]]] = ...) -> None: ...

class Dimension(_message.Message):
    __slots__ = ("dim_value",)
    DIM_VALUE_FIELD_NUMBER: _ClassVar[int]
    dim_value: int
    def __init__(self, dim_value: _Optional[int] = ...) -> None: ...
