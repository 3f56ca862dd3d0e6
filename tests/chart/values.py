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


def pod_of(values: dict[str, Any] | None = None) -> dict[str, Any]:
    template: dict[str, Any] = render(values)["Deployment", OPERATOR]["spec"]["template"]
    return template
