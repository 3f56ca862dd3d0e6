"""What the cluster and the kernel say of a pool's agents."""

from cluster_fixtures import MIB
from e2e_cluster import RELEASE, Json, ShoalOnNodes


def limit_is_lowered(shoal: ShoalOnNodes, pod: Json, device: str, allowed: int) -> bool:
    """By the kernel, and as the Device shows it."""
    shown: int = shoal.get("device", device)["status"].get("limitBytes", 0)
    return shoal.memory_of(pod).limit == shown < allowed


def allowance(shoal: ShoalOnNodes) -> int:
    """What the chart allows an idle agent, in bytes."""
    (quantity,) = [
        line.split()[1]
        for line in shoal.helm("get", "values", RELEASE, "--all").splitlines()
        if line.strip().startswith("floor:")
    ]
    assert quantity.endswith("Mi")
    return int(quantity.removesuffix("Mi")) * MIB


def have_adopted(shoal: ShoalOnNodes, size: int) -> bool:
    """All Devices show that budget."""
    devices = shoal.get("devices")["items"]
    return {each["status"].get("budgetBytes") for each in devices} == {size}


def agents_of(shoal: ShoalOnNodes) -> dict[str, tuple[str, int]]:
    """The agents' pods, with how often their containers were started again."""
    return {
        pod["metadata"]["name"]: (pod["metadata"]["uid"], status["restartCount"])
        for pod in shoal.pods("agent")
        for status in pod["status"]["containerStatuses"]
    }
