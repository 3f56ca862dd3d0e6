"""Inputs that a model has a value for, as ONNX allows: devices have that value, and no other."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from cli.local.workbench import Workbench, make_workbench
from shoal_compiler.cutting import Cut
from shoal_compiler.profile import Source
from shoal_coordinator.storage.followed import FollowedFiles
from shoal_coordinator.storage.following import FollowedFolder, FollowedInputs
from shoal_coordinator.storage.inputs import InputUnsuitable
from shoal_coordinator.storage.results import ResultStore
from shoal_protocol.partition import document_from_json, document_to_json

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]
TEXT = """<ir_version: 8, opset_import: ["" : 17]>
g (float[1,4] x, float[1] scale) => (float[1,4] y)
<float[1] scale = {2.0}, float[1] shift = {1.0}> {
    scaled = Mul(x, scale)
    y = Add(scaled, shift)
}"""
X = np.ones((1, 4), np.float32)
SCALE = np.full(1, 3, np.float32)
REASON = "has an array for scale, to which the model gives a value of its own"


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    made = make_workbench(tmp_path)
    for old in made.inputs.iterdir():
        old.unlink()
    onnx.save(onnx.parser.parse_model(TEXT), made.model)
    np.savez(made.inputs / "mine.npz", x=X, scale=SCALE)
    return made


def run(bench: Workbench) -> str:
    ran = bench.run(
        *("run", bench.model, "--inputs", bench.inputs, "--outputs", bench.outputs),
        *("--devices", "1", "--budget", "32Mi"),
    )
    return ran.out + ran.err


def test_a_value_for_an_input_that_has_one_is_an_error_that_says_what_to_do(
    bench: Workbench,
) -> None:
    np.savez(bench.inputs / "models.npz", x=X, shift=SCALE)  # `shift` is no input
    told = " ".join(run(bench).split())
    assert f"mine.npz: {REASON}" in told
    assert "leave it out, or remove the initializer of that name from the model" in told
    with np.load(bench.outputs / "models.npz") as results:
        np.testing.assert_array_equal(results["y"], 2 * X + 1)
    assert not (bench.outputs / "mine.npz").exists()


def test_a_file_that_comes_to_a_followed_folder_is_looked_at_in_the_same_way(
    bench: Workbench,
) -> None:
    source = Source.open(bench.model)
    written = document_to_json(Cut(source, source.profile(), ()).document)
    document = document_from_json(written)
    files = FollowedFiles()
    ResultStore(bench.outputs, job="job", identity="i", catalogue=files, names=("y",))
    watch = FollowedFolder(bench.inputs, files, document.inputs, document.fixed)
    inputs = FollowedInputs(bench.inputs, files, document.inputs, document.fixed)
    taken = [each for _ in range(3) for each in watch.scan(last=False)]
    inputs.extend(taken, len(taken))
    with pytest.raises(InputUnsuitable, match=f"mine.npz: {REASON}"):
        inputs.read(0)


def test_a_document_of_before_names_no_such_inputs(bench: Workbench) -> None:
    source = Source.open(bench.model)
    written = document_to_json(Cut(source, source.profile(), ()).document)
    assert document_from_json(written).fixed == ("scale",)
    before = json.loads(written)
    del before["fixed"]
    assert document_from_json(json.dumps(before)).fixed == ()
