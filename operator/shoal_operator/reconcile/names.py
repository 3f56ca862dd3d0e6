"""What the objects are called that the operator makes: deterministic, and never too long. Pure.

A name is `BASE-SUFFIX`. Where that would be longer than 63 characters, or BASE has letters that a
label may not have (a node's name has dots), BASE is shortened and a digest of it keeps it apart
from others.

An InferenceJob that names a Model gets a Partition of its own, and one without a Placement gets a
Placement of its own; both are called as the job is.
"""

import hashlib
import json
import re
from collections.abc import Container, Sequence
from functools import partial
from typing import Final

from shoal_api.kinds import AnyKind, InferenceJob, Partition, Placement

MAX_NAME: Final = 63
_MAX_SUFFIX: Final = 40
OWNER_UID: Final = "shoal.dev/owner-uid"
AGENT: Final = "agent"
"""The name of an agent's container."""
AGENTS: Final = "shoal.dev/agents"
"""Label of an agent's pod: the DaemonSet that it is of."""
TEMPLATE: Final = "shoal.dev/template"
"""Annotation of a set of agents: which template its pods were given, whatever the budget."""
BUDGET: Final = "shoal.dev/budget"
"""Annotation of an agent's pod: the budget that it is to have, in bytes, which it reads while it
runs; and of a set of agents: that of its template."""
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGER: Final = "shoal-operator"
"""Who makes and applies what is ours: as a label, and as the manager of fields."""
ENROLMENT_AUDIENCE: Final = "shoal.dev/enrolment"
"""Whom an agent's token is good for."""

STORE: Final = "/var/lib/shoal"
"""Where a coordinator's volume is in its container."""
_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


def child_name(base: str, suffix: str) -> str:
    """`BASE-SUFFIX` as a DNS label of at most 63 characters."""
    name = f"{base}-{suffix}"
    if len(name) <= MAX_NAME and _LABEL.fullmatch(name):
        return name
    tail = f"{fingerprint([base, suffix])}-{_as_label(suffix)[-_MAX_SUFFIX:].strip('-')}"
    return f"{_as_label(base)[: MAX_NAME - len(tail) - 1].rstrip('-')}-{tail}".lstrip("-")


def _as_label(text: str) -> str:
    return re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")


def fingerprint(value: Sequence[object]) -> str:
    """Eight hexadecimal digits that say which value (of JSON) it is."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def coordinator_name(pool: str) -> str:
    """Deployment, Service, claim, ConfigMap, service account and common name of a coordinator. What
    a Service is called begins with a letter, which the names of pools need not."""
    base = f"pool-{fingerprint([pool])}-{pool}" if pool[:1].isdigit() else pool
    return child_name(base, "coordinator")


agent_name = partial(child_name, suffix="agent")
"""Service account of a pool's agents, and their DaemonSet where all nodes have one budget."""
trust_name = partial(child_name, suffix="trust")
"""ConfigMap of a pool with the authority of Enrol, in `ca.crt`."""
authority_secret = partial(child_name, suffix="ca")
"""Secret of a pool's own authority."""
coordinator_secret = partial(child_name, suffix="coordinator-tls")
"""Secret of the certificate of a pool's coordinator."""
worker_secret = partial(child_name, suffix="worker-tls")
"""Secret of the certificate of a pool's workers."""
viewer_secret = partial(child_name, suffix="viewer-tls")
"""Secret of the certificate that people look at a pool's coordinator with."""
document_name = partial(child_name, suffix="partition")
"""ConfigMap with a Partition's document."""
table_name = partial(child_name, suffix="cuts")
"""ConfigMap with the table of a Partition whose cuts are planned."""


def uid_of(value: AnyKind) -> str:
    """An object's uid; objects that are not in a cluster have none."""
    return value.metadata.uid or ""


def namespace_of(value: AnyKind) -> str:
    return value.metadata.namespace or "default"


def job_id(job: InferenceJob) -> str:
    """What the coordinator calls a job."""
    return run_id(job.metadata.name, uid_of(job))


def job_folder(job: InferenceJob, folder: str) -> str:
    """Where a job's inputs (`in`) or results (`out`) are on the coordinator's volume."""
    return f"jobs/{job_id(job)}/{folder}"


def run_id(name: str, uid: str) -> str:
    """What the coordinator calls the job of this name: that, and the first eight digits of the uid,
    which tell it from one of the same name that was before."""
    return f"{name}-{uid[:8]}"


def retries(job: InferenceJob) -> int:
    """Which retry of a job was begun last; 0: none."""
    return 0 if job.status is None or job.status.retry is None else job.status.retry.number


def coordinator_host(pool: str, namespace: str) -> str:
    """The host in the coordinator's certificate."""
    return f"{coordinator_name(pool)}.{namespace}.svc"


def agents_name(pool: str, node: str) -> str:
    """DaemonSet of one node's agent, where each has a budget of its own."""
    return child_name(pool, f"agent-{_of_node(node)}")


def distinct_agents_name(pool: str, node: str = "") -> str:
    """One where another pool has a DaemonSet of the plain name, as `lab` with a node `agent-pi`
    and `lab-agent` with `pi` do. Without a node: the DaemonSet of all nodes."""
    suffix = f"agent-{_of_node(node)}" if node else "agent"
    return child_name(pool, f"{suffix}-{fingerprint([pool, node])}")


def device_object_name(pool: str, device: str) -> str:
    """A Device's own name. Two pools of a namespace may share a node, so the pool is part of it."""
    return child_name(pool, _of_node(device))


def distinct_device_name(pool: str, device: str) -> str:
    """One where another pool has a Device of the plain name, as `lab` with `edge-pi-4` and
    `lab-edge` with `pi-4` do."""
    return child_name(pool, f"{_of_node(device)}-{fingerprint([pool, device])}")


def chosen_name(plain: str, distinct: str, own: Container[str], taken: Container[str]) -> str:
    """What a pool's object is called: as it is already, else plainly, unless that of another pool
    is called so."""
    return plain if plain in own or not (distinct in own or plain in taken) else distinct


def _of_node(name: str) -> str:
    """A node's name as part of another; names with dots stay apart from those with dashes."""
    return name if _LABEL.fullmatch(name) else f"{_as_label(name)[:40]}-{fingerprint([name])}"


# ---- what an InferenceJob refers to --------------------------------------------------------------


def placement_of(job: InferenceJob) -> str:
    reference = job.spec.placement_ref
    return job.metadata.name if reference is None else reference.name


def partition_of(job: InferenceJob, placement: Placement | None) -> str | None:
    """The name of the job's Partition; None while that is not known."""
    if job.spec.placement_ref is not None:
        return None if placement is None else placement.spec.partition_ref.name
    return job.metadata.name if job.spec.partition_ref is None else job.spec.partition_ref.name


def model_of(job: InferenceJob, partition: Partition | None) -> str | None:
    """The name of the job's Model; None while that is not known."""
    if job.spec.model_ref is not None:
        return job.spec.model_ref.name
    return None if partition is None else partition.spec.model_ref.name


def pool_of(job: InferenceJob, placement: Placement | None) -> str | None:
    """The name of the job's DevicePool; None while that is not known."""
    if job.spec.pool_ref is not None:
        return job.spec.pool_ref.name
    return None if placement is None else placement.spec.pool_ref.name
