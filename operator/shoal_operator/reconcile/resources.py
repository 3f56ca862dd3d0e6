"""The kinds that the operator reads or writes, and their paths at the API server. Pure.

The list is closed on purpose: the operator's role allows the same kinds and no others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shoal_api.kinds import KINDS
from shoal_api.schema import API_VERSION
from shoal_operator.reconcile.decision import Manifest, ObjectKey


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind, with what its URL is made of."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """`/apis/batch/v1/namespaces/NAMESPACE/jobs/NAME`; without a namespace, all of them."""
        root = "/api/" if "/" not in self.api_version else "/apis/"
        parts = [root + self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name:
            parts.append(name)
        if subresource:
            parts.append(subresource)
        return "/".join(parts)

    def manifest(self, metadata: Mapping[str, object], **fields: object) -> dict[str, object]:
        """An object of the kind as JSON."""
        head = {"apiVersion": self.api_version, "kind": self.kind, "metadata": metadata}
        return {**head, **fields}


SHOAL: Final = {kind: Resource(API_VERSION, kind, names.plural) for kind, names in KINDS.items()}
JOB: Final = Resource("batch/v1", "Job", "jobs")
DEPLOYMENT: Final = Resource("apps/v1", "Deployment", "deployments")
DAEMON_SET: Final = Resource("apps/v1", "DaemonSet", "daemonsets")
NODE: Final = Resource("v1", "Node", "nodes", namespaced=False)
POD: Final = Resource("v1", "Pod", "pods")
EVENT: Final = Resource("v1", "Event", "events")
SECRET: Final = Resource("v1", "Secret", "secrets")
CLAIM: Final = Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
CONFIG_MAP: Final = Resource("v1", "ConfigMap", "configmaps")
LEASE: Final = Resource("coordination.k8s.io/v1", "Lease", "leases")
TOKEN_REVIEW: Final = Resource(
    "authentication.k8s.io/v1", "TokenReview", "tokenreviews", namespaced=False
)

CHILDREN: Final = (JOB, DEPLOYMENT, DAEMON_SET)
"""Foreign kinds that are watched, those of ours by label."""

WATCHED: Final = (*SHOAL.values(), *CHILDREN, NODE)

_FURTHER: Final = (
    Resource("cert-manager.io/v1", "Certificate", "certificates"),
    Resource("cert-manager.io/v1", "Issuer", "issuers"),
    Resource("v1", "Service", "services"),
    Resource("v1", "ServiceAccount", "serviceaccounts"),
    Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Resource("monitoring.coreos.com/v1", "PodMonitor", "podmonitors"),
)
BY_KIND: Final = {
    each.kind: each
    for each in (
        *(*WATCHED, *_FURTHER),
        *(POD, EVENT, SECRET, CONFIG_MAP, CLAIM, LEASE, TOKEN_REVIEW),
    )
}
"""All of them. No two have one name."""


def resource_of(api_version: str, kind: str) -> Resource:
    """The resource of a manifest; a kind that is not known here is a programmer's error."""
    known = BY_KIND.get(kind)
    assert known is not None, f"the operator may not touch {kind}"
    assert known.api_version == api_version, f"the operator may not touch {api_version} {kind}"
    return known


def resource_for(key: ObjectKey) -> Resource:
    """The resource of an object."""
    return resource_of(key.api_version, key.kind)


def key_of(manifest: Manifest) -> ObjectKey:
    """Which object a manifest describes; it must have apiVersion, kind and metadata.name."""
    metadata = manifest["metadata"]
    assert isinstance(metadata, Mapping), "a manifest without metadata"
    resource = resource_of(str(manifest["apiVersion"]), str(manifest["kind"]))
    return ObjectKey(
        api_version=resource.api_version,
        kind=resource.kind,
        namespace=metadata.get("namespace", "") if resource.namespaced else "",
        name=metadata["name"],
    )
