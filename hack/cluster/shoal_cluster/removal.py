"""Taking a cluster down by its folder and number alone, whoever made it and however that ended."""

from shoal_cluster import cgroups
from shoal_cluster.network import Network
from shoal_cluster.places import Home
from shoal_cluster.processes import end_all


def take_down(home: Home) -> None:
    """End all processes, and remove the network, the cgroups and the folder.

    A node's processes, pods included, live in a process namespace and a mount namespace of the
    node: they and all its mounts end with the node's first process.
    """
    end_all(home.folder)
    Network(home.number).remove()
    cgroups.remove(home.number)
    home.remove()
