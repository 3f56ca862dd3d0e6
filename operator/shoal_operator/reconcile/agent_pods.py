"""Agents' pods, as reconcilers see them. Pure."""

from dataclasses import dataclass

from shoal_protocol.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPod:
    """An agent's pod that runs: its node, the set of agents that it is of, the budget that it was
    told last, the memory limit that it is to have, and the one in force, where the kubelet says
    that. `version` changes whenever the pod does. Its node has no room for the limit: never
    (`infeasible` says why), or not now (`deferred`).
    """

    name: str
    uid: str
    version: str
    node: str
    agents: str
    budget_bytes: Bytes
    limit_bytes: Bytes
    limit_in_force_bytes: Bytes | None = None
    infeasible: str = ""
    deferred: str = ""

    @property
    def allowed_bytes(self) -> Bytes:
        """What the agent may have now, as far as is known."""
        return self.limit_in_force_bytes or self.limit_bytes
