"""The pods of workers: what they mount, and where they run."""

from dataclasses import replace
from typing import Any

import pytest

from reconcile.test_inference_job import planned
from reconcile.values import NOW, SETTINGS, model
from shoal_api.kinds.inference_job import InferenceJobStatus, RetryStatus
from shoal_operator.reconcile.settings import Place
from shoal_operator.reconcile.snapshot import Worker, WorkerPhase
from shoal_operator.reconcile.workers import (
    input_transfer_worker,
    inspect_worker,
    result_transfer_worker,
    worker_job,
    worker_text,
)


def test_a_claim_is_written_only_where_results_go() -> None:
    wanted = planned(inputs={"uri": "pvc://lines/in"}, outputs={"uri": "pvc://lines/out"}).job
    for worker_spec, only in (
        (input_transfer_worker(wanted, "shelf"), True),
        (result_transfer_worker(wanted, "shelf"), False),
    ):
        manifest: Any = worker_job(wanted, worker_spec, SETTINGS)
        spec = manifest["spec"]["template"]["spec"]
        (claim,) = [volume for volume in spec["volumes"] if volume["name"] == "claim-0"]
        (mount,) = [
            mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "claim-0"
        ]
        assert claim["persistentVolumeClaim"].get("readOnly", False) is only
        assert mount.get("readOnly", False) is only


def test_a_worker_whose_end_is_no_record_is_removed_soon() -> None:
    """What a job's pods did is in its status; a model that was refused is not asked again."""
    wanted = planned().job
    specs = (input_transfer_worker(wanted, "shelf"), result_transfer_worker(wanted, "shelf"))
    manifests: list[Any] = [worker_job(wanted, each, SETTINGS) for each in specs]
    assert [each["spec"]["ttlSecondsAfterFinished"] for each in manifests] == [300, 300]
    inspect: Any = worker_job(model(), inspect_worker(model()), SETTINGS)
    assert inspect["spec"]["ttlSecondsAfterFinished"] == 7 * 86_400


@pytest.mark.parametrize("length", [3, 37, 63])
def test_the_workers_of_every_retry_have_names_that_a_job_may_have(length: int) -> None:
    wanted = planned().job
    named = replace(wanted, metadata=replace(wanted.metadata, name="n" * length))
    begun = [
        replace(named, status=InferenceJobStatus(retry=RetryStatus(number=number, time=NOW)))
        for number in range(3)
    ]
    names = [result_transfer_worker(each, "shelf").name for each in begun]
    assert len(set(names)) == 3
    assert all(len(each) <= 63 for each in names)


def test_workers_run_where_the_installation_says() -> None:
    tolerations = ({"key": "edge", "operator": "Exists"},)
    settings = replace(SETTINGS, worker_place=Place(tolerations=tolerations))
    wanted = planned().job
    manifest: Any = worker_job(wanted, input_transfer_worker(wanted, "shelf"), settings)
    spec = manifest["spec"]["template"]["spec"]
    assert spec["tolerations"] == list(tolerations)
    assert "nodeSelector" not in spec


def test_workers_have_the_labels_of_the_installation_and_their_own_first() -> None:
    wanted = planned().job
    spec = input_transfer_worker(wanted, "shelf")

    def labels(manifest: Any) -> Any:
        return manifest["spec"]["template"]["metadata"]["labels"]

    own = labels(worker_job(wanted, spec, SETTINGS))
    more = {"team": "edge", "app.kubernetes.io/component": "other"}
    settings = replace(SETTINGS, worker_labels=more)
    assert labels(worker_job(wanted, spec, settings)) == {**own, "team": "edge"}


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("shoal: model refused\n  rec: two\n  words", "model refused: rec: two words"),
        ("shoal: interrupted\n", "interrupted"),
        ("0/3 nodes are available:\n  no memory", "0/3 nodes are available: no memory"),
        ("", "it failed (worker m-inspect)"),
    ],
)
def test_the_last_words_of_a_worker_are_one_sentence(said: str, shown: str) -> None:
    worker = Worker(name="m-inspect", phase=WorkerPhase.FAILED, message=said)
    assert worker_text(worker, "it failed") == shown
