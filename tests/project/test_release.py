"""What a release is made of fits together, as far as can be seen before a tag is pushed."""

import os
import re
import subprocess
from pathlib import Path

import yaml

from rendered_chart import helm
from shoal_cluster.programs import find

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "hack" / "release"
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())


def release(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | variables,
    )


def test_the_workflow_takes_steps_that_the_script_has() -> None:
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    taken = set(re.findall(r"hack/release (\w+)", "\n".join(each.get("run", "") for each in steps)))
    assert taken == set(re.findall(r"^(\w+)\)", SCRIPT.read_text(), re.MULTILINE))


def test_what_others_made_is_taken_by_its_content_and_not_by_a_tag_that_may_move() -> None:
    """These steps come before, or beside, those that have the registry's token."""
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]
    assert used
    assert not [each for each in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", each)]


def test_no_secret_is_written_into_a_command() -> None:
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    assert not [step["run"] for step in steps if "${{ secrets." in step.get("run", "")]


def test_the_workflow_builds_each_image_that_the_dockerfile_has() -> None:
    names = WORKFLOW["jobs"]["images"]["strategy"]["matrix"]["image"]
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.M))
    assert set(names) <= targets
    assert len(names) == 4


def test_a_tag_that_is_not_the_version_is_refused() -> None:
    refused = release("version", "99.0.0")
    assert refused.returncode == 1
    assert "pyproject.toml has version" in refused.stderr
    assert "not 99.0.0" in refused.stderr


def test_a_released_chart_takes_its_images_from_where_it_was_pushed(tmp_path: Path) -> None:
    made = release("chart", "registry.example/team", str(tmp_path), HELM=str(find("helm")))
    assert made.returncode == 0, made.stderr
    (archive,) = tmp_path.glob("shoal-*.tgz")
    rendered = helm("template", "shoal", str(archive), "--namespace", "shoal-system")
    images = set(re.findall(r"^ *image: \"?([^\s\"]+)", rendered, re.MULTILINE))
    assert images
    assert all(each.startswith("registry.example/team/shoal/") for each in images)


def test_a_step_that_it_does_not_have_is_answered_with_those_that_it_has() -> None:
    answer = release("bake")
    assert answer.returncode == 2
    assert "hack/release wheel FOLDER" in answer.stderr
