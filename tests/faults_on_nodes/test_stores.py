"""Model, inputs and results in a bucket, opened with a Secret; also when that is wrong at first."""

import hashlib
import shutil
from pathlib import Path

import pytest
from pool import read_results

from cli.transfer.servers import S3, serve_s3
from e2e_cluster import Json, ShoalOnNodes
from faults_on_nodes.runs import check_finalizers
from parity_with_whole import TOLERANCE

pytestmark = [
    pytest.mark.real,
    pytest.mark.cluster,
    pytest.mark.nodes,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(900),
]
SECRET = {"secretRef": {"name": "bucket"}}


def secret(keys: dict[str, str]) -> Json:
    metadata = {"name": "bucket"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": keys}


def model(digest: str) -> Json:
    source = {"uri": "s3://lines/models/rec.onnx", "digest": digest, **SECRET}
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": "far-away"},
        "spec": {"source": source, "shapes": [{"input": "x", "shape": [1, 3, 48, 512]}]},
    }


def partition() -> Json:
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "Partition",
        "metadata": {"name": "far-away-3"},
        "spec": {"modelRef": {"name": "far-away"}, "fragments": 3},
    }


def fill(s3: S3, shoal: ShoalOnNodes) -> str:
    """The example's model and inputs, in the bucket; the model's digest."""
    example = shoal.examples / "ocr"
    for folder in ("models", "in"):
        (s3.folder / folder).mkdir()
    shutil.copy(example / "models" / "rec.onnx", s3.folder / "models")
    for file in (example / "lines" / "in").glob("*.npz"):
        shutil.copy(file, s3.folder / "in")
    content = (example / "models" / "rec.onnx").read_bytes()
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def test_a_job_of_a_bucket_waits_for_the_right_secret_and_then_completes(
    shoal: ShoalOnNodes, tmp_path: Path
) -> None:
    with serve_s3(tmp_path, shoal.cluster.network.host_address) as s3:
        digest = fill(s3, shoal)
        places = {
            "inputs": {"uri": "s3://lines/in", **SECRET},
            "outputs": {"uri": "s3://lines/out", **SECRET},
        }
        job = shoal.job("far-away", partitionRef={"name": "far-away-3"}, **places)
        shoal.apply(model(digest), partition(), job)
        shoal.wait_until(
            "the Model says that the Secret is missing",
            lambda: '"bucket" not found' in message(shoal, "model", "far-away"),
        )
        shoal.apply(secret(s3.environment))
        shoal.wait("inferencejob/far-away", "Complete", seconds=300)
        results = read_results(s3.folder / "out")
        assert shoal.difference(results) <= TOLERANCE
        assert len(results) == len(list((s3.folder / "in").iterdir()))
    check_finalizers(shoal)


def test_credentials_that_do_not_open_the_bucket_are_told_of_and_nothing_is_tried_again(
    shoal: ShoalOnNodes, tmp_path: Path
) -> None:
    with serve_s3(tmp_path, shoal.cluster.network.host_address) as s3:
        fill(s3, shoal)
        shoal.apply(secret(s3.environment | {"AWS_SECRET_ACCESS_KEY": "wrong"}))
        job = shoal.job("closed", inputs={"uri": "s3://lines/in", **SECRET})
        shoal.apply(job)
        shoal.wait("inferencejob/closed", "Failed")
        told = shoal.condition("inferencejob", "closed", "Failed")
        assert told["reason"] == "InputTransferFailed"
        assert "the credentials do not open it" in told["message"]
        assert len(shoal.pods("transfer-inputs")) >= 1
        (worker,) = (
            each for each in shoal.get("jobs")["items"] if "closed-" in each["metadata"]["name"]
        )
        assert worker["status"]["failed"] == 1
    check_finalizers(shoal)


def message(shoal: ShoalOnNodes, kind: str, name: str) -> str:
    return str(shoal.condition(kind, name, "Ready").get("message", ""))
