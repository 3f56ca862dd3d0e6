"""Values that several modules of this folder render the chart with."""

from typing import Any

from rendered_chart import render

OPERATOR = "shoal-operator"
EVERYTHING: dict[str, Any] = {
    "certManager.enabled": True,
    "podMonitor.enabled": True,
    "prometheusRule.enabled": True,
    "dashboards.enabled": True,
}

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def on_nodes(*requirements: dict[str, Any]) -> dict[str, Any]:
    """Nodes of one term, as an affinity says them."""
    return {"nodeSelectorTerms": [{"matchExpressions": list(requirements)}]}


_BESIDE: dict[str, Any] = {
    "topologyKey": "kubernetes.io/hostname",
    "labelSelector": {
        "matchLabels": {"app": "a"},
        "matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["one", ""]}],
    },
    "namespaceSelector": {},
    "namespaces": ["default"],
    "matchLabelKeys": ["pod-template-hash"],
}
AFFINITY: dict[str, Any] = {
    "nodeAffinity": {
        REQUIRED: on_nodes(
            {"key": "example.com/disk", "operator": "In", "values": ["ssd"]},
            {"key": "gpu", "operator": "DoesNotExist"},
            {"key": "cores", "operator": "Gt", "values": ["3"]},
        ),
        PREFERRED: [
            {
                "weight": 100,
                "preference": {
                    "matchFields": [
                        {"key": "metadata.name", "operator": "In", "values": ["one"]},
                    ]
                },
            }
        ],
    },
    "podAffinity": {REQUIRED: [_BESIDE]},
    "podAntiAffinity": {PREFERRED: [{"weight": 1, "podAffinityTerm": _BESIDE}]},
}
"""All that an affinity may say."""


def pod_of(values: dict[str, Any] | None = None) -> dict[str, Any]:
    template: dict[str, Any] = render(values)["Deployment", OPERATOR]["spec"]["template"]
    return template
