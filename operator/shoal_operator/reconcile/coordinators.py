"""A pool's coordinator: Deployment, Service, volume claim, service account. Pure builders.

The claim belongs to the pool and to each job whose results lie on its volume, so Kubernetes deletes
it with the last of them: who deletes a pool by mistake makes it again, and its jobs resume. Nothing
waits for anything: a finalizer would keep pools and namespaces when the operator is gone.
"""

from collections.abc import Sequence
from typing import Final

from shoal_api.kinds import DevicePool, InferenceJob
from shoal_api.schema import API_VERSION
from shoal_operator.reconcile.decision import Manifest
from shoal_operator.reconcile.job_status import has_results_on_volume
from shoal_operator.reconcile.names import (
    COMPONENT,
    POOL,
    coordinator_name,
    coordinator_secret,
    uid_of,
)
from shoal_operator.reconcile.pods import (
    GRPC_PORT,
    METRICS_PORT,
    TLS_ARGUMENTS,
    TLS_MOUNT,
    TMP_MOUNT,
    Json,
    container,
    labels_of,
    metadata_of,
    pod,
    probe,
    scratch,
    startup_probe,
    tls_volume,
)
from shoal_operator.reconcile.settings import OperatorSettings
from shoal_operator.reconcile.snapshot import Claim
from shoal_protocol.identities import OPERATOR

_STORE: Final = "/var/lib/shoal"
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
    labels = labels_of(pool, "coordinator", pool=pool.metadata.name)
    return (
        service_account(pool, name, labels),
        _claim(pool, name, labels, claim, own_jobs),
        _service(pool, name, labels),
        _deployment(pool, name, labels, settings),
    )


def service_account(pool: DevicePool, name: str, labels: dict[str, str]) -> Manifest:
    """An account that may do nothing: it keeps pods from being the namespace's default one."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata_of(pool, name, labels),
        "automountServiceAccountToken": False,
    }


def pool_selector(pool: DevicePool, component: str) -> dict[str, str]:
    """What tells a pool's pods of one kind from all others; never changed, as selectors cannot."""
    return {POOL: pool.metadata.name, COMPONENT: component}


def _claim(
    pool: DevicePool,
    name: str,
    labels: dict[str, str],
    there: Claim | None,
    own_jobs: Sequence[InferenceJob],
) -> Manifest:
    """The claim. Of one that is there, the class stays, and the size does not shrink."""
    storage = pool.spec.coordinator.storage
    size = storage.size if there is None else max(storage.size, there.size)
    storage_class = storage.storage_class_name if there is None else there.storage_class
    spec: Json = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": str(size)}},
    }
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata_of(pool, name, labels, **_owners(pool, own_jobs)),
        "spec": spec,
    }


def _owners(pool: DevicePool, own_jobs: Sequence[InferenceJob]) -> Json:
    """The jobs with results on the volume, beside the pool, as part of the claim's metadata."""
    jobs = sorted(filter(has_results_on_volume, own_jobs), key=uid_of)
    if not jobs:
        return {}
    owners: list[DevicePool | InferenceJob] = [pool, *jobs]
    return {
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": type(owner).__name__,
                "name": owner.metadata.name,
                "uid": uid_of(owner),
                "controller": owner is pool,
            }
            for owner in owners
        ]
    }


def _service(pool: DevicePool, name: str, labels: dict[str, str]) -> Manifest:
    ports = (("grpc", GRPC_PORT), ("metrics", METRICS_PORT))
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata_of(pool, name, labels),
        "spec": {
            "type": "ClusterIP",
            "selector": pool_selector(pool, "coordinator"),
            "ports": [
                {"name": port, "port": number, "targetPort": port, "protocol": "TCP"}
                for port, number in ports
            ],
        },
    }


def _deployment(
    pool: DevicePool, name: str, labels: dict[str, str], settings: OperatorSettings
) -> Manifest:
    command = (
        *("python", "-m", "shoal_coordinator", "--listen", f"0.0.0.0:{GRPC_PORT}"),
        *("--store", _STORE, "--state", f"{_STORE}/state"),
        *("--metrics-address", f"0.0.0.0:{METRICS_PORT}"),
        *("--client", OPERATOR, "--log-level", "info"),
        *TLS_ARGUMENTS,
    )
    store = {"name": "store", "mountPath": _STORE}
    coordinator = container(
        "coordinator",
        settings.images.coordinator,
        settings.images,
        command,
        settings.coordinator_memory,
        ports=[
            {"name": "grpc", "containerPort": GRPC_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"},
        ],
        startupProbe=startup_probe(),
        livenessProbe=probe("/healthz", periodSeconds=10, failureThreshold=6),
        readinessProbe=probe("/readyz", periodSeconds=5, failureThreshold=2),
        volumeMounts=[TMP_MOUNT, TLS_MOUNT, store],
    )
    volumes: list[Json] = [
        scratch(_SCRATCH_BYTES),
        tls_volume(coordinator_secret(pool.metadata.name)),
        {"name": "store", "persistentVolumeClaim": {"claimName": name}},
    ]
    spec = pod(
        settings.images,
        [coordinator],
        volumes,
        serviceAccountName=name,
        terminationGracePeriodSeconds=GRACE_SECONDS,
        **settings.coordinator_place.fields(),
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata_of(pool, name, labels),
        "spec": {
            "replicas": 1,
            # Two coordinators must not write on one volume.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": pool_selector(pool, "coordinator")},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
