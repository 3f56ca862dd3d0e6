from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    FLOAT: _ClassVar[DataType]
    UINT8: _ClassVar[DataType]
    INT8: _ClassVar[DataType]
    UINT16: _ClassVar[DataType]
    INT16: _ClassVar[DataType]
    INT32: _ClassVar[DataType]
    INT64: _ClassVar[DataType]
    STRING: _ClassVar[DataType]
    BOOL: _ClassVar[DataType]
    FLOAT16: _ClassVar[DataType]
    DOUBLE: _ClassVar[DataType]
    UINT32: _ClassVar[DataType]
    UINT64: _ClassVar[DataType]
    COMPLEX64: _ClassVar[DataType]
    COMPLEX128: _ClassVar[DataType]
    BFLOAT16: _ClassVar[DataType]

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NONE: _ClassVar[Codec]
    LZ4: _ClassVar[Codec]
    ZSTD: _ClassVar[Codec]
    ZLIB: _ClassVar[Codec]
    FP16: _ClassVar[Codec]
DATA_TYPE_UNSPECIFIED: DataType
FLOAT: DataType
UINT8: DataType
INT8: DataType
UINT16: DataType
INT16: DataType
INT32: DataType
INT64: DataType
STRING: DataType
BOOL: DataType
FLOAT16: DataType
DOUBLE: DataType
UINT32: DataType
UINT64: DataType
COMPLEX64: DataType
COMPLEX128: DataType
BFLOAT16: DataType
NONE: Codec
LZ4: Codec
ZSTD: Codec
ZLIB: Codec
FP16: Codec

class Frame(_message.Message):
    __slots__ = ("header", "payload", "frames")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    header: FrameHeader
    payload: bytes
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    def __init__(self, header: _Optional[_Union[FrameHeader, _Mapping]] = ..., payload: _Optional[bytes] = ..., frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ...) -> None: ...

class FrameHeader(_message.Message):
    __slots__ = ("transfer", "offset", "activation", "file", "acknowledgement", "ping", "opening", "closing", "message", "items", "last", "padding")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGEMENT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    offset: int
    activation: Activation
    file: FileSlice
    acknowledgement: Acknowledgement
    ping: Ping
    opening: Opening
    closing: Closing
    message: bytes
    items: Items
    last: bool
    padding: bytes
    def __init__(self, transfer: _Optional[int] = ..., offset: _Optional[int] = ..., activation: _Optional[_Union[Activation, _Mapping]] = ..., file: _Optional[_Union[FileSlice, _Mapping]] = ..., acknowledgement: _Optional[_Union[Acknowledgement, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., opening: _Optional[_Union[Opening, _Mapping]] = ..., closing: _Optional[_Union[Closing, _Mapping]] = ..., message: _Optional[bytes] = ..., items: _Optional[_Union[Items, _Mapping]] = ..., last: _Optional[bool] = ..., padding: _Optional[bytes] = ...) -> None: ...

class Items(_message.Message):
    __slots__ = ("ticket", "instructions", "compute", "layout")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    instructions: _containers.RepeatedScalarFieldContainer[int]
    compute: _containers.RepeatedScalarFieldContainer[int]
    layout: bytes
    def __init__(self, ticket: _Optional[bytes] = ..., instructions: _Optional[_Iterable[int]] = ..., compute: _Optional[_Iterable[int]] = ..., layout: _Optional[bytes] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorHeader]
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorHeader, _Mapping]]] = ...) -> None: ...

class Activation(_message.Message):
    __slots__ = ("key", "device", "tensors", "ticket")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    key: ActivationKey
    device: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorHeader]
    ticket: bytes
    def __init__(self, key: _Optional[_Union[ActivationKey, _Mapping]] = ..., device: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorHeader, _Mapping]]] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class ActivationKey(_message.Message):
    __slots__ = ("job", "epoch", "item", "producer", "consumer")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    item: int
    producer: int
    consumer: int
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., item: _Optional[int] = ..., producer: _Optional[int] = ..., consumer: _Optional[int] = ...) -> None: ...

class TensorHeader(_message.Message):
    __slots__ = ("name", "dtype", "shape", "codec", "shuffled", "encoded_bytes", "decoded_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SHUFFLED_FIELD_NUMBER: _ClassVar[int]
    ENCODED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DECODED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    codec: Codec
    shuffled: bool
    encoded_bytes: int
    decoded_bytes: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., codec: _Optional[_Union[Codec, str]] = ..., shuffled: _Optional[bool] = ..., encoded_bytes: _Optional[int] = ..., decoded_bytes: _Optional[int] = ...) -> None: ...

class FileSlice(_message.Message):
    __slots__ = ("digest", "file", "file_bytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    file: str
    file_bytes: int
    def __init__(self, digest: _Optional[str] = ..., file: _Optional[str] = ..., file_bytes: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("answer_bytes",)
    ANSWER_BYTES_FIELD_NUMBER: _ClassVar[int]
    answer_bytes: int
    def __init__(self, answer_bytes: _Optional[int] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("device",)
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    device: str
    def __init__(self, device: _Optional[str] = ...) -> None: ...

class Closing(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Acknowledgement(_message.Message):
    __slots__ = ("outcome", "message")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACCEPTED: _ClassVar[Acknowledgement.Outcome]
        STALE: _ClassVar[Acknowledgement.Outcome]
        BUSY: _ClassVar[Acknowledgement.Outcome]
        REFUSED: _ClassVar[Acknowledgement.Outcome]
    ACCEPTED: Acknowledgement.Outcome
    STALE: Acknowledgement.Outcome
    BUSY: Acknowledgement.Outcome
    REFUSED: Acknowledgement.Outcome
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    outcome: Acknowledgement.Outcome
    message: str
    def __init__(self, outcome: _Optional[_Union[Acknowledgement.Outcome, str]] = ..., message: _Optional[str] = ...) -> None: ...

class FetchFragmentRequest(_message.Message):
    __slots__ = ("digest", "file", "offset", "bytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    file: str
    offset: int
    bytes: int
    def __init__(self, digest: _Optional[str] = ..., file: _Optional[str] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...
