"""The workers: `batch/v1` Jobs of one pod each, which handle all data from outside. Pure builders.

A worker's name says what it is given, so an edit of that makes another worker. A worker that
refuses its input ends with status 2 and is not tried again; one whose node goes away is, at no cost
of its tries; one that fails otherwise is tried a few times, later and later.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal_api.fields import Reference
from shoal_api.kinds import AnyKind, InferenceJob, Model, Partition
from shoal_api.kinds.inference_job import Inputs, Outputs
from shoal_operator.reconcile.addresses import claim_of, outside
from shoal_operator.reconcile.decision import Manifest, ObjectKey
from shoal_operator.reconcile.names import (
    child_name,
    coordinator_host,
    fingerprint,
    job_id,
    namespace_of,
    worker_secret,
)
from shoal_operator.reconcile.pods import (
    GRPC_PORT,
    TLS_ARGUMENTS,
    TLS_MOUNT,
    TMP_MOUNT,
    Json,
    container,
    labels_of,
    metadata_of,
    pod,
    scratch,
    tls_volume,
)
from shoal_operator.reconcile.settings import OperatorSettings

REFUSED_STATUS: Final = 2
TRIES_BEYOND_THE_FIRST: Final = 4
DEADLINE_SECONDS: Final = 6 * 3600
"""A bound for what hangs; also for a pod that waits for a volume."""
RECORD_SECONDS: Final = 7 * 86_400
"""How long an ended worker stays whose end is a record: what it refused is not tried again."""
FINISHED_SECONDS: Final = 300
"""How long the others stay: to transfer or deliver once more does no harm."""
_DELIVERS: Final = re.compile(r"-deliver-[0-9a-f]{8}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker does: its command, the addresses that it opens, the Secret for them, the pool
    whose coordinator it talks to. `fetches`: what it opens comes to lie on its own disk;
    `writes`: it puts something there. `ttl_seconds`: how long it stays after its end.
    """

    name: str
    component: str
    command: tuple[str, ...]
    uris: tuple[str, ...]
    secret: str | None = None
    pool: str | None = None
    fetches: bool = False
    writes: bool = False
    ttl_seconds: int = RECORD_SECONDS


def worker_key(namespace: str, name: str) -> ObjectKey:
    """Where a worker is, to remove it."""
    return ObjectKey(api_version="batch/v1", kind="Job", namespace=namespace, name=name)


def worker_job(owner: AnyKind, worker_spec: WorkerSpec, settings: OperatorSettings) -> Manifest:
    """The `batch/v1` Job of a worker."""
    labels = labels_of(owner, worker_spec.component)
    if worker_spec.pool is not None:
        labels["shoal.dev/pool"] = worker_spec.pool
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata_of(owner, worker_spec.name, labels),
        "spec": {
            "backoffLimit": TRIES_BEYOND_THE_FIRST,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "ttlSecondsAfterFinished": worker_spec.ttl_seconds,
            "podFailurePolicy": {"rules": _failure_rules()},
            "template": {"metadata": {"labels": labels}, "spec": _pod(worker_spec, settings)},
        },
    }


def _failure_rules() -> list[Json]:
    refused: Json = {
        "containerName": "worker",
        "operator": "In",
        "values": [REFUSED_STATUS],
    }
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    return [
        {"action": "Ignore", "onPodConditions": [disrupted]},
        {"action": "FailJob", "onExitCodes": refused},
    ]


def _pod(worker_spec: WorkerSpec, settings: OperatorSettings) -> Json:
    claims = sorted({claim for uri in worker_spec.uris if (claim := claim_of(uri)) is not None})
    names = {claim: f"claim-{place}" for place, claim in enumerate(claims)}
    command = [*worker_spec.command]
    mounts: list[Mapping[str, object]] = [TMP_MOUNT]
    volumes = [scratch(settings.worker_disk)]
    for claim in claims:
        command += ["--volume", f"{claim}=/volumes/{claim}"]
        # What is only read is not handed to our group either, as what is written is.
        only = {} if worker_spec.writes else {"readOnly": True}
        mounts.append({"name": names[claim], "mountPath": f"/volumes/{claim}", **only})
        of = {"claimName": claim, **only}
        volumes.append({"name": names[claim], "persistentVolumeClaim": of})
    if worker_spec.fetches:
        # Half, because what is cut lies there twice.
        command += ["--max-download", str(settings.worker_disk // 2)]
    if worker_spec.pool is not None:
        command += TLS_ARGUMENTS
        mounts.append(TLS_MOUNT)
        volumes.append(tls_volume(worker_secret(worker_spec.pool)))
    more: Json = {"env": [{"name": "HOME", "value": "/tmp"}]}  # noqa: S108 - a volume of its own
    if worker_spec.secret is not None:
        more["envFrom"] = [{"secretRef": {"name": worker_spec.secret}}]
    worker = container(
        "worker",
        settings.images.worker,
        settings.images,
        command,
        settings.worker_memory,
        volumeMounts=mounts,
    )
    place = settings.worker_place.fields()
    return pod(settings.images, [{**worker, **more}], volumes, restartPolicy="Never", **place)


# ---- the specs of workers ------------------------------------------------------------------------


def given_digest(model: Model) -> str | None:
    """What the file must be: what the user says, else what it was when it was first seen."""
    if model.spec.source.digest is not None:
        return model.spec.source.digest
    return None if model.status is None else model.status.digest


def inspect_worker(model: Model) -> WorkerSpec:
    """Fetch, verify and profile a model; named after address, Secret, digest and shapes."""
    source, digest = model.spec.source, given_digest(model)
    options = ["--digest", digest] if digest is not None else []
    options += shape_arguments(model)
    return WorkerSpec(
        name=child_name(model.metadata.name, f"inspect-{fingerprint([*_source(model), *options])}"),
        component="inspect",
        command=("shoal", "inspect", source.uri, *options, "--json"),
        uris=(source.uri,),
        secret=_name(model.spec.source.secret_ref),
        fetches=outside(source.uri),
    )


def shape_arguments(model: Model) -> list[str]:
    """The shapes of inputs with dynamic axes."""
    shapes = ((each.input, ",".join(map(str, each.shape))) for each in model.spec.shapes)
    return [text for name, sizes in shapes for text in ("--shape", f"{name}={sizes}")]


def cut_worker(partition: Partition, model: Model, arguments: Sequence[str]) -> WorkerSpec:
    """Cut a model and describe the fragments; `arguments` say how."""
    mark = fingerprint([*_source(model), *arguments])
    return WorkerSpec(
        name=child_name(partition.metadata.name, f"cut-{mark}"),
        component="cut",
        command=("shoal", "partition", model.spec.source.uri, *arguments, "--document"),
        uris=(model.spec.source.uri,),
        secret=_name(model.spec.source.secret_ref),
        fetches=outside(model.spec.source.uri),
    )


def deliver_worker(
    partition: Partition, model: Model, arguments: Sequence[str], pool: str
) -> WorkerSpec:
    """Cut a model as it was cut, into a pool's store; many jobs share one."""
    mark = fingerprint([pool, *_source(model), *arguments])
    target = coordinator_address(pool, namespace_of(partition))
    return WorkerSpec(
        name=child_name(partition.metadata.name, f"deliver-{mark}"),
        component="deliver",
        command=("shoal", "partition", model.spec.source.uri, *arguments, "--to", target),
        uris=(model.spec.source.uri,),
        secret=_name(model.spec.source.secret_ref),
        fetches=outside(model.spec.source.uri),
        pool=pool,
        ttl_seconds=FINISHED_SECONDS,
    )


def delivers(name: str) -> bool:
    """Whether a Partition's worker of that name is one of `deliver_worker`."""
    return _DELIVERS.search(name) is not None


def input_transfer_worker(job: InferenceJob, pool: str) -> WorkerSpec:
    """Transfer a job's inputs to the coordinator's volume."""
    given = job.spec.inputs
    target = f"coordinator://{coordinator_address(pool, namespace_of(job))}/jobs/{job_id(job)}/in"
    return _transfer(job, pool, "transfer-inputs", given, (given.uri, target))


def result_transfer_worker(job: InferenceJob, pool: str) -> WorkerSpec:
    """Transfer a job's results to where the user wants them."""
    given = job.spec.outputs
    source = f"coordinator://{coordinator_address(pool, namespace_of(job))}/jobs/{job_id(job)}/out"
    return _transfer(job, pool, "transfer-results", given, (source, given.uri))


def _transfer(
    job: InferenceJob, pool: str, component: str, place: Inputs | Outputs, ways: tuple[str, str]
) -> WorkerSpec:
    return WorkerSpec(
        name=child_name(job_id(job), component),
        component=component,
        command=("shoal", "copy", *ways),
        uris=(place.uri,),
        secret=_name(place.secret_ref),
        pool=pool,
        writes=place is job.spec.outputs,
        ttl_seconds=FINISHED_SECONDS,
    )


def coordinator_address(pool: str, namespace: str) -> str:
    """HOST:PORT of a pool's coordinator."""
    return f"{coordinator_host(pool, namespace)}:{GRPC_PORT}"


def _name(reference: Reference | None) -> str | None:
    return None if reference is None else reference.name


def _source(model: Model) -> list[str]:
    return [model.spec.source.uri, _name(model.spec.source.secret_ref) or ""]
