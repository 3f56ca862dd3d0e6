"""What a reconciler decides: the status, the children, Events, and calls of the coordinator.

The controller carries a decision out in this order: status first (so that a status never lags
behind what is done), then certificates, children, Devices, budgets, resizes, removals, coordinator
calls, Events, and last the object's own deletion.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal_api.fields import Status
from shoal_api.kinds.device import DeviceStatus

Manifest = Mapping[str, object]
"""A Kubernetes object as JSON: apiVersion, kind, metadata, spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectKey:
    """One object of the cluster. `api_version` as in a manifest: `batch/v1`, `v1`."""

    api_version: str
    kind: str
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Note:
    """An Event on the object itself. `warning`: of type Warning instead of Normal.

    A state is in each decision as long as it lasts, and posted when it begins. An occurrence is
    posted once: `since` says when it was, or which, and so sets it apart from the same occurrence
    later.
    """

    reason: str
    message: str
    warning: bool = False
    since: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChild:
    """A Device object with its status, both written by the operator only, and Events on it."""

    device: Manifest
    status: DeviceStatus
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Another memory limit for a container of a pod that runs, which goes on running."""

    pod: str
    uid: str
    container: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TellBudget:
    """Another budget for the agent of a pod that runs, which goes on running. `version` is that of
    the pod that was read: what somebody has told it meanwhile may be newer."""

    pod: str
    uid: str
    version: str
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What of a job may change while it runs; 0 where there is no bound. `end`: it follows its
    inputs, and those that it has are the last."""

    priority: int = 0
    parallelism: int = 0
    active_deadline_seconds: float = 0.0
    end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitJob:
    """Have the pool's coordinator run a job, or continue it with another plan or other terms.

    `job` is the coordinator's name for it (`names.job_id`); `partition` the document as it was cut;
    `stages`: per fragment the devices that serve it, best first, and in `granted_bytes` what each
    grants it (0: all that it needs), in `predicted_seconds` how long a task of it takes there, as
    far as that is predicted; `plan` the epoch of the Placement.
    `mode` and `policy` are words of `shoal_protocol.choices`; `lossy` permits float16 on the way,
    `batch` items may run at once.
    Inputs and results are in the job's own folders on the coordinator's volume. `retry` is which
    retry of the job it is, `retried_items` the failed items that are tried again (none: all).
    `final_cut`: the model can be cut no finer, so an item that takes too much fails by itself.
    """

    pool: str
    job: str
    partition: bytes
    stages: tuple[tuple[str, ...], ...]
    granted_bytes: tuple[tuple[int, ...], ...]
    plan: int
    mode: str
    policy: str
    backoff_limit: int
    terms: Terms
    lossy: bool = False
    batch: int = 0
    follow: bool = False
    predicted_seconds: tuple[tuple[float, ...], ...] = ()
    retry: int = 0
    retried_items: tuple[int, ...] = ()
    final_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelJob:
    """Have the coordinator stop a job; what it has finished stays, so that it can continue."""

    pool: str
    job: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveJob:
    """Have the coordinator forget a job that has ended or was cancelled, with its files."""

    pool: str
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceFragments:
    """Have the devices of a plan fetch fragments, and load them where there is room, before there
    is a job; without stages: no more. It is a lease, to be renewed. `placement` is the Placement's
    name; the rest is as in `SubmitJob`.
    """

    pool: str
    placement: str
    partition: bytes
    stages: tuple[tuple[str, ...], ...] = ()
    granted_bytes: tuple[tuple[int, ...], ...] = ()


CoordinatorCall = SubmitJob | CancelJob | RemoveJob | PlaceFragments


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to be done about one object; carrying it out twice is carrying it out once.

    `children` are applied server-side with the object as their controlling owner, except for those
    that name another owner themselves (`metadata.ownerReferences`); what is no child any more is in
    `removals`, which are deleted (with their pods). A cluster may not be able to do `resizes`: that
    is no fault of the object: `Applied.not_resized` says it. `certificates` are Secrets that the
    controller makes once and renews, because keys come from chance. `requeue_seconds`: reconcile
    again then, even if nothing happens; None: an event will come. `delete_self`: it has served
    its time.
    """

    status: Status
    children: tuple[Manifest, ...] = ()
    devices: tuple[DeviceChild, ...] = ()
    budgets: tuple[TellBudget, ...] = ()
    resizes: tuple[Resize, ...] = ()
    removals: tuple[ObjectKey, ...] = ()
    calls: tuple[CoordinatorCall, ...] = ()
    notes: tuple[Note, ...] = ()
    certificates: tuple["CertificateWanted", ...] = ()
    requeue_seconds: float | None = None
    delete_self: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateWanted:
    """A Secret with `tls.crt`, `tls.key` and `ca.crt`, owned by the object, renewed in time.

    `authority` names the Secret of the authority that signs it, in the same namespace; None: it is
    an authority itself. `common_name` is the identity, `hosts` the DNS names.
    """

    secret: str
    authority: str | None
    common_name: str
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What came of carrying a decision out: of which generation of the object it was, what the
    cluster refused of it and will refuse again, in words, and why it last did not resize a pod. A
    cluster may raise limits and lower none, so the latter is of this generation too.
    """

    generation: int
    refused: tuple[str, ...] = ()
    not_resized: str = ""
