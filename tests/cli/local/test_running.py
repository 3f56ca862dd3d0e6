"""`shoal run` from outside: real processes and signals, results compared with the whole model."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnxruntime
import pytest

from cli.local.workbench import (
    WIDTH,
    Ran,
    Workbench,
    assert_results_are_the_whole_models,
    make_workbench,
    save_inputs,
)
from shoal_cli.local.cgroups import Unavailable, find_hierarchy, open_groups, run_name
from shoal_cli.local.report import SCHEMA_PATH
from small_disk import small_disk

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]


def until(true: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait for something that happens in other processes; at most a minute."""
    give_up = time.monotonic() + 60
    while not true():
        assert time.monotonic() < give_up, "it did not happen within a minute"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.05)


def children(folder: Path) -> dict[int, str]:
    """Processes of ours that were started for a folder, with their command lines."""
    found: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        line = b" ".join(words).decode(errors="replace")
        if str(folder) in line and ("shoal_agent" in line or "shoal_coordinator" in line):
            found[int(path.parent.name)] = line
    return found


def agents(folder: Path) -> list[int]:
    return [number for number, line in children(folder).items() if "shoal_agent" in line]


def coordinators(folder: Path) -> list[int]:
    return [number for number, line in children(folder).items() if "shoal_coordinator" in line]


def cgroups_of(run: int) -> list[Path]:
    """Groups of the run with this process number."""
    hierarchy = find_hierarchy(
        Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
    )
    parents = getattr(hierarchy, "parents", ())
    return [group for parent in parents for group in parent.glob(f"shoal-{run}-*")]


def sockets_of(run: int) -> list[Path]:
    return list(Path("/tmp").glob(f"shoal-{os.getuid()}-{run}-*"))  # noqa: S108 - its default place


def assert_nothing_is_left(bench: Workbench, run: int) -> None:
    until(lambda: not children(bench.folder))
    assert not cgroups_of(run)
    assert not sockets_of(run)
    assert not list(bench.outputs.glob("*.tmp"))
    for file in bench.outputs.glob("*.npz"):
        with np.load(file) as results:
            assert all(np.isfinite(results[name]).all() for name in results.files)


def machine_has_cgroups() -> bool:
    groups = open_groups(f"{run_name()}0")
    if isinstance(groups, Unavailable):
        return False
    groups.remove()
    return True


def assert_each_agent_is_in_a_cgroup_of(run: int, bench: Workbench) -> None:
    members = {
        int(number)
        for groups in cgroups_of(run)
        for group in groups.iterdir()
        if group.is_dir()
        for number in (group / "cgroup.procs").read_text().split()
    }
    assert members >= set(agents(bench.folder))


def assert_limits_are_of_floor_and_budget(report: Mapping[str, Any]) -> None:
    assert report["enforcement"]["mode"].startswith("cgroup v")
    for device in report["devices"]:
        # What was charged to the idle agent, and the budget; its shared pages may be charged
        # elsewhere.
        charged = device["limit_bytes"] - device["budget_bytes"]
        assert 16 << 20 < charged < device["floor_bytes"] + (4 << 20)
        assert device["out_of_memory_kills"] == 0


def job_of(ran: Ran) -> dict[str, object]:
    return ran.report["jobs"][0]  # type: ignore[index,no-any-return]


@pytest.fixture
def busy(bench: Workbench) -> Workbench:
    """A run that lasts by what its links take, two items at once, and not by what it computes: a
    signal comes while it goes on, also on a machine that is busy."""
    save_inputs(bench.inputs, files=12, stacked=2)
    text = bench.manifest.read_text() + "  parallelism: 2\n"
    slow = "link: {latencyMilliseconds: 100}, cpus: '0.5', memory:"
    bench.manifest.write_text(text.replace("memory:", slow, 3))
    return bench


def start_and_wait_for_results(bench: Workbench) -> subprocess.Popen[str]:
    """A run that has written some results, and is far from its end."""
    process = bench.start("run", bench.manifest, "--progress", "plain")
    until(lambda: len(list(bench.outputs.glob("*.npz"))) >= 2, process)
    return process


def test_a_folder_may_have_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"lat\xe9")
    folder.mkdir()
    made = make_workbench(folder)
    environment = {**made.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    bench = replace(made, environment=environment)
    for arguments in (("plan", bench.manifest), ("run", bench.manifest, "--report", bench.report)):
        ran = bench.run(*arguments)
        assert ran.status == 0, ran.err
    folder.rename(tmp_path / "latin")  # ONNX Runtime itself takes no such name
    assert_results_are_the_whole_models(replace(bench, folder=tmp_path / "latin"))


def test_a_bare_model_runs_without_any_manifest(bench: Workbench) -> None:
    ran = bench.run(
        *("run", bench.model, "--inputs", bench.inputs, "--outputs", bench.outputs),
        *("--devices", "2", "--budget", "8Mi", "--fragments", "2", "--enforce", "none"),
        *("--report", bench.report, "--relay", "--no-keep", "--otlp", "http://127.0.0.1:1"),
    )
    assert ran.status == 0, ran.err
    assert_results_are_the_whole_models(bench)
    assert re.search(r"([0-9]+) of \1 spans were not delivered to http://127.0.0.1:1;", ran.err)
    assert [device["name"] for device in ran.report["devices"]] == ["device-1", "device-2"]  # type: ignore
    assert ran.report["enforcement"]["mode"] == "none"  # type: ignore[index]
    assert "measured only" in ran.out
    assert not list(bench.folder.glob("cache/shoal/runs/*/store"))


def test_a_run_whose_devices_would_store_fragments_in_memory_says_so(bench: Workbench) -> None:
    with small_disk(bench.folder / "memory", "64m"):
        ran = bench.run(*("run", bench.manifest, "--work", "memory/work", "--report", bench.report))
    assert ran.status == 0, ran.err
    said = "the work folder memory/work is on a tmpfs: what devices store there is memory too"
    assert said in ran.report["notes"][0]  # type: ignore[index]
    assert said in " ".join(ran.out.split())


@pytest.mark.minutes
def test_an_item_that_does_not_suit_the_model_fails_alone(bench: Workbench) -> None:
    np.savez(bench.inputs / "02.npz", x=np.zeros((2, 7), np.float32))
    ran = bench.run("run", bench.manifest, "--verify", "--report", bench.report)
    assert ran.status == 1
    job = job_of(ran)
    assert (job["succeeded"], job["failed"]) == (7, 1)
    assert (job["state"], job["reason"]) == ("Failed", "ItemsFailed")
    assert "1 of 8 items failed; the results of the other 7 are in" in " ".join(ran.out.split())
    assert job["failures"][0]["input"] == "02.npz"  # type: ignore[index]
    assert "02.npz" in ran.out
    assert job["verification"]["skipped"] == 1  # type: ignore[index]
    assert not (bench.outputs / "02.npz").exists()


def test_a_fragment_over_every_budget_is_refused_with_what_it_needs_and_what_there_is(
    bench: Workbench,
) -> None:
    bench.write_manifest(fragments=1, budget="2Mi")
    ran = bench.command("run", bench.manifest, "--report", bench.report)
    assert ran.status == 2
    assert "fragment 0 of small-3 needs" in ran.err
    assert "one has 2 MiB" in ran.err
    assert "Traceback" not in ran.err
    assert not ran.report


def test_a_folder_without_inputs_is_refused(bench: Workbench) -> None:
    for file in bench.inputs.iterdir():
        file.unlink()
    empty = bench.command("run", bench.manifest)
    assert empty.status == 2
    assert "has no .npz or .npy file" in empty.err
    bench.inputs.rmdir()
    missing = bench.command("run", bench.manifest)
    assert missing.status == 2
    assert str(bench.inputs) in missing.err


def largest_differences(bench: Workbench) -> tuple[float, float]:
    """From the whole model: absolute, and relative to each item's largest value."""
    session = onnxruntime.InferenceSession(str(bench.model), providers=["CPUExecutionProvider"])
    absolute = relative = 0.0
    for file in bench.inputs.glob("*.npz"):
        with np.load(file) as inputs, np.load(bench.outputs / file.name) as outputs:
            (whole,) = session.run(None, {"x": inputs["x"]})
            difference = float(np.abs(outputs["y"] - whole).max())
            absolute = max(absolute, difference)
            relative = max(relative, difference / float(np.abs(whole).max()))
    return absolute, relative


@pytest.mark.parametrize(
    "precision",
    [*(pytest.param(each, marks=pytest.mark.minutes) for each in (None, "Exact")), "Half"],
)
def test_slow_links_carry_half_precision_only_where_the_job_allows_it(
    bench: Workbench, precision: str | None
) -> None:
    chance = np.random.default_rng(3)
    for number in range(48):  # each link learns its speed first, then tries every codec
        array = chance.standard_normal((128, WIDTH)).astype(np.float32)
        np.savez(bench.inputs / f"{number:02}.npz", x=array)
    text = bench.manifest.read_text().replace("memory:", "link: {rate: 50M}, memory:", 3)
    allowed = "" if precision is None else f"  transferPrecision: {precision}\n"
    bench.manifest.write_text(text + allowed)
    ran = bench.run("run", bench.manifest)
    assert ran.status == 0, ran.err
    absolute, relative = largest_differences(bench)
    if precision == "Half":
        assert absolute > 1e-5, "nothing travelled as float16"
        assert relative < 5 * 2**-11  # five times on its way, each time rounded to 11 bits
    else:
        assert absolute <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.minutes)]
)
def test_an_interrupted_run_leaves_nothing_and_the_next_one_resumes(
    busy: Workbench, number: signal.Signals
) -> None:
    process = start_and_wait_for_results(busy)
    if enforced := machine_has_cgroups():
        assert_each_agent_is_in_a_cgroup_of(process.pid, busy)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "run the same command again to resume" in errors
    assert_nothing_is_left(busy, process.pid)
    kept = ("--enforce", "cgroup") if enforced else ()
    resumed = busy.run("run", busy.manifest, *kept, "--report", busy.report, "--quiet")
    assert (resumed.status, resumed.out, resumed.err) == (0, "", "")
    assert 0 < job_of(resumed)["resumed"] < job_of(resumed)["items"]  # type: ignore[operator]
    if enforced:
        assert_limits_are_of_floor_and_budget(resumed.report)
    assert_results_are_the_whole_models(busy)


@pytest.mark.minutes
def test_a_signal_while_it_stops_does_not_break_the_stopping_off(bench: Workbench) -> None:
    process = bench.start("run", bench.manifest, "--report", bench.report, "--progress", "plain")
    assert process.stderr is not None
    while process.stderr.readline() != "stopping\n":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert_nothing_is_left(bench, process.pid)
    report = json.loads(bench.report.read_bytes())
    assert report["jobs"][0]["state"] == "Complete"
    assert [device["name"] for device in report["devices"]] == ["one", "two", "three"]


@pytest.mark.slow
@pytest.mark.minutes
def test_a_killed_run_leaves_no_process_and_the_next_one_sweeps_and_resumes(
    busy: Workbench,
) -> None:
    process = start_and_wait_for_results(busy)
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not children(busy.folder))
    resumed = busy.run("run", busy.manifest, "--report", busy.report)
    assert resumed.status == 0, resumed.err
    assert job_of(resumed)["resumed"] > 0  # type: ignore[operator]
    assert_nothing_is_left(busy, process.pid)
    assert_results_are_the_whole_models(busy)


@pytest.mark.slow
def test_killed_agents_and_a_killed_coordinator_are_started_again(busy: Workbench) -> None:
    page = busy.folder / "page.html"
    process = busy.start(
        *("run", busy.manifest, "--report", busy.report, "--html", page, "--progress", "plain")
    )
    until(lambda: len(list(busy.outputs.glob("*.npz"))) >= 2, process)
    lines = children(busy.folder).values()
    # Docstrings would be 2 MiB of each agent.
    assert sum("-OO -P -m shoal_agent" in line for line in lines) == len(agents(busy.folder)) > 0
    os.kill(agents(busy.folder)[0], signal.SIGKILL)
    done = len(list(busy.outputs.glob("*.npz")))
    until(lambda: len(list(busy.outputs.glob("*.npz"))) > done + 2, process)
    os.kill(coordinators(busy.folder)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    report = json.loads(busy.report.read_bytes())
    assert "killed by SIGKILL; starting it again" in errors
    assert sum(device["restarts"] for device in report["devices"]) == 1
    assert report["coordinator_restarts"] == 1
    assert report["jobs"][0]["items"] == report["jobs"][0]["succeeded"]
    assert report["jobs"][0]["resumed"] == 0, "nothing was there before the run"
    jsonschema.validate(report, json.loads(SCHEMA_PATH.read_text()))
    assert [death["cause"] for death in report["deaths"]] == ["killed by SIGKILL"] * 2
    assert "coordinator killed by SIGKILL" in page.read_text()
    assert report["timelines"], "what the second coordinator recorded is there at least"
    assert_results_are_the_whole_models(busy)
    assert_nothing_is_left(busy, process.pid)


SECOND = """---
apiVersion: shoal.dev/v1alpha1
kind: DevicePool
metadata: {name: loft}
spec:
  local: {devices: [{name: one, memory: 16Mi, cpus: "0.5"}]}
  budget: {memory: 16Mi}
  residency: Single
---
apiVersion: shoal.dev/v1alpha1
kind: InferenceJob
metadata: {name: again}
spec:
  modelRef: {name: small}
  poolRef: {name: shelf}
  inputs: {uri: lines/in}
  outputs: {uri: again}
---
apiVersion: shoal.dev/v1alpha1
kind: InferenceJob
metadata: {name: single}
spec:
  partitionRef: {name: small-3}
  poolRef: {name: loft}
  inputs: {uri: lines/in}
  outputs: {uri: single}
  mode: Barrier
"""


def test_several_jobs_on_several_pools_run_in_one_go(bench: Workbench) -> None:
    bench.manifest.write_text(bench.manifest.read_text() + SECOND)
    ran = bench.run("run", bench.manifest, "--report", bench.report)
    assert ran.status == 0, ran.out + ran.err
    jobs = {job["name"]: job for job in ran.report["jobs"]}  # type: ignore[attr-defined]
    assert {name: job["succeeded"] for name, job in jobs.items()} == {
        "job": 10,
        "again": 10,
        "single": 10,
    }
    assert len(jobs["again"]["stages"]) == 1, "the whole model fits every device"
    (stage,) = jobs["again"]["plan"]["stages"]
    assert {each["device"] for each in stage["devices"]} <= {
        f"shelf.{n}" for n in ("one", "two", "three")
    }
    assert stage["predicted_seconds"] > 0
    assert stage["measured_seconds"] > 0
    assert jobs["again"]["plan"]["measured"]["items_per_second"] > 0
    devices = {device["name"]: device for device in ran.report["devices"]}  # type: ignore
    assert set(devices) == {"shelf.one", "shelf.two", "shelf.three", "loft.one"}
    assert devices["loft.one"]["evictions"] >= 2
    served = {name for stage in jobs["job"]["stages"] for name in stage["devices"]}
    assert served
    assert served <= set(devices)
    for folder in ("again", "single"):
        for file in bench.outputs.glob("*.npz"):
            with np.load(file) as one, np.load(bench.folder / folder / file.name) as other:
                np.testing.assert_allclose(one["y"], other["y"], rtol=0, atol=1e-5)


def test_a_plan_is_shown_without_running_anything(bench: Workbench) -> None:
    shown = bench.command("plan", bench.manifest)
    assert shown.status == 0, shown.err
    assert "InferenceJob job" in shown.out
    assert "Rejected" in shown.out
    assert not bench.outputs.exists()


def test_a_bare_model_is_planned_with_the_smallest_budget_that_works(bench: Workbench) -> None:
    pool = ("--devices", "2", "--budget", "32Mi", "--fragments", "3")
    shown = bench.command("plan", bench.model, *pool, "--inputs", bench.inputs)
    assert shown.status == 0, shown.err
    assert "small.onnx on 2 devices" in shown.out
    assert "Memory" in shown.out
    assert "at least" in shown.out
    assert "Smallest budget that works, cut as it is: " in shown.out
    assert not bench.outputs.exists()


def test_a_plan_is_given_to_programs_and_drawn(bench: Workbench) -> None:
    picture = bench.folder / "plan.svg"
    shown = bench.command("plan", bench.manifest, "--output", "json", "--svg", picture)
    assert shown.status == 0, shown.err
    (planned,) = json.loads(shown.out)["plans"]
    assert planned["name"] == "InferenceJob job"
    served = [each for stage in planned["plan"]["stages"] for each in stage["fragments"]]
    assert served == [each["index"] for each in planned["fragments"]]
    names = {each["name"] for each in planned["devices"]}
    used = {each["device"] for s in planned["plan"]["stages"] for each in s["devices"]}
    assert used <= names
    assert planned["budgets"]["smallest_bytes"] > 0
    assert planned["refusal"] is None
    assert all(f">{name}<" in picture.read_text() for name in used)


def test_a_partition_is_shown_and_kept_where_asked(bench: Workbench) -> None:
    store = bench.folder / "store"
    shown = bench.command("partition", bench.model, "--fragments", "3", "--out", store)
    assert shown.status == 0, shown.err
    assert "3 fragments of sha256:" in shown.out
    assert "Boundaries" in shown.out
    assert "balance:" in shown.out
    assert len(list(store.glob("fragments/*/fragment.json"))) == 3
    assert (store / "partitions" / "small" / "partition.json").is_file()
