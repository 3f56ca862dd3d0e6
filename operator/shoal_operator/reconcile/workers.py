"""The workers: `batch/v1` Jobs of one pod each, which handle all data from outside. Pure.

A worker's name says what it is given, so an edit of that makes another worker. A worker that
refuses its input ends with status 2 and is not tried again; one whose node goes away is, at no cost
of its tries; one that fails otherwise is tried a few times, later and later.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shoal_api.fields import SecretReference
from shoal_api.kinds import AnyKind, InferenceJob, Model, Partition
from shoal_api.kinds.inference_job import Inputs, Outputs
from shoal_api.labels import POOL
from shoal_api.writing import write
from shoal_operator.reconcile.addresses import claim_of, outside
from shoal_operator.reconcile.decision import Manifest, ObjectKey
from shoal_operator.reconcile.manifests import (
    GRPC_PORT,
    TLS_ARGUMENTS,
    TLS_MOUNT,
    TMP_MOUNT,
    Json,
    child_key,
    container,
    labels_of,
    manifest,
    pod_template,
    scratch,
    tls_volume,
)
from shoal_operator.reconcile.names import (
    child_name,
    coordinator_host,
    fingerprint,
    job_folder,
    job_id,
    namespace_of,
    retries,
    worker_secret,
)
from shoal_operator.reconcile.settings import OperatorSettings
from shoal_operator.reconcile.snapshot import Worker
from shoal_operator.reconcile.times import seconds_since

REFUSED_STATUS: Final = 2
NO_ROOM_STATUS: Final = 4
"""Of a worker for whose files the coordinator's volume has no room now."""
NO_ROOM_SECONDS: Final = 60.0
"""For so long after that a delivery is not tried again."""
TRIES_BEYOND_THE_FIRST: Final = 4
DEADLINE_SECONDS: Final = 6 * 3600
"""A bound for what hangs; also for a pod that waits for a volume."""
RECORD_SECONDS: Final = 7 * 86_400
"""How long an ended worker stays whose end is a record: what it refused is not tried again."""
FINISHED_SECONDS: Final = 300
"""How long one stays that worked for a coordinator: to do that once more does no harm."""
RETRY_SECONDS: Final = 600.0
"""After so long, a worker that failed without refusing its input is created again."""
BY_SHOAL: Final = "shoal: "
"""Before the title of an error; the lines that follow say what is wrong."""
_CUTS: Final = re.compile(r"-cut-[0-9a-f]{8}$")
_DELIVERS: Final = re.compile(r"-deliver-[0-9a-f]{8}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker does: its command, the address that it opens, the Secret for that, the pool
    whose coordinator it talks to. `fetches`: it stores what it opens on its own disk;
    `writes`: it puts something there. `endless`: it works until it is removed.
    """

    name: str
    component: str
    command: tuple[str, ...]
    uri: str
    secret: str | None = None
    pool: str | None = None
    fetches: bool = False
    writes: bool = False
    endless: bool = False


def worker_key(owner: AnyKind, name: str) -> ObjectKey:
    """Where a worker is, to remove it."""
    return child_key(owner, "Job", name)


def worker_job(owner: AnyKind, worker_spec: WorkerSpec, settings: OperatorSettings) -> Manifest:
    labels = labels_of(owner, worker_spec.component)
    if worker_spec.pool is not None:
        labels[POOL] = worker_spec.pool
    # One that follows waits for room by itself.
    final = [REFUSED_STATUS] if worker_spec.endless else [REFUSED_STATUS, NO_ROOM_STATUS]
    refused = {"containerName": "worker", "operator": "In", "values": final}
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    deadline = {} if worker_spec.endless else {"activeDeadlineSeconds": DEADLINE_SECONDS}
    spec = {
        "backoffLimit": TRIES_BEYOND_THE_FIRST,
        **deadline,
        "ttlSecondsAfterFinished": RECORD_SECONDS if worker_spec.pool is None else FINISHED_SECONDS,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [disrupted]},
                {"action": "FailJob", "onExitCodes": refused},
            ]
        },
        "template": _template(worker_spec, labels, settings),
    }
    return manifest(owner, "Job", worker_spec.name, labels, spec=spec)


def _template(worker_spec: WorkerSpec, labels: dict[str, str], settings: OperatorSettings) -> Json:
    command = [*worker_spec.command]
    mounts: list[Mapping[str, object]] = [TMP_MOUNT]
    volumes = [scratch(settings.worker_disk)]
    if (claim := claim_of(worker_spec.uri)) is not None:
        command += ["--volume", f"{claim}=/volumes/{claim}"]
        # A volume that is only read keeps its group; one that is written gets ours.
        only = {} if worker_spec.writes else {"readOnly": True}
        mounts.append({"name": "claim-0", "mountPath": f"/volumes/{claim}", **only})
        volumes.append({"name": "claim-0", "persistentVolumeClaim": {"claimName": claim, **only}})
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
    images, memory = settings.images, settings.worker_memory
    worker = container(
        "worker", images.worker, images, command, memory, volumeMounts=mounts, **more
    )
    return pod_template(
        {**settings.worker_labels, **labels},
        images,
        [worker],
        volumes,
        restartPolicy="Never",
        **write(settings.worker_place),
    )


# ---- how far a worker is -------------------------------------------------------------------------


def worker_named(workers: Iterable[Worker], name: str) -> Worker | None:
    """The worker of that name; None if it does not exist."""
    return next((worker for worker in workers if worker.name == name), None)


def worker_text(worker: Worker, otherwise: str) -> str:
    """What a worker or the scheduler said last, else what can be said without them."""
    title, _, rest = worker.message.removeprefix(BY_SHOAL).partition("\n")
    if rest and worker.message.startswith(BY_SHOAL):
        title = f"{title}:"
    message = " ".join(f"{title} {rest}".split())
    return message or f"{otherwise} (worker {worker.name})"


def retry_in(worker: Worker, now: str) -> float:
    """In how many seconds a worker that failed is made again; 0: now."""
    if worker.ended_at is None:
        return RETRY_SECONDS
    return max(0.0, RETRY_SECONDS - seconds_since(worker.ended_at, now))


# ---- the specs of workers ------------------------------------------------------------------------


def given_digest(model: Model) -> str | None:
    """What the file must be: what the user says, else what it was when it was first seen."""
    if model.spec.source.digest is not None:
        return model.spec.source.digest
    return None if model.status is None else model.status.digest


def shape_arguments(model: Model) -> list[str]:
    """The shapes of inputs with dynamic axes."""
    shapes = ((each.input, ",".join(map(str, each.shape))) for each in model.spec.shapes)
    return [text for name, sizes in shapes for text in ("--shape", f"{name}={sizes}")]


def inspect_worker(model: Model) -> WorkerSpec:
    """Fetch, verify and profile a model."""
    digest = given_digest(model)
    options = [] if digest is None else ["--digest", digest]
    options += shape_arguments(model)
    command = ("inspect", model.spec.source.uri, *options, "--json")
    return _on_model(model, model, "inspect", options, command)


def cut_worker(partition: Partition, model: Model, arguments: Sequence[str]) -> WorkerSpec:
    """Cut a model and describe the fragments; `arguments` say how."""
    command = ("partition", model.spec.source.uri, *arguments, "--document")
    return _on_model(partition, model, "cut", arguments, command)


def table_worker(partition: Partition, model: Model, arguments: Sequence[str]) -> WorkerSpec:
    """Say of every fragment that could be what it would need, for a Placement to choose from."""
    command = ("inspect", model.spec.source.uri, *arguments, "--table")
    return _on_model(partition, model, "table", arguments, command)


def deliver_worker(
    partition: Partition, model: Model, arguments: Sequence[str], pool: str, earlier: int = 0
) -> WorkerSpec:
    """Cut a model as it was cut, into a pool's store; many jobs share one. What `earlier` ones have
    delivered, the store has lost."""
    target = coordinator_address(pool, namespace_of(partition))
    command = ("partition", model.spec.source.uri, *arguments, "--to", target)
    options = [*arguments, f"after {earlier}"] if earlier else arguments
    return _on_model(partition, model, "deliver", options, command, pool)


def _on_model(
    owner: Model | Partition,
    model: Model,
    component: str,
    options: Sequence[str],
    command: Sequence[str],
    pool: str | None = None,
) -> WorkerSpec:
    """A worker that opens a model; named after pool, address, Secret and options."""
    source, secret = model.spec.source, _name(model.spec.source.secret_ref)
    place = [] if pool is None else [pool]
    mark = fingerprint([*place, source.uri, secret or "", *options])
    return WorkerSpec(
        name=child_name(owner.metadata.name, f"{component}-{mark}"),
        component=component,
        command=("shoal", *command),
        uri=source.uri,
        secret=secret,
        pool=pool,
        fetches=outside(source.uri),
    )


def delivers(name: str) -> bool:
    """Whether a Partition's worker of that name is one of `deliver_worker`."""
    return _DELIVERS.search(name) is not None


def cuts(name: str) -> bool:
    """Whether a Partition's worker of that name is one of `cut_worker`."""
    return _CUTS.search(name) is not None


def input_transfer_worker(job: InferenceJob, pool: str) -> WorkerSpec:
    """Transfer a job's inputs to the coordinator's volume."""
    given = job.spec.inputs
    new = ("--new",) if given.follow else ()
    ways = (given.uri, _volume(job, pool, "in"), *new)
    return _transfer(job, pool, "transfer-inputs", given, ways)


def input_follower(job: InferenceJob, pool: str) -> WorkerSpec:
    """Transfer inputs as they come."""
    given = job.spec.inputs
    ways = (given.uri, _volume(job, pool, "in"), "--follow")
    return _transfer(job, pool, "follow-inputs", given, ways)


def result_follower(job: InferenceJob, pool: str) -> WorkerSpec:
    """Transfer results as they are made; a retry may make one again."""
    given = job.spec.outputs
    ways = (_volume(job, pool, "out"), given.uri, "--follow", "--changed")
    return _transfer(job, pool, "follow-results", given, ways)


def result_transfer_worker(job: InferenceJob, pool: str) -> WorkerSpec:
    """Transfer a job's results to where the user wants them."""
    given = job.spec.outputs
    new = ("--new", "--changed") if job.spec.inputs.follow else ()
    ways = (_volume(job, pool, "out"), given.uri, *new)
    worker = _transfer(job, pool, "transfer-results", given, ways)
    if not (number := retries(job)):
        return worker
    # Each retry transfers anew.
    return replace(worker, name=child_name(job_id(job), f"{worker.component}-{number}"))


def _volume(job: InferenceJob, pool: str, folder: str) -> str:
    """A job's folder on the coordinator's volume."""
    address = coordinator_address(pool, namespace_of(job))
    return f"coordinator://{address}/{job_folder(job, folder)}"


def _transfer(
    job: InferenceJob, pool: str, component: str, place: Inputs | Outputs, ways: tuple[str, ...]
) -> WorkerSpec:
    return WorkerSpec(
        name=child_name(job_id(job), component),
        component=component,
        command=("shoal", "copy", *ways),
        uri=place.uri,
        secret=_name(place.secret_ref),
        pool=pool,
        writes=place is job.spec.outputs,
        endless="--follow" in ways,
    )


def coordinator_address(pool: str, namespace: str) -> str:
    """HOST:PORT of a pool's coordinator."""
    return f"{coordinator_host(pool, namespace)}:{GRPC_PORT}"


def _name(reference: SecretReference | None) -> str | None:
    return None if reference is None else reference.name
