"""kustomize follows the references between objects once it is told where they are."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal_api.fields import Reference, SecretReference
from shoal_api.kinds import KINDS
from shoal_api.schema import members, record_in
from shoal_cluster import MachineLacks
from shoal_cluster.programs import find

ROOT = Path(__file__).resolve().parents[2]
REFERENCES = ROOT / "crds" / "kustomize" / "references.yaml"
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "store"}}


def referring(cls: type, at: str = "spec") -> Iterator[str]:
    """The paths of a record's references, as kustomize writes them."""
    for name, declared in members(cls).items():
        inner = record_in(declared.shape)
        if inner in (Reference, SecretReference):
            yield f"{at}/{name}/name"
        elif inner is not None:
            yield from referring(inner, f"{at}/{name}")


def test_every_reference_of_every_kind_is_known() -> None:
    declared = {
        (names.cls.__name__, path)
        for names in KINDS.values()
        for path in referring(record_in(members(names.cls)["spec"].shape) or names.cls)
    }
    listed = yaml.safe_load(REFERENCES.read_text())["nameReference"]
    known = {(field["kind"], field["path"]) for each in listed for field in each["fieldSpecs"]}
    assert known == declared


def built(folder: Path, *objects: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What `kubectl kustomize` makes of objects with a prefix, by kind."""
    try:
        kubectl = find("kubectl")
    except MachineLacks as lacking:
        pytest.skip(str(lacking))
    shutil.copy(REFERENCES, folder)
    (folder / "objects.yaml").write_text(yaml.safe_dump_all(objects))
    kustomization = {
        "resources": ["objects.yaml"],
        "configurations": [REFERENCES.name],
        "namePrefix": "lab-",
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    command = [str(kubectl), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}


def test_references_follow_a_name_prefix(tmp_path: Path) -> None:
    files = sorted((ROOT / "examples" / "ocr").glob("*.yaml"))
    objects = [each for file in files for each in yaml.safe_load_all(file.read_text()) if each]
    for each in objects:
        if each["kind"] == "InferenceJob":
            each["spec"]["inputs"]["secretRef"] = {"name": "store"}
    made = built(tmp_path, *objects, SECRET)
    job = made["InferenceJob"]["spec"]
    assert job["inputs"]["secretRef"] == {"name": "lab-store"}
    assert job["poolRef"] == {"name": made["DevicePool"]["metadata"]["name"]}
    assert job["poolRef"]["name"].startswith("lab-")
    model = {"name": made["Model"]["metadata"]["name"]}
    assert made["Partition"]["spec"]["modelRef"] == model
    assert job["partitionRef"] == {"name": made["Partition"]["metadata"]["name"]}
