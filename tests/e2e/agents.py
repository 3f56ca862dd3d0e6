"""What the cluster and the kernel say of a pool's agents."""

from cluster_fixtures import MIB
from e2e_cluster import RELEASE, Json, ShoalOnNodes

ABOVE = 6 * MIB
"""A limit is less than that above a floor and a budget."""


def limit_is_lowered(shoal: ShoalOnNodes, pod: Json, device: str, budget: int) -> bool:
    """To its floor and that budget, by the kernel and as the Device shows it. An earlier budget
    may have had it lowered before."""
    status, limit = shoal.get("device", device)["status"], shoal.memory_of(pod).limit
    lowered: bool = status.get("limitBytes") == limit < status["floorBytes"] + budget + ABOVE
    return lowered


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
