"""A pool's coordinator: Deployment, Service, volume claim, service account, and a ConfigMap with
what it is told while it runs. Pure builders.

The claim belongs to the pool and to each job whose results lie on its volume, so Kubernetes deletes
it with the last of them: who deletes a pool by mistake makes it again, and its jobs resume. Nothing
waits for anything: a finalizer would keep pools and namespaces when the operator is gone.
"""

from collections.abc import Sequence
from typing import Final

from shoal_api.kinds import DevicePool, InferenceJob
from shoal_api.labels import COMPONENT, POOL, VIEWED_WITH
from shoal_api.writing import write
from shoal_operator.reconcile.decision import Manifest
from shoal_operator.reconcile.job_status import has_results_on_volume
from shoal_operator.reconcile.manifests import (
    GRPC_PORT,
    METRICS_PORT,
    TLS_ARGUMENTS,
    TLS_MOUNT,
    TMP_MOUNT,
    Json,
    container,
    labels_of,
    manifest,
    owner_reference,
    pod_template,
    scratch,
    served,
    tls_volume,
)
from shoal_operator.reconcile.names import (
    STORE,
    TEMPLATE,
    coordinator_name,
    coordinator_secret,
    fingerprint,
    uid_of,
    viewer_secret,
)
from shoal_operator.reconcile.settings import OperatorSettings
from shoal_operator.reconcile.volumes import Claim
from shoal_protocol.identities import OPERATOR

_TOLD: Final = "/etc/shoal/told"
"""The kubelet writes anew what is there when the ConfigMap changes."""
_SIZE: Final = "volume-size"
_SCRATCH_BYTES: Final = 64 << 20
GRACE_SECONDS: Final = 30


def coordinator_objects(
    pool: DevicePool,
    settings: OperatorSettings,
    claim: Claim | None,
    own_jobs: Sequence[InferenceJob] = (),
) -> tuple[Manifest, ...]:
    """Everything of the coordinator but its certificate."""
    name = coordinator_name(pool.metadata.name)
    # One that is being deleted is made anew when it is gone.
    leaves = claim is not None and claim.leaving
    return (
        service_account(pool, name, "coordinator"),
        *(() if leaves else (_claim(pool, name, claim, own_jobs),)),
        _told(pool, name, None if leaves else claim),
        _service(pool, name),
        _deployment(pool, name, settings),
    )


def service_account(pool: DevicePool, name: str, component: str) -> Manifest:
    """An account that may do nothing, so that pods are not the namespace's default one."""
    labels = labels_of(pool, component)
    return manifest(pool, "ServiceAccount", name, labels, automountServiceAccountToken=False)


def pool_selector(pool: DevicePool, component: str) -> dict[str, str]:
    """Selects a pool's pods of one component; never changed, because selectors cannot be."""
    return {POOL: pool.metadata.name, COMPONENT: component}


def _claim(
    pool: DevicePool, name: str, there: Claim | None, own_jobs: Sequence[InferenceJob]
) -> Manifest:
    """The claim. Of one that exists, the class stays, and the size does not shrink."""
    storage = pool.spec.coordinator.storage
    size = storage.size if there is None else max(storage.size, there.size)
    storage_class = storage.storage_class_name if there is None else there.storage_class
    spec: Json = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": _quantity(size)}},
    }
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    labels, owners = labels_of(pool, "coordinator"), _owners(pool, own_jobs)
    return manifest(pool, "PersistentVolumeClaim", name, labels, owners, spec=spec)


def _quantity(size: int) -> str:
    """As people read it in `kubectl get pvc`, where a unit says it exactly."""
    units = ((1 << 40, "Ti"), (1 << 30, "Gi"), (1 << 20, "Mi"))
    return next((f"{size // unit}{name}" for unit, name in units if size % unit == 0), str(size))


def _told(pool: DevicePool, name: str, claim: Claim | None) -> Manifest:
    """What the coordinator is told while it runs: how large its volume is, which its storage class
    may not enforce, and which may grow."""
    size = pool.spec.coordinator.storage.size if claim is None else claim.room_bytes
    labels = labels_of(pool, "coordinator")
    return manifest(pool, "ConfigMap", name, labels, data={_SIZE: str(size)})


def _owners(pool: DevicePool, own_jobs: Sequence[InferenceJob]) -> Json:
    """The jobs with results on the volume, beside the pool, as part of the claim's metadata."""
    jobs = sorted(filter(has_results_on_volume, own_jobs), key=uid_of)
    if not jobs:
        return {}
    owners = [owner_reference(job, controller=False) for job in jobs]
    return {"ownerReferences": [owner_reference(pool, controller=True), *owners]}


def _service(pool: DevicePool, name: str) -> Manifest:
    ports = (("grpc", GRPC_PORT), ("metrics", METRICS_PORT))
    spec = {
        "type": "ClusterIP",
        "selector": pool_selector(pool, "coordinator"),
        "ports": [
            {"name": port, "port": number, "targetPort": port, "protocol": "TCP"}
            for port, number in ports
        ],
    }
    annotations = {"annotations": {VIEWED_WITH: viewer_secret(pool.metadata.name)}}
    labels = labels_of(pool, "coordinator")
    return manifest(pool, "Service", name, labels, annotations, spec=spec)


def _deployment(pool: DevicePool, name: str, settings: OperatorSettings) -> Manifest:
    images, labels = settings.images, labels_of(pool, "coordinator")
    command = (
        *("python", "-m", "shoal_coordinator", "--listen", f"0.0.0.0:{GRPC_PORT}"),
        *("--store", STORE, "--state", f"{STORE}/state"),
        *("--store-size-file", f"{_TOLD}/{_SIZE}"),
        *("--metrics-address", f"0.0.0.0:{METRICS_PORT}"),
        *("--client", OPERATOR, "--log-level", "info"),
        *TLS_ARGUMENTS,
    )
    coordinator = container(
        "coordinator",
        images.coordinator,
        images,
        command,
        settings.coordinator_memory,
        volumeMounts=[
            TMP_MOUNT,
            TLS_MOUNT,
            {"name": "store", "mountPath": STORE},
            {"name": "told", "mountPath": _TOLD, "readOnly": True},
        ],
        **served("grpc", GRPC_PORT),
    )
    volumes: list[Json] = [
        scratch(_SCRATCH_BYTES),
        tls_volume(coordinator_secret(pool.metadata.name)),
        {"name": "store", "persistentVolumeClaim": {"claimName": name}},
        {"name": "told", "configMap": {"name": name}},
    ]
    template = pod_template(
        {**settings.coordinator_labels, **labels},
        images,
        [coordinator],
        volumes,
        serviceAccountName=name,
        terminationGracePeriodSeconds=GRACE_SECONDS,
        **write(settings.coordinator_place),
    )
    spec = {
        "replicas": 1,
        # Two coordinators must not write on one volume.
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": pool_selector(pool, "coordinator")},
        "template": template,
    }
    annotations = {"annotations": {TEMPLATE: fingerprint([template])}}
    return manifest(pool, "Deployment", name, labels, annotations, spec=spec)


def coordinator_mark(pool: DevicePool, settings: OperatorSettings) -> str:
    """The mark of the template that the coordinator's pod is to have."""
    made = _deployment(pool, coordinator_name(pool.metadata.name), settings)
    metadata = made["metadata"]
    assert isinstance(metadata, dict), "made just before"
    return str(metadata["annotations"][TEMPLATE])
