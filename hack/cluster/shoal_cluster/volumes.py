"""Volumes on a node's disk, in two classes; both wait for the first pod that claims a volume.

`local`: a PersistentVolume made beforehand on one node and backed by a folder of this machine, so
that a test can look into it. `local-path`, the default class: made when it is claimed, by the
provisioner that K3s has as well.
"""

import json
from pathlib import Path

from shoal_cluster.access import Access
from shoal_cluster.images import BASE_IMAGE
from shoal_cluster.processes import Process
from shoal_cluster.programs import find

LOCAL = "local"
LOCAL_PATH = "local-path"
_NAMESPACE = "kube-system"
_SCRIPTS = "local-path-config"
_ON_NODE = "/opt/local-path-provisioner"


def make_local_class(access: Access) -> None:
    """Make the class of the volumes that `make_local` makes."""
    access.apply(_storage_class(LOCAL, "kubernetes.io/no-provisioner", default=False))


def make_local(access: Access, name: str, *, node: str, folder: Path, size: str) -> None:
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
                "storageClassName": LOCAL,
                "local": {"path": str(folder)},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
            },
        }
    )


def make_local_path_class(access: Access) -> None:
    """Make the default class, and the scripts that the provisioner's pods run on a node."""
    scripts = {
        "setup": '#!/bin/sh\nset -eu\nmkdir -m 0777 -p "$VOL_DIR"\n',
        "teardown": '#!/bin/sh\nset -eu\nrm -rf "$VOL_DIR"\n',
    }
    access.apply(
        _storage_class(LOCAL_PATH, "rancher.io/local-path", default=True),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": _SCRIPTS, "namespace": _NAMESPACE},
            "data": scripts,
        },
        namespace=_NAMESPACE,
    )


def provisioner(access: Access, home: Path) -> Process:
    """The provisioner of the default class, which runs beside the control plane."""
    folder = home / "local-path"
    folder.mkdir()
    paths = [{"node": "DEFAULT_PATH_FOR_NON_LISTED_NODES", "paths": [_ON_NODE]}]
    (folder / "config.json").write_text(json.dumps({"nodePathMap": paths}))
    container = {"name": "helper-pod", "image": BASE_IMAGE, "imagePullPolicy": "Never"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "helper-pod"},
        "spec": {"containers": [container], "tolerations": [{"operator": "Exists"}]},
    }
    (folder / "pod.json").write_text(json.dumps(pod))
    flags = {
        "kubeconfig": access.kubeconfig,
        "config": folder / "config.json",
        "helper-pod-file": folder / "pod.json",
        "helper-image": BASE_IMAGE,
        "namespace": _NAMESPACE,
        "configmap-name": _SCRIPTS,
        "service-account-name": "default",
    }
    name = "local-path-provisioner"
    command: list[str | Path] = [find(name), "start"]
    command += [f"--{flag}={value}" for flag, value in flags.items()]
    return Process(name, command, home / "log" / f"{name}.log", home)


def _storage_class(name: str, provisioner_name: str, *, default: bool) -> dict[str, object]:
    default_class = "storageclass.kubernetes.io/is-default-class"
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name, "annotations": {default_class: str(default).lower()}},
        "provisioner": provisioner_name,
        "volumeBindingMode": "WaitForFirstConsumer",
        "reclaimPolicy": "Delete",
    }
