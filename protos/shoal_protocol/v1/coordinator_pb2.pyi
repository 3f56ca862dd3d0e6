from shoal_protocol.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STREAMING: _ClassVar[Mode]
    BARRIER: _ClassVar[Mode]

class Policy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FIFO: _ClassVar[Policy]
    LEAST_LOADED: _ClassVar[Policy]
    EDAS: _ClassVar[Policy]
    ARAS: _ClassVar[Policy]
    MABAC: _ClassVar[Policy]
STREAMING: Mode
BARRIER: Mode
FIFO: Policy
LEAST_LOADED: Policy
EDAS: Policy
ARAS: Policy
MABAC: Policy

class InferRequest(_message.Message):
    __slots__ = ("start", "frame")
    START_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    start: SubmitJobRequest
    frame: bytes
    def __init__(self, start: _Optional[_Union[SubmitJobRequest, _Mapping]] = ..., frame: _Optional[bytes] = ...) -> None: ...

class InferAnswer(_message.Message):
    __slots__ = ("started", "frame", "failure")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    started: str
    frame: bytes
    failure: InferFailure
    def __init__(self, started: _Optional[str] = ..., frame: _Optional[bytes] = ..., failure: _Optional[_Union[InferFailure, _Mapping]] = ...) -> None: ...

class InferFailure(_message.Message):
    __slots__ = ("item", "kind", "message", "need_bytes", "have_bytes", "device")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    item: int
    kind: str
    message: str
    need_bytes: int
    have_bytes: int
    device: str
    def __init__(self, item: _Optional[int] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ..., need_bytes: _Optional[int] = ..., have_bytes: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class SubmitJobRequest(_message.Message):
    __slots__ = ("name", "partition", "stages", "epoch", "inputs_uri", "outputs_uri", "mode", "policy", "priority", "backoff_limit", "active_deadline_seconds", "lossy", "parallelism", "explanation", "batch", "final_cut", "follow", "end", "retry")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INPUTS_URI_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_URI_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_LIMIT_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    PARALLELISM_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    FINAL_CUT_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    name: str
    partition: bytes
    stages: _containers.RepeatedCompositeFieldContainer[StagePlacement]
    epoch: int
    inputs_uri: str
    outputs_uri: str
    mode: Mode
    policy: Policy
    priority: int
    backoff_limit: int
    active_deadline_seconds: float
    lossy: bool
    parallelism: int
    explanation: _containers.RepeatedScalarFieldContainer[str]
    batch: int
    final_cut: bool
    follow: bool
    end: bool
    retry: Retry
    def __init__(self, name: _Optional[str] = ..., partition: _Optional[bytes] = ..., stages: _Optional[_Iterable[_Union[StagePlacement, _Mapping]]] = ..., epoch: _Optional[int] = ..., inputs_uri: _Optional[str] = ..., outputs_uri: _Optional[str] = ..., mode: _Optional[_Union[Mode, str]] = ..., policy: _Optional[_Union[Policy, str]] = ..., priority: _Optional[int] = ..., backoff_limit: _Optional[int] = ..., active_deadline_seconds: _Optional[float] = ..., lossy: _Optional[bool] = ..., parallelism: _Optional[int] = ..., explanation: _Optional[_Iterable[str]] = ..., batch: _Optional[int] = ..., final_cut: _Optional[bool] = ..., follow: _Optional[bool] = ..., end: _Optional[bool] = ..., retry: _Optional[_Union[Retry, _Mapping]] = ...) -> None: ...

class Retry(_message.Message):
    __slots__ = ("number", "items")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    number: int
    items: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., items: _Optional[_Iterable[int]] = ...) -> None: ...

class StagePlacement(_message.Message):
    __slots__ = ("devices", "granted_bytes", "predicted_seconds")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    GRANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedScalarFieldContainer[str]
    granted_bytes: _containers.RepeatedScalarFieldContainer[int]
    predicted_seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, devices: _Optional[_Iterable[str]] = ..., granted_bytes: _Optional[_Iterable[int]] = ..., predicted_seconds: _Optional[_Iterable[float]] = ...) -> None: ...

class WatchJobRequest(_message.Message):
    __slots__ = ("name", "interval_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    interval_seconds: float
    def __init__(self, name: _Optional[str] = ..., interval_seconds: _Optional[float] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EndJobRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RetryJobRequest(_message.Message):
    __slots__ = ("name", "items")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    items: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., items: _Optional[_Iterable[int]] = ...) -> None: ...

class ListItemsRequest(_message.Message):
    __slots__ = ("name", "states")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    name: str
    states: _containers.RepeatedScalarFieldContainer[JobItem.State]
    def __init__(self, name: _Optional[str] = ..., states: _Optional[_Iterable[_Union[JobItem.State, str]]] = ...) -> None: ...

class ItemPage(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[JobItem]
    def __init__(self, items: _Optional[_Iterable[_Union[JobItem, _Mapping]]] = ...) -> None: ...

class JobItem(_message.Message):
    __slots__ = ("item", "input", "state", "reason", "tries", "device")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WAITING: _ClassVar[JobItem.State]
        ACTIVE: _ClassVar[JobItem.State]
        SUCCEEDED: _ClassVar[JobItem.State]
        FAILED: _ClassVar[JobItem.State]
    WAITING: JobItem.State
    ACTIVE: JobItem.State
    SUCCEEDED: JobItem.State
    FAILED: JobItem.State
    ITEM_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRIES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    item: int
    input: str
    state: JobItem.State
    reason: str
    tries: int
    device: str
    def __init__(self, item: _Optional[int] = ..., input: _Optional[str] = ..., state: _Optional[_Union[JobItem.State, str]] = ..., reason: _Optional[str] = ..., tries: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class PlaceFragmentsRequest(_message.Message):
    __slots__ = ("name", "partition", "stages")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    partition: bytes
    stages: _containers.RepeatedCompositeFieldContainer[StagePlacement]
    def __init__(self, name: _Optional[str] = ..., partition: _Optional[bytes] = ..., stages: _Optional[_Iterable[_Union[StagePlacement, _Mapping]]] = ...) -> None: ...

class PlacedFragments(_message.Message):
    __slots__ = ("fragments", "problem")
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    fragments: _containers.RepeatedCompositeFieldContainer[PlacedFragment]
    problem: str
    def __init__(self, fragments: _Optional[_Iterable[_Union[PlacedFragment, _Mapping]]] = ..., problem: _Optional[str] = ...) -> None: ...

class PlacedFragment(_message.Message):
    __slots__ = ("fragment", "device", "state")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ABSENT: _ClassVar[PlacedFragment.State]
        CACHED: _ClassVar[PlacedFragment.State]
        RESIDENT: _ClassVar[PlacedFragment.State]
    ABSENT: PlacedFragment.State
    CACHED: PlacedFragment.State
    RESIDENT: PlacedFragment.State
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    device: str
    state: PlacedFragment.State
    def __init__(self, fragment: _Optional[int] = ..., device: _Optional[str] = ..., state: _Optional[_Union[PlacedFragment.State, str]] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveJobRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListFragmentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListFragmentsResponse(_message.Message):
    __slots__ = ("digests", "unused", "free_bytes", "removable_bytes", "size_bytes", "unsubmitted")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    UNUSED_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REMOVABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNSUBMITTED_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    unused: _containers.RepeatedScalarFieldContainer[int]
    free_bytes: int
    removable_bytes: int
    size_bytes: int
    unsubmitted: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digests: _Optional[_Iterable[str]] = ..., unused: _Optional[_Iterable[int]] = ..., free_bytes: _Optional[int] = ..., removable_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., unsubmitted: _Optional[_Iterable[str]] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("name", "state", "message", "items", "active", "succeeded", "failed", "resumed", "seconds", "items_per_second", "latency", "stages", "tier_hits", "failures", "epoch", "retries", "reason", "plan", "terms", "completing", "started_seconds", "retry", "following", "outgrown", "seen", "final_cut")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PENDING: _ClassVar[JobStatus.State]
        RUNNING: _ClassVar[JobStatus.State]
        COMPLETE: _ClassVar[JobStatus.State]
        FAILED: _ClassVar[JobStatus.State]
        CANCELLED: _ClassVar[JobStatus.State]
    PENDING: JobStatus.State
    RUNNING: JobStatus.State
    COMPLETE: JobStatus.State
    FAILED: JobStatus.State
    CANCELLED: JobStatus.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    TIER_HITS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    COMPLETING_FIELD_NUMBER: _ClassVar[int]
    STARTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    OUTGROWN_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    FINAL_CUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: JobStatus.State
    message: str
    items: int
    active: int
    succeeded: int
    failed: int
    resumed: int
    seconds: float
    items_per_second: float
    latency: Latency
    stages: _containers.RepeatedCompositeFieldContainer[StageStatus]
    tier_hits: TierHits
    failures: _containers.RepeatedCompositeFieldContainer[ItemFailure]
    epoch: int
    retries: int
    reason: str
    plan: int
    terms: Terms
    completing: bool
    started_seconds: float
    retry: int
    following: bool
    outgrown: _containers.RepeatedCompositeFieldContainer[OutgrownFragment]
    seen: _containers.RepeatedCompositeFieldContainer[_session_pb2.TensorSizes]
    final_cut: bool
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[JobStatus.State, str]] = ..., message: _Optional[str] = ..., items: _Optional[int] = ..., active: _Optional[int] = ..., succeeded: _Optional[int] = ..., failed: _Optional[int] = ..., resumed: _Optional[int] = ..., seconds: _Optional[float] = ..., items_per_second: _Optional[float] = ..., latency: _Optional[_Union[Latency, _Mapping]] = ..., stages: _Optional[_Iterable[_Union[StageStatus, _Mapping]]] = ..., tier_hits: _Optional[_Union[TierHits, _Mapping]] = ..., failures: _Optional[_Iterable[_Union[ItemFailure, _Mapping]]] = ..., epoch: _Optional[int] = ..., retries: _Optional[int] = ..., reason: _Optional[str] = ..., plan: _Optional[int] = ..., terms: _Optional[_Union[Terms, _Mapping]] = ..., completing: _Optional[bool] = ..., started_seconds: _Optional[float] = ..., retry: _Optional[int] = ..., following: _Optional[bool] = ..., outgrown: _Optional[_Iterable[_Union[OutgrownFragment, _Mapping]]] = ..., seen: _Optional[_Iterable[_Union[_session_pb2.TensorSizes, _Mapping]]] = ..., final_cut: _Optional[bool] = ...) -> None: ...

class OutgrownFragment(_message.Message):
    __slots__ = ("fragment", "need_bytes")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    NEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    need_bytes: int
    def __init__(self, fragment: _Optional[int] = ..., need_bytes: _Optional[int] = ...) -> None: ...

class Terms(_message.Message):
    __slots__ = ("priority", "parallelism", "active_deadline_seconds", "end")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PARALLELISM_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    priority: int
    parallelism: int
    active_deadline_seconds: float
    end: bool
    def __init__(self, priority: _Optional[int] = ..., parallelism: _Optional[int] = ..., active_deadline_seconds: _Optional[float] = ..., end: _Optional[bool] = ...) -> None: ...

class Latency(_message.Message):
    __slots__ = ("p50_seconds", "p90_seconds", "p99_seconds", "maximum_seconds")
    P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    P90_SECONDS_FIELD_NUMBER: _ClassVar[int]
    P99_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAXIMUM_SECONDS_FIELD_NUMBER: _ClassVar[int]
    p50_seconds: float
    p90_seconds: float
    p99_seconds: float
    maximum_seconds: float
    def __init__(self, p50_seconds: _Optional[float] = ..., p90_seconds: _Optional[float] = ..., p99_seconds: _Optional[float] = ..., maximum_seconds: _Optional[float] = ...) -> None: ...

class StageStatus(_message.Message):
    __slots__ = ("index", "ready", "running", "finished", "compute_seconds", "devices", "times")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    index: int
    ready: int
    running: int
    finished: int
    compute_seconds: float
    devices: _containers.RepeatedScalarFieldContainer[str]
    times: _containers.RepeatedCompositeFieldContainer[TaskTime]
    def __init__(self, index: _Optional[int] = ..., ready: _Optional[int] = ..., running: _Optional[int] = ..., finished: _Optional[int] = ..., compute_seconds: _Optional[float] = ..., devices: _Optional[_Iterable[str]] = ..., times: _Optional[_Iterable[_Union[TaskTime, _Mapping]]] = ...) -> None: ...

class TaskTime(_message.Message):
    __slots__ = ("device", "measured_seconds", "predicted_seconds")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEASURED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    device: str
    measured_seconds: float
    predicted_seconds: float
    def __init__(self, device: _Optional[str] = ..., measured_seconds: _Optional[float] = ..., predicted_seconds: _Optional[float] = ...) -> None: ...

class TierHits(_message.Message):
    __slots__ = ("resident", "cached", "idle", "evict")
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    resident: int
    cached: int
    idle: int
    evict: int
    def __init__(self, resident: _Optional[int] = ..., cached: _Optional[int] = ..., idle: _Optional[int] = ..., evict: _Optional[int] = ...) -> None: ...

class ItemFailure(_message.Message):
    __slots__ = ("item", "input", "reason")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    item: int
    input: str
    reason: str
    def __init__(self, item: _Optional[int] = ..., input: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ListDevicesRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: str
    def __init__(self, after: _Optional[str] = ...) -> None: ...

class ListDevicesResponse(_message.Message):
    __slots__ = ("devices", "more")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[DeviceStatus]
    more: bool
    def __init__(self, devices: _Optional[_Iterable[_Union[DeviceStatus, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...

class DeviceStatus(_message.Message):
    __slots__ = ("name", "state", "architecture", "budget_bytes", "floor_bytes", "resident_bytes", "used_bytes", "peak_bytes", "resident", "cached_fragments", "cached_bytes", "loads", "evictions", "tier_hits", "tasks", "sent_bytes", "received_bytes", "fetched_bytes", "silent_seconds", "queued", "budget_excess", "speed", "link_bytes_per_second", "round_trip_seconds", "links", "transfer_seconds_per_byte", "handling_seconds", "times", "cache_bytes", "loading_seconds", "has_left")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        READY: _ClassVar[DeviceStatus.State]
        SILENT: _ClassVar[DeviceStatus.State]
        DRAINING: _ClassVar[DeviceStatus.State]
        LOST: _ClassVar[DeviceStatus.State]
    READY: DeviceStatus.State
    SILENT: DeviceStatus.State
    DRAINING: DeviceStatus.State
    LOST: DeviceStatus.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    CACHED_FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    TIER_HITS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_EXCESS_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
    HANDLING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HAS_LEFT_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: DeviceStatus.State
    architecture: str
    budget_bytes: int
    floor_bytes: int
    resident_bytes: int
    used_bytes: int
    peak_bytes: int
    resident: _containers.RepeatedScalarFieldContainer[str]
    cached_fragments: int
    cached_bytes: int
    loads: int
    evictions: int
    tier_hits: TierHits
    tasks: int
    sent_bytes: int
    received_bytes: int
    fetched_bytes: int
    silent_seconds: float
    queued: int
    budget_excess: BudgetExcess
    speed: _session_pb2.Speed
    link_bytes_per_second: float
    round_trip_seconds: float
    links: _containers.RepeatedCompositeFieldContainer[_session_pb2.PeerLink]
    transfer_seconds_per_byte: float
    handling_seconds: float
    times: _containers.RepeatedCompositeFieldContainer[FragmentTime]
    cache_bytes: int
    loading_seconds: float
    has_left: bool
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[DeviceStatus.State, str]] = ..., architecture: _Optional[str] = ..., budget_bytes: _Optional[int] = ..., floor_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., peak_bytes: _Optional[int] = ..., resident: _Optional[_Iterable[str]] = ..., cached_fragments: _Optional[int] = ..., cached_bytes: _Optional[int] = ..., loads: _Optional[int] = ..., evictions: _Optional[int] = ..., tier_hits: _Optional[_Union[TierHits, _Mapping]] = ..., tasks: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., silent_seconds: _Optional[float] = ..., queued: _Optional[int] = ..., budget_excess: _Optional[_Union[BudgetExcess, _Mapping]] = ..., speed: _Optional[_Union[_session_pb2.Speed, _Mapping]] = ..., link_bytes_per_second: _Optional[float] = ..., round_trip_seconds: _Optional[float] = ..., links: _Optional[_Iterable[_Union[_session_pb2.PeerLink, _Mapping]]] = ..., transfer_seconds_per_byte: _Optional[float] = ..., handling_seconds: _Optional[float] = ..., times: _Optional[_Iterable[_Union[FragmentTime, _Mapping]]] = ..., cache_bytes: _Optional[int] = ..., loading_seconds: _Optional[float] = ..., has_left: _Optional[bool] = ...) -> None: ...

class FragmentTime(_message.Message):
    __slots__ = ("digest", "seconds", "load_seconds", "cached", "within")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    digest: str
    seconds: float
    load_seconds: float
    cached: bool
    within: _containers.RepeatedCompositeFieldContainer[_session_pb2.TimeWithin]
    def __init__(self, digest: _Optional[str] = ..., seconds: _Optional[float] = ..., load_seconds: _Optional[float] = ..., cached: _Optional[bool] = ..., within: _Optional[_Iterable[_Union[_session_pb2.TimeWithin, _Mapping]]] = ...) -> None: ...

class BudgetExcess(_message.Message):
    __slots__ = ("peak_bytes", "budget_bytes", "seconds")
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    peak_bytes: int
    budget_bytes: int
    seconds: float
    def __init__(self, peak_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class GetOverviewRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class Overview(_message.Message):
    __slots__ = ("time_seconds", "devices", "jobs", "omitted_devices", "omitted_jobs", "relayed_bytes")
    TIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    OMITTED_DEVICES_FIELD_NUMBER: _ClassVar[int]
    OMITTED_JOBS_FIELD_NUMBER: _ClassVar[int]
    RELAYED_BYTES_FIELD_NUMBER: _ClassVar[int]
    time_seconds: float
    devices: _containers.RepeatedCompositeFieldContainer[DeviceOverview]
    jobs: _containers.RepeatedCompositeFieldContainer[JobOverview]
    omitted_devices: int
    omitted_jobs: int
    relayed_bytes: int
    def __init__(self, time_seconds: _Optional[float] = ..., devices: _Optional[_Iterable[_Union[DeviceOverview, _Mapping]]] = ..., jobs: _Optional[_Iterable[_Union[JobOverview, _Mapping]]] = ..., omitted_devices: _Optional[int] = ..., omitted_jobs: _Optional[int] = ..., relayed_bytes: _Optional[int] = ...) -> None: ...

class DeviceOverview(_message.Message):
    __slots__ = ("status", "fragments", "cpu_fraction", "memory_available_bytes", "temperature_celsius", "battery_fraction", "round_trip_seconds", "version", "address", "relayed_to")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    CPU_FRACTION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_CELSIUS_FIELD_NUMBER: _ClassVar[int]
    BATTERY_FRACTION_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RELAYED_TO_FIELD_NUMBER: _ClassVar[int]
    status: DeviceStatus
    fragments: _containers.RepeatedCompositeFieldContainer[HeldFragment]
    cpu_fraction: float
    memory_available_bytes: int
    temperature_celsius: float
    battery_fraction: float
    round_trip_seconds: float
    version: str
    address: str
    relayed_to: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, status: _Optional[_Union[DeviceStatus, _Mapping]] = ..., fragments: _Optional[_Iterable[_Union[HeldFragment, _Mapping]]] = ..., cpu_fraction: _Optional[float] = ..., memory_available_bytes: _Optional[int] = ..., temperature_celsius: _Optional[float] = ..., battery_fraction: _Optional[float] = ..., round_trip_seconds: _Optional[float] = ..., version: _Optional[str] = ..., address: _Optional[str] = ..., relayed_to: _Optional[_Iterable[str]] = ...) -> None: ...

class HeldFragment(_message.Message):
    __slots__ = ("digest", "state", "bytes", "granted_bytes", "loading_seconds", "tasks", "failures", "failure", "retry_seconds")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ABSENT: _ClassVar[HeldFragment.State]
        RESIDENT: _ClassVar[HeldFragment.State]
        LOADING: _ClassVar[HeldFragment.State]
        UNLOADING: _ClassVar[HeldFragment.State]
    ABSENT: HeldFragment.State
    RESIDENT: HeldFragment.State
    LOADING: HeldFragment.State
    UNLOADING: HeldFragment.State
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    GRANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    RETRY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    state: HeldFragment.State
    bytes: int
    granted_bytes: int
    loading_seconds: float
    tasks: int
    failures: int
    failure: str
    retry_seconds: float
    def __init__(self, digest: _Optional[str] = ..., state: _Optional[_Union[HeldFragment.State, str]] = ..., bytes: _Optional[int] = ..., granted_bytes: _Optional[int] = ..., loading_seconds: _Optional[float] = ..., tasks: _Optional[int] = ..., failures: _Optional[int] = ..., failure: _Optional[str] = ..., retry_seconds: _Optional[float] = ...) -> None: ...

class JobOverview(_message.Message):
    __slots__ = ("status", "stages", "stages_omitted", "window", "slowest", "oldest", "explanation")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    STAGES_OMITTED_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    status: JobStatus
    stages: _containers.RepeatedCompositeFieldContainer[StageOverview]
    stages_omitted: bool
    window: int
    slowest: _containers.RepeatedCompositeFieldContainer[ItemTiming]
    oldest: _containers.RepeatedCompositeFieldContainer[ItemTiming]
    explanation: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, status: _Optional[_Union[JobStatus, _Mapping]] = ..., stages: _Optional[_Iterable[_Union[StageOverview, _Mapping]]] = ..., stages_omitted: _Optional[bool] = ..., window: _Optional[int] = ..., slowest: _Optional[_Iterable[_Union[ItemTiming, _Mapping]]] = ..., oldest: _Optional[_Iterable[_Union[ItemTiming, _Mapping]]] = ..., explanation: _Optional[_Iterable[str]] = ...) -> None: ...

class StageOverview(_message.Message):
    __slots__ = ("status", "digest", "resident_bytes", "least_bytes", "output_bytes", "planned", "granted_bytes", "loading", "starving_seconds", "candidates")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEAST_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    STARVING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    status: StageStatus
    digest: str
    resident_bytes: int
    least_bytes: int
    output_bytes: int
    planned: _containers.RepeatedScalarFieldContainer[str]
    granted_bytes: _containers.RepeatedScalarFieldContainer[int]
    loading: _containers.RepeatedScalarFieldContainer[str]
    starving_seconds: float
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    def __init__(self, status: _Optional[_Union[StageStatus, _Mapping]] = ..., digest: _Optional[str] = ..., resident_bytes: _Optional[int] = ..., least_bytes: _Optional[int] = ..., output_bytes: _Optional[int] = ..., planned: _Optional[_Iterable[str]] = ..., granted_bytes: _Optional[_Iterable[int]] = ..., loading: _Optional[_Iterable[str]] = ..., starving_seconds: _Optional[float] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("device", "need_bytes", "have_bytes", "free_bytes", "reason")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    device: str
    need_bytes: int
    have_bytes: int
    free_bytes: int
    reason: str
    def __init__(self, device: _Optional[str] = ..., need_bytes: _Optional[int] = ..., have_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ItemTiming(_message.Message):
    __slots__ = ("item", "input", "seconds", "retries", "tasks")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    item: int
    input: str
    seconds: float
    retries: int
    tasks: _containers.RepeatedCompositeFieldContainer[TaskTiming]
    def __init__(self, item: _Optional[int] = ..., input: _Optional[str] = ..., seconds: _Optional[float] = ..., retries: _Optional[int] = ..., tasks: _Optional[_Iterable[_Union[TaskTiming, _Mapping]]] = ...) -> None: ...

class TaskTiming(_message.Message):
    __slots__ = ("stage", "device", "ready_seconds", "given_seconds", "ended_seconds", "compute_seconds")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    READY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    stage: int
    device: str
    ready_seconds: float
    given_seconds: float
    ended_seconds: float
    compute_seconds: float
    def __init__(self, stage: _Optional[int] = ..., device: _Optional[str] = ..., ready_seconds: _Optional[float] = ..., given_seconds: _Optional[float] = ..., ended_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ...) -> None: ...

class ExportTracesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExportedTraces(_message.Message):
    __slots__ = ("delivered", "lost")
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    delivered: int
    lost: int
    def __init__(self, delivered: _Optional[int] = ..., lost: _Optional[int] = ...) -> None: ...

class GetTimelineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("began_seconds", "column_seconds", "devices")
    BEGAN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COLUMN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    began_seconds: float
    column_seconds: float
    devices: _containers.RepeatedCompositeFieldContainer[DeviceTimeline]
    def __init__(self, began_seconds: _Optional[float] = ..., column_seconds: _Optional[float] = ..., devices: _Optional[_Iterable[_Union[DeviceTimeline, _Mapping]]] = ...) -> None: ...

class DeviceTimeline(_message.Message):
    __slots__ = ("name", "busy_seconds", "computing_seconds", "loading_seconds", "sending_seconds", "memory_bytes", "sent_bytes", "received_bytes", "fetched_bytes", "changes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOADING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SENDING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    busy_seconds: _containers.RepeatedScalarFieldContainer[float]
    computing_seconds: _containers.RepeatedScalarFieldContainer[float]
    loading_seconds: _containers.RepeatedScalarFieldContainer[float]
    sending_seconds: _containers.RepeatedScalarFieldContainer[float]
    memory_bytes: _containers.RepeatedScalarFieldContainer[int]
    sent_bytes: _containers.RepeatedScalarFieldContainer[float]
    received_bytes: _containers.RepeatedScalarFieldContainer[float]
    fetched_bytes: _containers.RepeatedScalarFieldContainer[float]
    changes: _containers.RepeatedCompositeFieldContainer[SessionChange]
    def __init__(self, name: _Optional[str] = ..., busy_seconds: _Optional[_Iterable[float]] = ..., computing_seconds: _Optional[_Iterable[float]] = ..., loading_seconds: _Optional[_Iterable[float]] = ..., sending_seconds: _Optional[_Iterable[float]] = ..., memory_bytes: _Optional[_Iterable[int]] = ..., sent_bytes: _Optional[_Iterable[float]] = ..., received_bytes: _Optional[_Iterable[float]] = ..., fetched_bytes: _Optional[_Iterable[float]] = ..., changes: _Optional[_Iterable[_Union[SessionChange, _Mapping]]] = ...) -> None: ...

class SessionChange(_message.Message):
    __slots__ = ("seconds", "joined", "reason")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    joined: bool
    reason: str
    def __init__(self, seconds: _Optional[float] = ..., joined: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...
