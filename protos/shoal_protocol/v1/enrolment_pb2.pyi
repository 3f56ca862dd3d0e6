from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class EnrolRequest(_message.Message):
    __slots__ = ("token", "certificate_request")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    token: str
    certificate_request: bytes
    def __init__(self, token: _Optional[str] = ..., certificate_request: _Optional[bytes] = ...) -> None: ...

class EnrolResponse(_message.Message):
    __slots__ = ("certificate_chain", "authority")
    CERTIFICATE_CHAIN_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    certificate_chain: bytes
    authority: bytes
    def __init__(self, certificate_chain: _Optional[bytes] = ..., authority: _Optional[bytes] = ...) -> None: ...
