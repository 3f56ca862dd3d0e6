"""The Job that holds an InferenceJob's place in a queue of Kueue, as the documentation has it, on a
real API server: what its containers do is done as its account."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal_cluster import ControlPlane
from simulated_world import API, job_spec

pytestmark = [pytest.mark.cluster, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "kueue.md"


def manifests() -> list[dict[str, Any]]:
    """Those of kinds that a cluster without Kueue has."""
    text = PAGE.read_text()
    found = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    objects = [each for block in found for each in yaml.safe_load_all(block)]
    return [each for each in objects if not each["apiVersion"].startswith("kueue.")]


def test_the_gate_resumes_waits_and_suspends_and_may_do_no_more(
    plane: ControlPlane, namespace: str
) -> None:
    *_, gate = found = manifests()
    spec = job_spec(suspend=True)
    job = {"apiVersion": API, "kind": "InferenceJob", "metadata": {"name": "ocr"}, "spec": spec}
    plane.access.apply(*found, job, namespace=namespace)
    account = f"--as=system:serviceaccount:{namespace}:queue-gate"

    def kubectl(*arguments: str) -> str:
        return plane.kubectl(f"--namespace={namespace}", account, *arguments)

    def is_suspended() -> bool:
        return bool(
            plane.access.get("inferencejob", "ocr", f"--namespace={namespace}")["spec"]["suspend"]
        )

    pod = gate["spec"]["template"]["spec"]
    (resume,), (wait,) = pod["initContainers"], pod["containers"]
    kubectl(*resume["args"])
    assert not is_suspended()
    program, *suspend = wait["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "kubectl"
    kubectl(*suspend)
    assert is_suspended()
    ended = json.dumps({"status": {"completionTime": "2026-03-01T12:00:00Z"}})
    plane.kubectl(
        *(f"--namespace={namespace}", "patch", "inferencejob", "ocr", "--type=merge"),
        *("--subresource=status", f"--patch={ended}"),
    )
    assert "condition met" in kubectl(*wait["args"])
    with pytest.raises(Exception, match="forbidden"):
        kubectl("delete", "inferencejob", "ocr")
