"""A real Kubernetes cluster on one Linux machine, for tests and for trying out.

Here belongs what makes, changes and removes such a cluster; it knows nothing of Shoal, so that
what is tested on it is tested as on a stranger's cluster. From the inside out:

    places, machine      where things are kept; what the machine has and lacks
    ports                which a server may have that was not asked for one
    build, programs      the published Go programs, built once; where a program is found
    certificates, processes, access
                         what a control plane is made of
    control_plane        etcd or kine, API server, controller-manager, scheduler
    network, images, image_store, node, volumes
                         what a node is made of
    cluster              a control plane with nodes and cluster DNS
    policies             its NetworkPolicies enforced, for as long as a test wants that
    __main__             `make cluster`, `make cluster-down`, `make cluster-build`
"""

from shoal_cluster.access import Access, CommandFailed
from shoal_cluster.cluster import Cluster
from shoal_cluster.control_plane import ApiWrite, ControlPlane
from shoal_cluster.images import Image, base_image, build_image
from shoal_cluster.machine import MachineLacks
from shoal_cluster.node import Node, NodeShape

__all__ = [
    "Access",
    "ApiWrite",
    "Cluster",
    "CommandFailed",
    "ControlPlane",
    "Image",
    "MachineLacks",
    "Node",
    "NodeShape",
    "base_image",
    "build_image",
]
