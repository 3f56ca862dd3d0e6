"""Parts of pods that all of ours share: as restricted as Kubernetes knows ("restricted" of the Pod
Security standards), bounded, without an API token. Pure builders of JSON.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from shoal_api.kinds import AnyKind
from shoal_operator.reconcile.names import (
    COMPONENT,
    MANAGED_BY,
    MANAGER,
    OWNER_UID,
    namespace_of,
    uid_of,
)
from shoal_operator.reconcile.settings import Images

Json = dict[str, object]

USER: Final = 65532
GRPC_PORT: Final = 7400
"""Of the coordinator."""
PEER_PORT: Final = 7401
"""Of an agent, for other agents."""
METRICS_PORT: Final = 9400
"""Metrics and probes, of both."""
ASKED_BYTES: Final = 192 << 20
TLS_FOLDER: Final = "/etc/shoal/tls"
TLS_ARGUMENTS: Final = (
    *("--tls-ca", f"{TLS_FOLDER}/ca.crt"),
    *("--tls-certificate", f"{TLS_FOLDER}/tls.crt"),
    *("--tls-key", f"{TLS_FOLDER}/tls.key"),
)


def labels_of(owner: AnyKind, component: str, **more: str) -> dict[str, str]:
    """Labels of what is made for an object. `more` are labels of ours: pool_x is
    shoal.dev/pool-x."""
    labels = {
        "app.kubernetes.io/name": "shoal",
        "app.kubernetes.io/part-of": "shoal",
        MANAGED_BY: MANAGER,
        "app.kubernetes.io/instance": owner.metadata.name,
        COMPONENT: component,
        OWNER_UID: uid_of(owner),
    }
    return labels | {f"shoal.dev/{key.replace('_', '-')}": text for key, text in more.items()}


def metadata_of(owner: AnyKind, name: str, labels: Mapping[str, str], **more: object) -> Json:
    """Metadata of an object in the owner's namespace."""
    return {"name": name, "namespace": namespace_of(owner), "labels": dict(labels), **more}


def container(
    name: str,
    image: str,
    images: Images,
    command: Sequence[str],
    memory_bytes: int,
    *,
    keeps_memory: bool = False,
    **more: object,
) -> Json:
    """A container that may use so much memory, and asks for a little of a processor.

    It asks for `ASKED_BYTES` of the memory, which is what our processes take while models and
    inputs are not large; so that small nodes have room for them. `keeps_memory`: for all of it,
    because it will use it, and must not be evicted first.
    """
    asked = memory_bytes if keeps_memory else min(memory_bytes, ASKED_BYTES)
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": images.pull_policy,
        "command": list(command),
        "resources": {
            "requests": {"cpu": "50m", "memory": str(asked)},
            "limits": {"memory": str(memory_bytes)},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **more,
    }


def pod(
    images: Images, containers: Sequence[Json], volumes: Sequence[Json], **more: object
) -> Json:
    """A pod's spec."""
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
        **more,
    }
    if images.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in images.pull_secrets]
    return spec


def scratch(size_bytes: int) -> Json:
    """The volume of `/tmp`: on the node's disk, and not more than this of it."""
    return {"name": "tmp", "emptyDir": {"sizeLimit": str(size_bytes)}}


def tls_volume(secret: str) -> Json:
    """The volume of `TLS_FOLDER`."""
    return {"name": "tls", "secret": {"secretName": secret, "defaultMode": 0o440}}


TMP_MOUNT: Final[Mapping[str, object]] = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108 - a volume
TLS_MOUNT: Final[Mapping[str, object]] = {
    "name": "tls",
    "mountPath": TLS_FOLDER,
    "readOnly": True,
}


def probe(path: str, **more: object) -> Json:
    """Asks the metrics server of a process."""
    return {"httpGet": {"path": path, "port": "metrics"}, "timeoutSeconds": 5, **more}


def startup_probe() -> Json:
    """A process has two minutes to start, and three seconds before it is asked: each time that it
    does not answer is a Warning among the pod's events. It answers when it is ready.
    """
    more = {"initialDelaySeconds": 3, "periodSeconds": 2, "failureThreshold": 60}
    return probe("/healthz?wait", **more | {"timeoutSeconds": 30})
