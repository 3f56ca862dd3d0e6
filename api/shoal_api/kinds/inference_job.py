"""InferenceJob: a bounded piece of work, with the semantics of `batch/v1` Job."""

from typing import Final

from shoal_api.conditions import JobWord
from shoal_api.fields import (
    COLUMNS,
    COUNT,
    MESSAGE,
    TIME,
    Condition,
    Reference,
    Resource,
    SecretReference,
    Status,
    aspects,
    measured,
    moment,
    optional,
    printed,
    records,
    reference,
    secret,
    uri,
)
from shoal_api.kinds.partition import OUTGROWN, SEEN, OutgrownFragment, SeenShape
from shoal_api.rules import Rule, ended, exactly_one, immutable, stays_true
from shoal_api.schema import Object, member, record
from shoal_api.shapes import Choice, Flag, Items, Text, Whole
from shoal_protocol.choices import LARGEST_BATCH, Mode, Objective, Policy, Precision

_FOR_THE_STORE: Final = (
    "A Secret with what the store asks for; its keys become the environment of the worker that "
    "transfers. Local mode reads its own environment instead."
)
MAX_RETRIED: Final = 1000
_FIXED: Final = (
    *("modelRef", "partitionRef", "placementRef", "poolRef", "inputs", "outputs"),
    *("mode", "policy", "objective", "transferPrecision", "batching", "backoffLimit"),
)
"""What a job is; the rest says when and how fast it runs, and may change, as in `batch/v1`."""


@record()
class Inputs:
    """What goes in."""

    uri: str = member(
        uri("pvc", "file", "https", "s3"),
        "A folder of .npz and .npy files, taken in the order of their names; a file holds one "
        "item, or items stacked along the first axis. A web address is one such file. A relative "
        "path is relative to the manifest.",
        example="pvc://lines/in",
    )
    secret_ref: SecretReference | None = secret(_FOR_THE_STORE, "line-store")
    follow: bool = member(
        Flag(),
        "true: files that come while the job runs are taken too, each once, until spec.end is "
        "true. A file is taken when its size and its time of change were the same in two scans, a "
        "second or more apart; a file that changes afterwards is not taken again. Not with a web "
        "address, and only with mode Streaming.",
        default=False,
        example=True,
    )


@record()
class Outputs:
    """What comes out."""

    uri: str = member(
        uri("pvc", "file", "https", "s3"),
        "The folder that results go to: one .npz per input file, of the same name. To a web "
        "address each is sent with PUT.",
        example="pvc://lines/out",
    )
    secret_ref: SecretReference | None = secret(_FOR_THE_STORE, "line-store")


@record()
class Batching:
    """Several items in one run of a fragment."""

    max_items: int = member(
        Whole(minimum=1, maximum=LARGEST_BATCH),
        "So many at once, at most; fewer where a device's memory holds fewer. No item waits for "
        "others to come.",
        example=8,
    )


@record()
class Retry:
    """A job that has failed runs once more. Results that exist stay; items that failed are tried
    again, and items that never ended run."""

    number: int = member(
        Whole(minimum=1, maximum=2**31 - 1),
        "Which retry it is. A failed job runs again when this is higher than status.retry.number; "
        "then it is Running, and ends again as Complete or Failed. A job that follows its inputs "
        "takes failed files again while it runs. Another job that runs, or one that is Complete, "
        "is not changed by it.",
        example=1,
    )
    items: tuple[int, ...] = member(
        Items(of=COUNT, max_items=MAX_RETRIED),
        "Of the failed items those that are tried again, by their index; empty: all. The others "
        "stay failed.",
        default=[],
        example=[17, 23],
    )


def _has_all_items_for_a_barrier(spec: "InferenceJobSpec") -> bool:
    return not spec.inputs.follow or spec.mode is Mode.STREAMING


@record(
    exactly_one("modelRef", "partitionRef", "placementRef"),
    exactly_one("poolRef", "placementRef"),
    Rule(
        "!self.inputs.follow || self.mode == 'Streaming'",
        "a job that follows its inputs needs mode Streaming: no stage ever has all items",
        field="mode",
        check=_has_all_items_for_a_barrier,
    ),
    *map(immutable, _FIXED),
    stays_true("end"),
)
class InferenceJobSpec:
    """What is to be run, where, and how.

    A Placement names its Partition and its DevicePool; a job that names a Model or a Partition
    names the DevicePool itself.
    """

    model_ref: Reference | None = reference(
        "The Model to run, cut as the planner decides.", "ppocr-rec"
    )
    partition_ref: Reference | None = reference("The Partition to run.", "ppocr-rec-3")
    placement_ref: Reference | None = reference("The Placement to run.", "ppocr-rec-shelf")
    pool_ref: Reference | None = reference(
        "The devices; not with placementRef, which has its own.", "shelf"
    )
    inputs: Inputs = member(Object(Inputs), "What goes in.")
    outputs: Outputs = member(Object(Outputs), "What comes out.")
    mode: Mode = member(
        Choice(Mode),
        "Streaming: an item moves on as soon as it can; Barrier: when all have ended the stage.",
        default="Streaming",
        example="Barrier",
    )
    policy: Policy = member(
        Choice(Policy),
        "How devices that suit a task equally well are ranked.",
        default="Mabac",
        example="LeastLoaded",
    )
    objective: Objective = member(
        Choice(Objective), "What the plan makes best.", default="Throughput", example="Makespan"
    )
    transfer_precision: Precision = member(
        Choice(Precision),
        "Exact: tensors travel bit for bit; Half: on a link that is measured to be slow, float32 "
        "may travel as float16, which keeps three decimal digits. What would pass its range stays "
        "exact.",
        default="Exact",
        example="Half",
    )
    batching: Batching | None = optional(
        Batching,
        "Items that wait on a device for one fragment run there at once, where the model computes "
        "each item by itself along an open first axis. Results may differ in the last digits from "
        "those of items that run alone; absent: each runs alone.",
    )
    priority: int = member(
        Whole(minimum=-1000, maximum=1000), "Jobs with more go first.", default=0, example=10
    )
    active_deadline_seconds: int | None = member(
        Whole(minimum=1, maximum=2**31 - 1),
        "After so long the job fails; absent: never.",
        unit="seconds",
        default=None,
        example=600,
    )
    backoff_limit: int = member(
        Whole(minimum=0, maximum=100), "Tries of an item beyond the first.", default=3, example=0
    )
    parallelism: int | None = member(
        Whole(minimum=1, maximum=1_000_000),
        "Items on their way at once, at most; absent: as many as keep the devices busy.",
        default=None,
        example=1,
    )
    suspend: bool = member(Flag(), "true: nothing new starts.", default=False, example=True)
    end: bool = member(
        Flag(),
        "true, of a job that follows its inputs: the files that are there now are the last, and "
        "the job is Complete when their items have ended. It is not taken back.",
        default=False,
        example=True,
    )
    ttl_seconds_after_finished: int | None = member(
        Whole(minimum=0, maximum=2**31 - 1),
        "So long after its end the job is deleted; absent: never.",
        unit="seconds",
        default=None,
        example=86400,
    )
    retry: Retry | None = optional(
        Retry,
        "Which items are tried once more when the job has failed; `kubectl shoal retry` writes it. "
        "Until a failed job is deleted, its inputs and results stay on the coordinator's volume "
        "for that.",
    )


@record()
class RetryStatus:
    """The newest retry that has begun."""

    number: int = member(COUNT, "The spec's retry.number that it was begun for.", example=1)
    time: str = member(TIME, "When it began.", example="2026-01-31T12:00:00Z")


@record()
class ItemCounts:
    """How far the job is."""

    total: int = member(COUNT, "All items.", example=400)
    active: int = member(COUNT, "Begun and not ended.", default=0, example=6)
    succeeded: int = member(COUNT, "With a result.", default=0, example=120)
    failed: int = member(COUNT, "Given up.", default=0, example=1)
    following: bool = member(
        Flag(), "More may come: the job follows its inputs.", default=False, example=False
    )


@record()
class TierHits:
    """Tasks by what their device had to do first."""

    resident: int = member(COUNT, "Nothing.", default=0, example=1190)
    cached: int = member(COUNT, "Load the fragment from its disk.", default=0, example=6)
    idle: int = member(COUNT, "Fetch it; nothing was resident.", default=0, example=3)
    evict: int = member(COUNT, "Make room first.", default=0, example=1)


@record()
class ItemFailure:
    """An item that failed."""

    item: int = member(COUNT, "Its index.", example=17)
    input: str | None = member(
        Text(max_length=1024),
        "Its file, and place in the file.",
        default=None,
        example="lines-001.npz[17]",
    )
    reason: str = member(MESSAGE, "Why.", example="input x has 2 axes, the model wants 4")


@record()
class Fallback:
    """How the job's own Partition was cut before, as in its spec."""

    seen: tuple[SeenShape, ...] = member(
        SEEN,
        "What that cut was for.",
        default=[],
        example=[{"tensor": "frames_out", "shape": [1, 256, 2260]}],
    )
    outgrown: tuple[OutgrownFragment, ...] = member(
        OUTGROWN, "What was divided.", default=[], example=[{"fragment": 0, "needBytes": 73400320}]
    )


@record()
class FinerCut:
    """The job's own Partition was cut again. A fragment, as measured, fitted on no device: cut for
    the sizes that items have shown, and where these are nothing new, with that fragment divided.
    Where that cannot be, and sizes follow from what inputs hold, the cut before runs once more. Or
    budgets became smaller, and the fragments had no place: cut for what devices have now."""

    cuts: int = member(COUNT, "Cuts so far, with the first one.", example=2)
    max_fragment_size_bytes: int = member(
        COUNT, "The fragments' size that it is cut for.", unit="bytes", example=67108864
    )
    seen: tuple[SeenShape, ...] = member(
        SEEN,
        "What the cut is for, as in the Partition's spec.seen.",
        default=[],
        example=[{"tensor": "frames_out", "shape": [1, 256, 2260]}],
    )
    outgrown: tuple[OutgrownFragment, ...] = member(
        OUTGROWN,
        "What was divided, one after the other, as in the Partition's spec.outgrown.",
        default=[],
        example=[{"fragment": 0, "needBytes": 73400320}],
    )
    fallback: Fallback | None = optional(
        Fallback,
        "The cut that runs once more if this one is not possible; absent: the job fails then.",
    )
    final: bool = member(
        Flag(),
        "true: the model cannot be cut finer. This cut, which has run before, runs once more, and "
        "each item that is too large fails by itself.",
        default=False,
        example=True,
    )
    message: str = member(
        MESSAGE,
        "What did not fit, and what is done about it.",
        example="fragment 0 of ocr needs 70 MiB; pi-4 has 64 MiB; now fragment 0 is divided",
    )


@record()
class InferenceJobColumns:
    """An InferenceJob in one line."""

    model: str | None = printed("The Model that runs.", "ppocr-rec")
    pool: str | None = printed("The DevicePool it runs on.", "shelf")
    items: str | None = printed("Succeeded of all; `+`: more may come.", "120/400")
    rate: str | None = printed("Items per second.", "38/s")
    status: JobWord | None = member(
        Choice(JobWord),
        "The conditions in one word; what has ended wins over what is active.",
        default=None,
        example="Running",
    )


@record()
class InferenceJobStatus(Status):
    """How the job goes; changes at most every two seconds."""

    conditions: tuple[Condition, ...] = aspects(
        "Planned, Suspended, Complete, Failed. Complete holds only if every item succeeded; when "
        "all have ended and some failed beyond their tries, Failed does (reason ItemsFailed), "
        "until the job is retried. "
        "WithinBudget is False for good once a device of its plan, or one that ran it, was over "
        "its budget in the run."
    )
    start_time: str | None = moment(
        "When the first task started. Unlike in batch/v1 it stays when the job is suspended and "
        "resumed, because counts and times add up over all runs of the job; "
        "activeDeadlineSeconds counts from the last resume, as in batch/v1, or the last retry.",
        "2026-01-31T12:00:00Z",
    )
    completion_time: str | None = moment(
        "When the job became Complete or Failed.", "2026-01-31T12:01:30Z"
    )
    items: ItemCounts | None = optional(ItemCounts, "How far it is.")
    items_per_second: float | None = measured("Since the start.", "items per second", 38.2)
    tier_hits: TierHits | None = optional(TierHits, "Tasks by what their device had to do first.")
    failures: tuple[ItemFailure, ...] = records(ItemFailure, 8, "The first eight.")
    finer_cut: FinerCut | None = optional(
        FinerCut, "The newest cut, where the first one did not do; absent: it did."
    )
    retry: RetryStatus | None = optional(
        RetryStatus, "The last retry; absent: it was never retried."
    )
    columns: InferenceJobColumns | None = optional(InferenceJobColumns, COLUMNS)


_ENDED: Final = (
    *("conditions", "startTime", "completionTime", "items", "itemsPerSecond", "tierHits"),
    *("failures", "finerCut", "retry"),
)


@record(ended(*_ENDED))
class InferenceJob(Resource):
    """A bounded piece of work: inputs through a model on a pool of devices into outputs."""

    spec: InferenceJobSpec = member(Object(InferenceJobSpec), "What is wanted.")
    status: InferenceJobStatus | None = optional(InferenceJobStatus, "What is.")
