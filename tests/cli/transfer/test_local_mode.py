"""The manifests of a cluster, run on one machine, with everything in a bucket or a registry."""

import os
import shutil
import signal
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from cli.local.test_following import interrupt_twice
from cli.local.test_running import until
from cli.local.workbench import Workbench, save_inputs, save_model
from cli.transfer.servers import S3, Registry

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "120", "NO_COLOR": "1"}
    made = Workbench(folder=tmp_path, environment=environment)
    save_model(made.model)
    save_inputs(made.inputs, files=2)
    made.write_manifest()
    return made


def results(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of every file."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            found[path.name] = dict(file)
    return found


def same(one: dict[str, dict[str, np.ndarray]], other: dict[str, dict[str, np.ndarray]]) -> bool:
    return {name: sorted(arrays) for name, arrays in one.items()} == {
        name: sorted(arrays) for name, arrays in other.items()
    } and all(
        np.array_equal(array, other[name][key])
        for name, arrays in one.items()
        for key, array in arrays.items()
    )


@pytest.mark.minutes
def test_a_job_of_a_bucket_is_run_here_and_its_results_are_put_there(
    s3: S3, bench: Workbench
) -> None:
    local = bench.run("run", bench.manifest, "--quiet")
    assert local.status == 0, local.err
    expected = results(bench.outputs)
    assert len(expected) == 2

    shutil.copytree(bench.inputs, s3.folder / "job/in")
    shutil.copy(bench.model, s3.folder / "job/small.onnx")
    text = bench.manifest.read_text()
    for there, here in (
        ("s3://lines/job/small.onnx", "small.onnx"),
        ("s3://lines/job/in", "pvc://lines/in"),
        ("s3://lines/job/out", "pvc://lines/out"),
    ):
        text = text.replace(f"{{uri: {here}}}", f"{{uri: {there}}}")
    remote = bench.folder / "remote.yaml"
    remote.write_text(text)
    ran = bench.run("run", remote, "--quiet", "--report", bench.report)
    assert ran.status == 0, ran.err
    assert same(results(s3.folder / "job/out"), expected)
    assert "s3://lines/job/out has 2 files of results" in ran.err

    # Again: nothing is fetched, run or put that exists.
    again = bench.run("run", remote, "--quiet", "--report", bench.report)
    assert again.status == 0, again.err
    jobs = again.report["jobs"]
    assert isinstance(jobs, list)
    assert [job["resumed"] for job in jobs] == [job["items"] for job in jobs]
    # An input that is gone over there is not run here.
    (s3.folder / "job/in" / sorted(expected)[0]).unlink()
    shutil.rmtree(s3.folder / "job/out")
    fewer = bench.run("run", remote, "--quiet", "--work", bench.folder / "work")
    assert fewer.status == 0, fewer.err
    assert sorted(results(s3.folder / "job/out")) == sorted(expected)[1:]


@pytest.mark.parametrize(("is_pipe", "status"), [(True, 0), (False, 2)])
def test_results_and_report_go_where_they_belong_though_the_summary_does_not(
    s3: S3, bench: Workbench, is_pipe: bool, status: int
) -> None:
    """As in `shoal run job.yaml | true`, and with standard output on a disk that is full."""
    name = "unread" if is_pipe else "unwritten"
    text = bench.manifest.read_text().replace("pvc://lines/out", f"s3://lines/{name}/out")
    bench.manifest.write_text(text)
    with closed_pipe() if is_pipe else Path("/dev/full").open("wb") as out:
        process = bench.start("run", bench.manifest, "--report", bench.report, out=out.fileno())
        _, errors = process.communicate(timeout=90)
    assert process.returncode == status, errors
    assert ("nothing more can be written" in errors) == (not is_pipe)
    assert "Traceback" not in errors
    assert len(results(s3.folder / name / "out")) == 2
    assert bench.report.exists()


def closed_pipe() -> BinaryIO:
    """The end that is written to, of a pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "wb")


def test_a_bucket_is_followed_until_ctrl_c_and_gets_the_results_as_they_are_made(
    s3: S3, bench: Workbench
) -> None:
    files = sorted(bench.inputs.iterdir())
    (s3.folder / "camera/in").mkdir(parents=True)
    shutil.copy(files[0], s3.folder / "camera/in")
    text = bench.manifest.read_text().replace("pvc://lines/out", "s3://lines/camera/out")
    bench.manifest.write_text(
        text.replace("{uri: pvc://lines/in}", "{uri: s3://lines/camera/in, follow: true}")
    )
    process = bench.start("run", bench.manifest, "--report", bench.report, "--progress", "plain")
    until((s3.folder / "camera/out" / files[0].name).exists, process)
    shutil.copy(files[1], s3.folder / "camera/in")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert sorted(results(s3.folder / "camera/out")) == [file.name for file in files], errors


def test_ctrl_c_twice_ends_while_the_last_inputs_do_not_come(s3: S3, bench: Workbench) -> None:
    files = sorted(bench.inputs.iterdir())
    (s3.folder / "stopped/in").mkdir(parents=True)
    shutil.copy(files[0], s3.folder / "stopped/in")
    text = bench.manifest.read_text()
    bench.manifest.write_text(
        text.replace("{uri: pvc://lines/in}", "{uri: s3://lines/stopped/in, follow: true}")
    )
    process = bench.start("run", bench.manifest, "--progress", "plain")
    until((bench.outputs / files[0].name).exists, process)
    s3.process.send_signal(signal.SIGSTOP)
    try:
        errors = interrupt_twice(process)
    finally:
        s3.process.send_signal(signal.SIGCONT)
    assert process.returncode == 130, errors
    assert "no further inputs" not in errors


def test_only_a_folder_or_a_bucket_is_followed(bench: Workbench) -> None:
    text = bench.manifest.read_text()
    address = "{uri: 'https://camera.example.com/frame.npz', follow: true}"
    bench.manifest.write_text(text.replace("{uri: pvc://lines/in}", address))
    ran = bench.run("run", bench.manifest)
    assert ran.status == 2
    assert "is no place that files arrive in; inputs.follow takes a folder or a bucket" in ran.err


def test_a_model_of_a_registry_is_planned_and_one_that_is_not_there_refused(
    registry: Registry, bench: Workbench
) -> None:
    registry.push("models/small", "v1", {"small.onnx": bench.model.read_bytes()})
    text = bench.manifest.read_text()
    for tag, status in (("v1", 0), ("v2", 2)):
        address = f"oci://{registry.host}/models/small:{tag}"
        bench.manifest.write_text(text.replace("uri: small.onnx", f'uri: "{address}"'))
        ran = bench.run("plan", bench.manifest)
        assert ran.status == status, ran.err
        assert "Traceback" not in ran.err
