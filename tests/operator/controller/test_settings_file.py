"""The file that the chart writes."""

from pathlib import Path

import pytest

from shoal_operator.command import SettingsRefused, read_settings

WHOLE = """
images:
  coordinator: a/coordinator:1
  worker: a/worker:1
  agent: a/agent:1
  pullPolicy: Always
  pullSecrets: [registry]
namespace: shoal-system
operatorLabels: {app.kubernetes.io/name: shoal}
enrolment: shoal-operator.shoal-system.svc:8443
agentFloor: 96Mi
coordinatorMemory: 512Mi
workerMemory: 1Gi
workerDisk: 10Gi
coordinatorPlace: {nodeSelector: {}, tolerations: [], affinity: {}}
workerPlace: {nodeSelector: {}, tolerations: [], affinity: {}}
certManager: false
podMonitors: true
monitorLabels: {release: prometheus}
monitorInterval: ""
networkPolicies: true
metricsFrom: []
offline: false
otherGroups: []
"""


def test_the_charts_file_becomes_settings(tmp_path: Path) -> None:
    file = tmp_path / "operator.yaml"
    file.write_text(WHOLE)
    settings = read_settings(file)
    assert settings.images.pull_secrets == ("registry",)
    assert settings.agent_floor == 96 << 20
    assert settings.worker_disk == 10 << 30
    assert settings.monitor_labels == {"release": "prometheus"}
    assert settings.pod_monitors
    assert not settings.cert_manager


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("agentFloor: 96Mi", "agentFloor: much", 'agentFloor: "much" is not a quantity'),
        ("namespace: shoal-system", "namespace: [", r'in ".*operator.yaml", line'),
        ("offline: false", f"offline: {'1' * 5000}", "integer string conversion"),
        ("offline: false", "offline: maybe", 'offline: "maybe" is not true or false'),
        ("  agent: a/agent:1\n", "", "images.agent: is missing"),
        ("offline: false", "offline: false\nofline: true", "ofline: there is no such field"),
        ("namespace: shoal-system", "namespace: [", "expected"),
    ],
)
def test_a_mistake_in_the_file_is_named(
    tmp_path: Path, before: str, after: str, complaint: str
) -> None:
    file = tmp_path / "operator.yaml"
    file.write_text(WHOLE.replace(before, after))
    with pytest.raises(SettingsRefused, match=complaint):
        read_settings(file)
