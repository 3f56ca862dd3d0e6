"""What the manifests of all of the operator's objects share: identity, labels, and pods that are
restricted ("restricted" of the Pod Security standards), bounded, without an API token. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from shoal_api.kinds import AnyKind, DevicePool
from shoal_api.labels import COMPONENT, POOL
from shoal_api.schema import API_VERSION
from shoal_operator.reconcile.decision import Manifest, ObjectKey
from shoal_operator.reconcile.names import (
    MANAGED_BY,
    MANAGER,
    OWNER_UID,
    namespace_of,
    uid_of,
)
from shoal_operator.reconcile.resources import BY_KIND
from shoal_operator.reconcile.settings import Images

Json = dict[str, object]

USER: Final = 65532
GRPC_PORT: Final = 7400
"""Of the coordinator."""
PEER_PORT: Final = 7401
"""Of an agent, for other agents."""
METRICS_PORT: Final = 9400
"""Metrics and probes, of both."""
REQUESTED_BYTES: Final = 192 << 20
TLS_FOLDER: Final = "/etc/shoal/tls"
TLS_ARGUMENTS: Final = (
    *("--tls-ca", f"{TLS_FOLDER}/ca.crt"),
    *("--tls-certificate", f"{TLS_FOLDER}/tls.crt"),
    *("--tls-key", f"{TLS_FOLDER}/tls.key"),
)
TMP_MOUNT: Final[Mapping[str, object]] = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108 - a volume
TLS_MOUNT: Final[Mapping[str, object]] = {"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True}


# ---- objects -------------------------------------------------------------------------------------


def labels_of(owner: AnyKind, component: str) -> dict[str, str]:
    """Labels of what is made for an object."""
    labels = {
        "app.kubernetes.io/name": "shoal",
        "app.kubernetes.io/part-of": "shoal",
        MANAGED_BY: MANAGER,
        "app.kubernetes.io/instance": owner.metadata.name,
        COMPONENT: component,
        OWNER_UID: uid_of(owner),
    }
    return labels | ({POOL: owner.metadata.name} if isinstance(owner, DevicePool) else {})


def manifest(
    owner: AnyKind,
    kind: str,
    name: str,
    labels: Mapping[str, str],
    metadata: Mapping[str, object] | None = None,
    **fields: object,
) -> Manifest:
    """An object in the owner's namespace; `metadata` is what it has besides."""
    identity = {"name": name, "namespace": namespace_of(owner), "labels": dict(labels)}
    return BY_KIND[kind].manifest({**identity, **(metadata or {})}, **fields)


def child_key(owner: AnyKind, kind: str, name: str) -> ObjectKey:
    """Where an object in the owner's namespace is, to remove it."""
    version = BY_KIND[kind].api_version
    return ObjectKey(api_version=version, kind=kind, namespace=namespace_of(owner), name=name)


def owner_reference(owner: AnyKind, **more: bool) -> Json:
    """Says whose an object is, for those that do not belong to what is reconciled."""
    kind, name = type(owner).__name__, owner.metadata.name
    return {"apiVersion": API_VERSION, "kind": kind, "name": name, "uid": uid_of(owner), **more}


# ---- pods ----------------------------------------------------------------------------------------


def resources(memory_bytes: int, requested_bytes: int = REQUESTED_BYTES) -> Json:
    """What a container may use, and requests."""
    requested = min(memory_bytes, requested_bytes)
    return {
        "requests": {"cpu": "50m", "memory": str(requested)},
        "limits": {"memory": str(memory_bytes)},
    }


def container(
    name: str,
    image: str,
    images: Images,
    command: Sequence[str],
    memory_bytes: int,
    requested_bytes: int = REQUESTED_BYTES,
    /,
    **more: object,
) -> Json:
    """A container that may use so much memory, and requests a little of a processor.

    It requests at most `requested_bytes` of the memory: by default what our processes take while
    models and inputs are not large, so that small nodes have room for them.
    """
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": images.pull_policy,
        "command": list(command),
        "resources": resources(memory_bytes, requested_bytes),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **more,
    }


_STARTUP: Final = {
    "timeoutSeconds": 30,
    "initialDelaySeconds": 3,
    "periodSeconds": 2,
    "failureThreshold": 60,
}


def served(name: str, port: int) -> Json:
    """What the containers of servers share: their ports, and probes of their metrics server.

    A process has two minutes to start, and three seconds before the first probe: each one that
    fails is a Warning among the pod's events. So the startup probe is answered when it is ready.
    """
    ports = ((name, port), ("metrics", METRICS_PORT))
    return {
        "ports": [
            {"name": name, "containerPort": number, "protocol": "TCP"} for name, number in ports
        ],
        "startupProbe": _probe("/healthz?wait", **_STARTUP),
        "livenessProbe": _probe("/healthz", periodSeconds=10, failureThreshold=6),
        "readinessProbe": _probe("/readyz", periodSeconds=5, failureThreshold=2),
    }


def _probe(path: str, **more: int) -> Json:
    return {"httpGet": {"path": path, "port": "metrics"}, "timeoutSeconds": 5, **more}


def pod_template(
    labels: Mapping[str, str],
    images: Images,
    containers: Sequence[Json],
    volumes: Sequence[Json],
    **more: object,
) -> Json:
    """What a workload makes its pods of; `more` is of their spec."""
    pull_secrets = [{"name": name} for name in images.pull_secrets]
    spec: Json = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": list(containers),
        "volumes": list(volumes),
        **({"imagePullSecrets": pull_secrets} if pull_secrets else {}),
        **more,
    }
    return {"metadata": {"labels": dict(labels)}, "spec": spec}


def scratch(size_bytes: int) -> Json:
    """The volume of `/tmp`: on the node's disk, and not more than this of it."""
    return {"name": "tmp", "emptyDir": {"sizeLimit": str(size_bytes)}}


def tls_volume(secret: str) -> Json:
    """The volume of `TLS_FOLDER`."""
    return {"name": "tls", "secret": {"secretName": secret, "defaultMode": 0o440}}
