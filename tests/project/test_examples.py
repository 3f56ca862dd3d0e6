"""The examples' manifests, pictures and scripts agree with each other."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from PIL import Image

from shoal_cli.local.manifests import load_manifests

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.iterdir() if (path / "job.yaml").is_file())


def documents(name: str) -> list[dict[str, Any]]:
    return [yaml.safe_load(path.read_text()) for path in sorted((EXAMPLES / name).glob("*.yaml"))]


def script(name: str) -> dict[str, Any]:
    """The names that an example's script defines."""
    return runpy.run_path(str(EXAMPLES / name))


def test_there_are_three_examples() -> None:
    assert NAMES == ["embeddings", "ocr", "vision"]


@pytest.mark.parametrize("name", NAMES)
def test_manifests_of_an_example_are_valid_and_complete(name: str) -> None:
    manifests = load_manifests([EXAMPLES / name])
    assert list(manifests.jobs) == [name]
    assert len(manifests.models) == len(manifests.pools) == len(manifests.partitions) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_an_example_can_be_applied_to_a_cluster_as_it_is(name: str) -> None:
    for document in documents(name):
        assert document["apiVersion"] == "shoal.dev/v1alpha1"
        assert document["metadata"]["name"]
    uris = [
        uri
        for document in documents(name)
        for part in ("source", "inputs", "outputs")
        if (uri := document["spec"].get(part, {}).get("uri"))
    ]
    assert len(uris) == 3
    assert all(uri.startswith("pvc://") for uri in uris)


@pytest.mark.parametrize(("difference", "holds"), [(9e-6, True), (1.1e-5, False), (None, False)])
def test_an_example_is_held_to_the_difference_that_is_promised(
    tmp_path: Path, difference: float | None, holds: bool
) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"jobs": [{"name": "ocr", "max_abs_diff": difference}]}))
    command = [sys.executable, str(EXAMPLES / "check.py"), str(report)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ended.returncode == 0) is holds
    assert ("job ocr differs by" in ended.stderr) is not holds


def test_every_picture_has_a_label_and_every_label_a_picture() -> None:
    images = EXAMPLES / "ocr" / "images"
    labels = [line.split("\t") for line in (images / "labels.tsv").read_text().splitlines()]
    assert [name for name, _ in labels] == sorted(path.name for path in images.glob("*.png"))
    assert all(text.strip() == text and text for _, text in labels)


def test_the_recogniser_is_planned_for_the_widest_line() -> None:
    as_input = script("ocr/prepare.py")["as_input"]
    shapes = [as_input(Image.open(path)).shape for path in (EXAMPLES / "ocr/images").glob("*.png")]
    assert {shape[:3] for shape in shapes} == {(1, 3, 48)}
    (model,) = [each for each in documents("ocr") if each["kind"] == "Model"]
    (planned,) = model["spec"]["shapes"]
    assert planned["shape"] == [1, 3, 48, max(shape[3] for shape in shapes)]


def test_a_line_is_scaled_to_the_height_and_the_range_that_the_recogniser_knows() -> None:
    prepare = script("ocr/prepare.py")
    red = Image.new("RGB", (100, 24), (255, 0, 0))
    tensor = prepare["as_input"](red)
    assert tensor.shape == (1, 3, 48, 224)
    assert tensor.dtype == np.float32
    np.testing.assert_array_equal(tensor[0, :, 0, 0], [-1, -1, 1])  # blue, green, red
    assert not tensor[..., 200:].any()


def test_decoding_joins_repeats_and_leaves_blanks_out() -> None:
    decode = script("ocr/show.py")["decode"]
    alphabet = ["", "a", "b", " "]
    classes = [0, 1, 1, 0, 1, 3, 2, 2, 0]
    assert decode(np.eye(4, dtype=np.float32)[classes], alphabet) == "aa b"


@pytest.mark.parametrize(
    ("left", "right", "changes"),
    [
        ("", "", 0),
        ("shoal", "shoal", 0),
        ("", "abc", 3),
        ("kitten", "sitting", 3),
        ("2OO", "200", 2),
    ],
)
def test_edit_distance_counts_changes(left: str, right: str, changes: int) -> None:
    distance = script("ocr/show.py")["edit_distance"]
    assert distance(left, right) == distance(right, left) == changes


def test_the_packaged_recogniser_is_found_and_names_its_characters() -> None:
    model = script("ocr/prepare.py")["packaged_model"]()
    characters = script("ocr/show.py")["characters"](model)
    (output,) = onnx.load(model).graph.output
    assert len(characters) == output.type.tensor_type.shape.dim[2].dim_value


@pytest.mark.parametrize("name", NAMES)
def test_preparing_an_example_again_leaves_no_old_results(name: str, tmp_path: Path) -> None:
    example = tmp_path / "examples" / name
    shutil.copytree(EXAMPLES / name, example, ignore=shutil.ignore_patterns("in", "out", "models"))
    (tmp_path / "bench").symlink_to(EXAMPLES.parent / "bench")
    (job,) = [each for each in documents(name) if each["kind"] == "InferenceJob"]
    claim, folder = job["spec"]["outputs"]["uri"].removeprefix("pvc://").split("/")
    stale = example / claim / folder / "stale.npz"
    stale.parent.mkdir(parents=True)
    stale.touch()
    subprocess.run([sys.executable, str(example / "prepare.py")], check=True)
    assert not stale.exists()
    assert list((example / claim / "in").glob("*.npz"))
