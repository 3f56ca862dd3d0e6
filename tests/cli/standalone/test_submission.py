"""A job's name on a coordinator says what its results depend on, and nothing else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cli.local.workbench import WIDTH, save_inputs, save_model
from shoal_cli.local.orders import JobOrder, JobRefused, bare_manifests, read_orders
from shoal_cli.local.planned_jobs import PlannedJob
from shoal_cli.local.planning import plan_on_pool
from shoal_cli.local.preparation import Prepared, cut_into_store, partition_path
from shoal_cli.local.watch import DeviceTally
from shoal_cli.standalone.remote_devices import as_measured, device_seen, on_devices
from shoal_cli.standalone.sent_jobs import Sent, drop_failures, name_there, other_work_note
from shoal_protocol.choices import Mode, Policy, Residency
from shoal_protocol.partition import document_from_json
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1.session_pb2 import Speed

DEVICES = tuple(
    api.DeviceStatus(
        name=name, budget_bytes=size << 20, speed=Speed(convolution_flops_per_second=flops)
    )
    for name, size, flops in (("pi-4", 64, 4e9), ("pi-zero", 2, 1e9))
)


@pytest.fixture
def order(tmp_path: Path) -> JobOrder:
    save_model(tmp_path / "small.onnx")
    save_inputs(tmp_path / "in", 2)
    manifests = bare_manifests(
        tmp_path / "small.onnx",
        inputs=tmp_path / "in",
        outputs=tmp_path / "out",
        budgets=[device.budget_bytes for device in DEVICES],
        fragments=None,
        residency=Residency.ADAPTIVE,
        policy=Policy.MABAC,
        mode=Mode.STREAMING,
    )
    orders = as_measured(read_orders(on_devices(manifests, DEVICES), {}), DEVICES)
    return orders.jobs[0]


def planned(order: JobOrder, store: Path) -> PlannedJob:
    cut_into_store(order.plan.cut, store, lambda done, total: None)
    path = partition_path(store, order.plan.cut.name)
    document = document_from_json(path.read_bytes())
    prepared = Prepared(order=order.plan.cut, document=document, path=path, advice="")
    return PlannedJob(order=order, prepared=prepared, plan=plan_on_pool(order.plan, prepared))


@pytest.fixture
def job(order: JobOrder, tmp_path: Path) -> PlannedJob:
    return planned(order, tmp_path / "store")


def test_plans_are_for_the_devices_of_the_coordinator(job: PlannedJob) -> None:
    planned_for = job.order.plan.cut.devices
    assert [each.name for each in planned_for] == ["pi-4", "pi-zero"]
    assert [each.budget_bytes for each in planned_for] == [64 << 20, 2 << 20]
    assert planned_for[0].flops_per_second == 4 * planned_for[1].flops_per_second
    named = {name for homes in job.plan.homes() for name in homes}
    assert named <= {"pi-4", "pi-zero"}


def test_a_request_names_no_folder_of_this_machine(job: PlannedJob, tmp_path: Path) -> None:
    request = Sent(name_there(job), job).request()
    assert (request.inputs_uri, request.outputs_uri) == ("", "")
    assert str(tmp_path).encode() not in request.SerializeToString()


def test_the_same_work_has_the_same_name_wherever_results_go(
    job: PlannedJob, tmp_path: Path
) -> None:
    moved = replace(job, order=replace(job.order, outputs=tmp_path / "elsewhere"))
    assert name_there(moved) == name_there(job)
    assert name_there(job).startswith("small-")


def test_other_inputs_are_another_job(job: PlannedJob) -> None:
    before = name_there(job)
    changed = np.zeros((4, WIDTH), np.float32)
    np.savez(job.order.inputs / "00.npz", x=changed)
    assert name_there(job) != before


def test_a_job_of_that_name_with_other_inputs_is_told(job: PlannedJob) -> None:
    sent = Sent(name_there(job), job)
    assert other_work_note(sent, ["smaller-0d41b7aa", "small-2-0d41b7aa", "lines"]) == ""
    assert other_work_note(sent, ["small-0d41b7aa", sent.name]) == "", "it resumes"
    told = other_work_note(sent, ["lines", "small-0d41b7aa"])
    assert told.startswith(f"{sent.name} is a new job: small-0d41b7aa there has other inputs")


def test_a_complete_job_leaves_nothing_of_what_failed_before(job: PlannedJob) -> None:
    sent = Sent(name_there(job), job)
    drop_failures(sent.outputs)
    job.order.outputs.mkdir()
    for name in ("failures.json", "00.npz"):
        (job.order.outputs / name).touch()
    drop_failures(sent.outputs)
    assert [path.name for path in job.order.outputs.iterdir()] == ["00.npz"]


def test_another_model_is_another_job(job: PlannedJob, tmp_path: Path) -> None:
    before = name_there(job)
    model = job.order.plan.cut.path
    model.write_bytes(model.read_bytes().replace(b"small", b"other"))
    assert name_there(planned(job.order, tmp_path / "store")) != before


def test_a_long_name_stays_one_that_a_job_can_have(job: PlannedJob) -> None:
    long = replace(job.order.job.metadata, name="n" * 63)
    named = replace(job, order=replace(job.order, job=replace(job.order.job, metadata=long)))
    assert len(name_there(named)) <= 63


def test_inputs_that_are_none_are_refused_before_anything_is_sent(job: PlannedJob) -> None:
    for path in job.order.inputs.iterdir():
        path.unlink()
    with pytest.raises(JobRefused, match="job small: "):
        name_there(job)


def test_a_peak_within_a_budget_of_before_is_no_excess_unless_the_coordinator_says_so(
    job: PlannedJob,
) -> None:
    tally = DeviceTally()
    for budget, peak in ((80, 10), (80, 51), (41, 51)):
        tally.add(api.DeviceStatus(name="pi-4", budget_bytes=budget, peak_bytes=peak))
    seen = device_seen([job], "pi-4", tally)
    assert (seen.within_budget, seen.budget_bytes, seen.peak_bytes_above_floor) == (True, 80, 51)
    tally = DeviceTally()  # of a job that began when it had less, after an older one
    tally.add(api.DeviceStatus(name="pi-4", budget_bytes=41, peak_bytes=51))
    assert device_seen([job], "pi-4", tally).within_budget
    excess = api.BudgetExcess(peak_bytes=51, budget_bytes=41)
    tally.add(api.DeviceStatus(budget_bytes=41, peak_bytes=51, budget_excess=excess))
    assert not device_seen([job], "pi-4", tally).within_budget
