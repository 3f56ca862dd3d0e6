"""The files that `shoal run` takes are the files that `kubectl apply` takes, and mean the same.

Whether they also do the same is seen where they run: in test_running_examples.py on one machine, in
tests/e2e on a cluster.
"""

import json
from pathlib import Path

import pytest

from shoal_api.kinds import KINDS
from shoal_api.schema import parse
from shoal_cli.local.manifests import load_manifests
from shoal_cluster import Access

pytestmark = [pytest.mark.real, pytest.mark.cluster]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.name for path in EXAMPLES.iterdir() if (path / "job.yaml").is_file())


@pytest.fixture(scope="module")
def access(api_access: Access) -> Access:
    """A cluster that knows the kinds."""
    api_access.kubectl("apply", "--server-side", f"--filename={ROOT / 'crds'}")
    names = [f"crd/{each.plural}.shoal.dev" for each in KINDS.values()]
    api_access.kubectl("wait", "--for=condition=Established", *names, "--timeout=60s")
    return api_access


@pytest.mark.parametrize("name", NAMES)
def test_a_cluster_takes_what_one_machine_runs_and_reads_the_same(
    access: Access, name: str
) -> None:
    local = load_manifests([EXAMPLES / name])
    expected = [
        *local.models.values(),
        *local.pools.values(),
        *local.partitions.values(),
        *local.placements.values(),
        *local.jobs.values(),
    ]
    asked = ("apply", "--dry-run=server", f"--filename={EXAMPLES / name}", "--output=json")
    taken = json.loads(access.kubectl(*asked))["items"]
    assert len(taken) == len(expected)
    for each in expected:
        (found,) = [other for other in taken if other["kind"] == type(each).__name__]
        # What the user wrote, with the defaults that the API server has added.
        written = {key: found[key] for key in ("apiVersion", "kind", "spec")}
        parsed = parse(type(each), {**written, "metadata": {"name": found["metadata"]["name"]}})
        assert parsed == each
