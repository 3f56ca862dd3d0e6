"""Volumes on a node's disk, backed by folders of this machine, where a test can look into them.

A `local` PersistentVolume belongs to one node. Its class waits for the first pod that claims it,
so that the scheduler puts the pod where the volume is.
"""

from pathlib import Path

from shoal_cluster.access import Access

CLASS = "local"


def make_class(access: Access) -> None:
    """Make the storage class of these volumes."""
    access.apply(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": CLASS},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        }
    )


def make(access: Access, name: str, *, node: str, folder: Path, size: str) -> None:
    """Make the PersistentVolume `name` on `node`, which keeps its files in `folder`."""
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    access.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": size},
                "accessModes": ["ReadWriteOnce"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": CLASS,
                "local": {"path": str(folder)},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
            },
        }
    )
