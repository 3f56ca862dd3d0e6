from shoal_protocol.v1 import tensors_pb2 as _tensors_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Residency(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAPTIVE: _ClassVar[Residency]
    SINGLE: _ClassVar[Residency]

class FailureCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_CODE_UNSPECIFIED: _ClassVar[FailureCode]
    BUDGET: _ClassVar[FailureCode]
    UNAVAILABLE: _ClassVar[FailureCode]
    CORRUPT: _ClassVar[FailureCode]
    DISK_FULL: _ClassVar[FailureCode]
    INVALID_INPUT: _ClassVar[FailureCode]
    RUNTIME: _ClassVar[FailureCode]
    MISSING_ACTIVATION: _ClassVar[FailureCode]
    CANCELLED: _ClassVar[FailureCode]
    DEADLINE: _ClassVar[FailureCode]
    UNREACHABLE: _ClassVar[FailureCode]
    NOT_RESIDENT: _ClassVar[FailureCode]
ADAPTIVE: Residency
SINGLE: Residency
FAILURE_CODE_UNSPECIFIED: FailureCode
BUDGET: FailureCode
UNAVAILABLE: FailureCode
CORRUPT: FailureCode
DISK_FULL: FailureCode
INVALID_INPUT: FailureCode
RUNTIME: FailureCode
MISSING_ACTIVATION: FailureCode
CANCELLED: FailureCode
DEADLINE: FailureCode
UNREACHABLE: FailureCode
NOT_RESIDENT: FailureCode

class AgentMessage(_message.Message):
    __slots__ = ("hello", "telemetry", "reply", "evicted", "probe_reply", "draining", "batch")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    PROBE_REPLY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    telemetry: Telemetry
    reply: Reply
    evicted: Evicted
    probe_reply: ProbeReply
    draining: Draining
    batch: AgentBatch
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., telemetry: _Optional[_Union[Telemetry, _Mapping]] = ..., reply: _Optional[_Union[Reply, _Mapping]] = ..., evicted: _Optional[_Union[Evicted, _Mapping]] = ..., probe_reply: _Optional[_Union[ProbeReply, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., batch: _Optional[_Union[AgentBatch, _Mapping]] = ...) -> None: ...

class AgentBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[AgentMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[AgentMessage, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "device", "incarnation", "version", "address", "capabilities", "budget_bytes", "floor_bytes", "residency", "cached", "resident", "cache_bytes", "speed", "largest_budget_bytes")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    LARGEST_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    device: str
    incarnation: int
    version: str
    address: str
    capabilities: Capabilities
    budget_bytes: int
    floor_bytes: int
    residency: Residency
    cached: _containers.RepeatedCompositeFieldContainer[CachedFragment]
    resident: _containers.RepeatedCompositeFieldContainer[ResidentFragment]
    cache_bytes: int
    speed: Speed
    largest_budget_bytes: int
    def __init__(self, protocol: _Optional[int] = ..., device: _Optional[str] = ..., incarnation: _Optional[int] = ..., version: _Optional[str] = ..., address: _Optional[str] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., budget_bytes: _Optional[int] = ..., floor_bytes: _Optional[int] = ..., residency: _Optional[_Union[Residency, str]] = ..., cached: _Optional[_Iterable[_Union[CachedFragment, _Mapping]]] = ..., resident: _Optional[_Iterable[_Union[ResidentFragment, _Mapping]]] = ..., cache_bytes: _Optional[int] = ..., speed: _Optional[_Union[Speed, _Mapping]] = ..., largest_budget_bytes: _Optional[int] = ...) -> None: ...

class Speed(_message.Message):
    __slots__ = ("processors", "convolution_flops_per_second", "product_flops_per_second", "memory_bytes_per_second", "page_bytes_per_second", "disk_bytes_per_second")
    PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    CONVOLUTION_FLOPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PRODUCT_FLOPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    processors: float
    convolution_flops_per_second: float
    product_flops_per_second: float
    memory_bytes_per_second: float
    page_bytes_per_second: float
    disk_bytes_per_second: float
    def __init__(self, processors: _Optional[float] = ..., convolution_flops_per_second: _Optional[float] = ..., product_flops_per_second: _Optional[float] = ..., memory_bytes_per_second: _Optional[float] = ..., page_bytes_per_second: _Optional[float] = ..., disk_bytes_per_second: _Optional[float] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("architecture", "processors", "memory_bytes", "runtime")
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    architecture: str
    processors: int
    memory_bytes: int
    runtime: str
    def __init__(self, architecture: _Optional[str] = ..., processors: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., runtime: _Optional[str] = ...) -> None: ...

class CachedFragment(_message.Message):
    __slots__ = ("digest", "bytes", "task_seconds", "within")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TASK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    digest: str
    bytes: int
    task_seconds: float
    within: _containers.RepeatedCompositeFieldContainer[TimeWithin]
    def __init__(self, digest: _Optional[str] = ..., bytes: _Optional[int] = ..., task_seconds: _Optional[float] = ..., within: _Optional[_Iterable[_Union[TimeWithin, _Mapping]]] = ...) -> None: ...

class TimeWithin(_message.Message):
    __slots__ = ("granted_bytes", "seconds")
    GRANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    granted_bytes: int
    seconds: float
    def __init__(self, granted_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ResidentFragment(_message.Message):
    __slots__ = ("digest", "resident_bytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    resident_bytes: int
    def __init__(self, digest: _Optional[str] = ..., resident_bytes: _Optional[int] = ...) -> None: ...

class Telemetry(_message.Message):
    __slots__ = ("cpu_fraction", "memory_available_bytes", "temperature_celsius", "battery_fraction", "round_trip_seconds", "used_bytes", "peak_bytes", "sent_bytes", "received_bytes", "fetched_bytes", "queued_tasks", "link_bytes_per_second", "link_round_trip_seconds", "links", "transfer_seconds_per_byte", "handling_seconds", "tasks", "budget_bytes", "resident")
    CPU_FRACTION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_CELSIUS_FIELD_NUMBER: _ClassVar[int]
    BATTERY_FRACTION_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TASKS_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LINK_ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
    HANDLING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    cpu_fraction: float
    memory_available_bytes: int
    temperature_celsius: float
    battery_fraction: float
    round_trip_seconds: float
    used_bytes: int
    peak_bytes: int
    sent_bytes: int
    received_bytes: int
    fetched_bytes: int
    queued_tasks: int
    link_bytes_per_second: float
    link_round_trip_seconds: float
    links: _containers.RepeatedCompositeFieldContainer[PeerLink]
    transfer_seconds_per_byte: float
    handling_seconds: float
    tasks: _containers.RepeatedCompositeFieldContainer[MeasuredTask]
    budget_bytes: int
    resident: _containers.RepeatedCompositeFieldContainer[ResidentFragment]
    def __init__(self, cpu_fraction: _Optional[float] = ..., memory_available_bytes: _Optional[int] = ..., temperature_celsius: _Optional[float] = ..., battery_fraction: _Optional[float] = ..., round_trip_seconds: _Optional[float] = ..., used_bytes: _Optional[int] = ..., peak_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., queued_tasks: _Optional[int] = ..., link_bytes_per_second: _Optional[float] = ..., link_round_trip_seconds: _Optional[float] = ..., links: _Optional[_Iterable[_Union[PeerLink, _Mapping]]] = ..., transfer_seconds_per_byte: _Optional[float] = ..., handling_seconds: _Optional[float] = ..., tasks: _Optional[_Iterable[_Union[MeasuredTask, _Mapping]]] = ..., budget_bytes: _Optional[int] = ..., resident: _Optional[_Iterable[_Union[ResidentFragment, _Mapping]]] = ...) -> None: ...

class MeasuredTask(_message.Message):
    __slots__ = ("digest", "task_seconds", "within")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TASK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    digest: str
    task_seconds: float
    within: _containers.RepeatedCompositeFieldContainer[TimeWithin]
    def __init__(self, digest: _Optional[str] = ..., task_seconds: _Optional[float] = ..., within: _Optional[_Iterable[_Union[TimeWithin, _Mapping]]] = ...) -> None: ...

class PeerLink(_message.Message):
    __slots__ = ("device", "bytes_per_second", "round_trip_seconds")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    device: str
    bytes_per_second: float
    round_trip_seconds: float
    def __init__(self, device: _Optional[str] = ..., bytes_per_second: _Optional[float] = ..., round_trip_seconds: _Optional[float] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Evicted(_message.Message):
    __slots__ = ("digest", "reason")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    digest: str
    reason: str
    def __init__(self, digest: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Reply(_message.Message):
    __slots__ = ("instruction", "loaded", "unloaded", "prefetched", "executed", "forwarded", "failure", "planned")
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    UNLOADED_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    instruction: int
    loaded: Loaded
    unloaded: Unloaded
    prefetched: Prefetched
    executed: Executed
    forwarded: Forwarded
    failure: Failure
    planned: Planned
    def __init__(self, instruction: _Optional[int] = ..., loaded: _Optional[_Union[Loaded, _Mapping]] = ..., unloaded: _Optional[_Union[Unloaded, _Mapping]] = ..., prefetched: _Optional[_Union[Prefetched, _Mapping]] = ..., executed: _Optional[_Union[Executed, _Mapping]] = ..., forwarded: _Optional[_Union[Forwarded, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., planned: _Optional[_Union[Planned, _Mapping]] = ...) -> None: ...

class Planned(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Loaded(_message.Message):
    __slots__ = ("resident_bytes", "seconds", "fetched_bytes", "processor_seconds", "dropped")
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    resident_bytes: int
    seconds: float
    fetched_bytes: int
    processor_seconds: float
    dropped: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, resident_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., fetched_bytes: _Optional[int] = ..., processor_seconds: _Optional[float] = ..., dropped: _Optional[_Iterable[str]] = ...) -> None: ...

class Unloaded(_message.Message):
    __slots__ = ("freed_bytes", "seconds", "processor_seconds")
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    seconds: float
    processor_seconds: float
    def __init__(self, freed_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., processor_seconds: _Optional[float] = ...) -> None: ...

class Prefetched(_message.Message):
    __slots__ = ("fetched_bytes", "seconds", "dropped")
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    fetched_bytes: int
    seconds: float
    dropped: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, fetched_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., dropped: _Optional[_Iterable[str]] = ...) -> None: ...

class Executed(_message.Message):
    __slots__ = ("compute_seconds", "total_seconds", "output_bytes", "peak_bytes", "delivered", "result_frame", "sending_seconds", "batch", "task_seconds", "processor_seconds", "resident_bytes", "within")
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FRAME_FIELD_NUMBER: _ClassVar[int]
    SENDING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    TASK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    compute_seconds: float
    total_seconds: float
    output_bytes: int
    peak_bytes: int
    delivered: _containers.RepeatedScalarFieldContainer[int]
    result_frame: bytes
    sending_seconds: float
    batch: int
    task_seconds: float
    processor_seconds: float
    resident_bytes: int
    within: _containers.RepeatedCompositeFieldContainer[TimeWithin]
    def __init__(self, compute_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ..., output_bytes: _Optional[int] = ..., peak_bytes: _Optional[int] = ..., delivered: _Optional[_Iterable[int]] = ..., result_frame: _Optional[bytes] = ..., sending_seconds: _Optional[float] = ..., batch: _Optional[int] = ..., task_seconds: _Optional[float] = ..., processor_seconds: _Optional[float] = ..., resident_bytes: _Optional[int] = ..., within: _Optional[_Iterable[_Union[TimeWithin, _Mapping]]] = ...) -> None: ...

class Forwarded(_message.Message):
    __slots__ = ("sent_bytes", "seconds")
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    sent_bytes: int
    seconds: float
    def __init__(self, sent_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message", "need_bytes", "have_bytes", "seen")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    code: FailureCode
    message: str
    need_bytes: int
    have_bytes: int
    seen: _containers.RepeatedCompositeFieldContainer[TensorSizes]
    def __init__(self, code: _Optional[_Union[FailureCode, str]] = ..., message: _Optional[str] = ..., need_bytes: _Optional[int] = ..., have_bytes: _Optional[int] = ..., seen: _Optional[_Iterable[_Union[TensorSizes, _Mapping]]] = ...) -> None: ...

class TensorSizes(_message.Message):
    __slots__ = ("name", "sizes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    name: str
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("welcome", "load", "unload", "prefetch", "execute", "forward", "release", "cancel", "probe", "batch", "peer_lost", "plan", "neighbours")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    PEER_LOST_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOURS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    load: Load
    unload: Unload
    prefetch: Prefetch
    execute: Execute
    forward: Forward
    release: Release
    cancel: Cancel
    probe: Probe
    batch: CoordinatorBatch
    peer_lost: PeerLost
    plan: Plan
    neighbours: Neighbours
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., unload: _Optional[_Union[Unload, _Mapping]] = ..., prefetch: _Optional[_Union[Prefetch, _Mapping]] = ..., execute: _Optional[_Union[Execute, _Mapping]] = ..., forward: _Optional[_Union[Forward, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., batch: _Optional[_Union[CoordinatorBatch, _Mapping]] = ..., peer_lost: _Optional[_Union[PeerLost, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., neighbours: _Optional[_Union[Neighbours, _Mapping]] = ...) -> None: ...

class CoordinatorBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[CoordinatorMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[CoordinatorMessage, _Mapping]]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session", "telemetry_interval_seconds", "ticket_key")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TICKET_KEY_FIELD_NUMBER: _ClassVar[int]
    session: int
    telemetry_interval_seconds: float
    ticket_key: bytes
    def __init__(self, session: _Optional[int] = ..., telemetry_interval_seconds: _Optional[float] = ..., ticket_key: _Optional[bytes] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("instruction", "digest", "resident_bytes", "peers", "priority")
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    instruction: int
    digest: str
    resident_bytes: int
    peers: _containers.RepeatedScalarFieldContainer[str]
    priority: int
    def __init__(self, instruction: _Optional[int] = ..., digest: _Optional[str] = ..., resident_bytes: _Optional[int] = ..., peers: _Optional[_Iterable[str]] = ..., priority: _Optional[int] = ...) -> None: ...

class Unload(_message.Message):
    __slots__ = ("instruction", "digest")
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    instruction: int
    digest: str
    def __init__(self, instruction: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Prefetch(_message.Message):
    __slots__ = ("instruction", "digest", "peers")
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    instruction: int
    digest: str
    peers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, instruction: _Optional[int] = ..., digest: _Optional[str] = ..., peers: _Optional[_Iterable[str]] = ...) -> None: ...

class Execute(_message.Message):
    __slots__ = ("instruction", "task", "digest", "inputs", "routes", "results", "deadline_seconds", "lossy", "kept", "reply_bytes", "input_frame", "batch")
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    REPLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    INPUT_FRAME_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    instruction: int
    task: Task
    digest: str
    inputs: _containers.RepeatedCompositeFieldContainer[InputSource]
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    results: _containers.RepeatedScalarFieldContainer[str]
    deadline_seconds: float
    lossy: bool
    kept: _containers.RepeatedScalarFieldContainer[str]
    reply_bytes: int
    input_frame: bytes
    batch: int
    def __init__(self, instruction: _Optional[int] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., digest: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[InputSource, _Mapping]]] = ..., routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ..., results: _Optional[_Iterable[str]] = ..., deadline_seconds: _Optional[float] = ..., lossy: _Optional[bool] = ..., kept: _Optional[_Iterable[str]] = ..., reply_bytes: _Optional[int] = ..., input_frame: _Optional[bytes] = ..., batch: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("instruction", "job", "epoch", "ticket", "steps", "sends", "device", "address", "next_ticket")
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SENDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NEXT_TICKET_FIELD_NUMBER: _ClassVar[int]
    instruction: int
    job: str
    epoch: int
    ticket: bytes
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    sends: _containers.RepeatedScalarFieldContainer[str]
    device: str
    address: str
    next_ticket: bytes
    def __init__(self, instruction: _Optional[int] = ..., job: _Optional[str] = ..., epoch: _Optional[int] = ..., ticket: _Optional[bytes] = ..., steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., sends: _Optional[_Iterable[str]] = ..., device: _Optional[str] = ..., address: _Optional[str] = ..., next_ticket: _Optional[bytes] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("digest", "inputs")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    inputs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digest: _Optional[str] = ..., inputs: _Optional[_Iterable[str]] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("job", "epoch", "item", "stage")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    item: int
    stage: int
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., item: _Optional[int] = ..., stage: _Optional[int] = ...) -> None: ...

class InputSource(_message.Message):
    __slots__ = ("producer", "tensors")
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    producer: int
    tensors: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, producer: _Optional[int] = ..., tensors: _Optional[_Iterable[str]] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("consumer", "device", "address", "tensors", "ticket")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    consumer: int
    device: str
    address: str
    tensors: _containers.RepeatedScalarFieldContainer[str]
    ticket: bytes
    def __init__(self, consumer: _Optional[int] = ..., device: _Optional[str] = ..., address: _Optional[str] = ..., tensors: _Optional[_Iterable[str]] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class Forward(_message.Message):
    __slots__ = ("instruction", "task", "route", "lossy")
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    instruction: int
    task: Task
    route: Route
    lossy: bool
    def __init__(self, instruction: _Optional[int] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., route: _Optional[_Union[Route, _Mapping]] = ..., lossy: _Optional[bool] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("tasks",)
    TASKS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[Task]
    def __init__(self, tasks: _Optional[_Iterable[_Union[Task, _Mapping]]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("instruction", "job", "epoch")
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    instruction: int
    job: str
    epoch: int
    def __init__(self, instruction: _Optional[int] = ..., job: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Neighbours(_message.Message):
    __slots__ = ("devices",)
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[Neighbour]
    def __init__(self, devices: _Optional[_Iterable[_Union[Neighbour, _Mapping]]] = ...) -> None: ...

class Neighbour(_message.Message):
    __slots__ = ("device", "address")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    device: str
    address: str
    def __init__(self, device: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class PeerLost(_message.Message):
    __slots__ = ("device",)
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    device: str
    def __init__(self, device: _Optional[str] = ...) -> None: ...
