"""What a person reads who gave something wrong: what, where, what to do, and no traceback."""

import os
import pwd
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from cli.local.workbench import save_inputs, save_model
from shoal_cli.commands.app import run_app
from shoal_cli.commands.failures import INTERRUPTED, PASSING, TITLES, print_failure
from shoal_cli.local.runner import Interrupted

MANIFEST = """\
apiVersion: shoal.dev/v1alpha1
kind: DevicePool
metadata: {name: shelf}
spec:
  local: {devices: [{name: one, memory: 32Mi}]}
  budget: {memory: 32Mi}
"""
CLAIMS = f"""\
{MANIFEST}---
apiVersion: shoal.dev/v1alpha1
kind: Model
metadata: {{name: m}}
spec: {{source: {{uri: "pvc://models/m.onnx"}}}}
---
apiVersion: shoal.dev/v1alpha1
kind: InferenceJob
metadata: {{name: job}}
spec:
  modelRef: {{name: m}}
  poolRef: {{name: shelf}}
  inputs: {{uri: in}}
  outputs: {{uri: out}}
"""
RUN = ("run", "model.onnx", "--inputs", "in", "--outputs", "out")
SEEN = ("partition", "model.onnx", "--fragments", "2", "--seen")
OUTGROWN = ("partition", "model.onnx", "--fragments", "2", "--outgrown")
DIGITS = "1" * 5000
"""More than `int` takes."""
SHOWN = f"{DIGITS[:40]}..."
BENCH = ("bench-device", "model.onnx")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    save_model(folder / "model.onnx")
    save_inputs(folder / "in", files=1)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a model, inputs, a manifest, and things that are wrong."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / "pool.yaml").write_text(MANIFEST)
    (tmp_path / "text.onnx").write_text("this is no model")
    (tmp_path / "text.ONNX").write_text("this is no model")
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04 a checkpoint")
    (tmp_path / "claims.yaml").write_text(CLAIMS)
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "odd").mkdir()
    np.savez(tmp_path / "odd/a.npz", nobody=np.zeros(3))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "pool.yaml", "--nosuch"), "No such option: --nosuch"),
        (("run", "missing.yaml"), "missing.yaml: cannot be read: No such file or directory"),
        (("run", "empty"), "empty: has no .yaml, .yml, .json file"),
        (("run", "pool.yaml"), "nothing to run: there is no InferenceJob"),
        (("plan", "pool.yaml"), "nothing to plan: there is no Placement and no InferenceJob"),
        (("plan", "pool.yaml", "--devices", "2"), "--devices goes with a bare .onnx model"),
        (("plan", "model.onnx", "pool.yaml"), "one .onnx model, or manifests, not both"),
        (("plan", "model.onnx", "text.onnx"), "there are 2 models, model.onnx and text.onnx; give"),
        ((*RUN, "--verify", "2"), "no file 2; a number for an option is written as --verify=2"),
        (("plan", "model.onnx", "--budget", "1Mi"), "by itself, the limit is 1 MiB"),
        (("plan", "model.onnx", "--inputs", "gone"), "--inputs gone: there is no such folder"),
        (("plan", "model.onnx", "--inputs", "empty"), "empty: is empty: it has no .npz or .npy"),
        (("plan", "model.onnx", "--inputs", "odd"), "odd: no item can run; a.npz: lacks"),
        (("plan", "model.onnx", "--shape", "z=1"), "no input z to give a shape"),
        (("plan", "gone.onnx"), "there is no file"),
        (("plan", "model.onnx", "--devices", DIGITS), f"--devices {SHOWN}: a number from 1 to"),
        (("plan", "model.onnx", "--shape", f"x={DIGITS}"), "--shape x=1111"),
        (("plan", "model.onnx", "--shape", "x=1,-3"), "--shape x=1,-3: write INPUT=1,3,48,320"),
        (("plan", "model.onnx", "--shape", "=1"), "--shape =1: write INPUT=1,3,48,320"),
        ((*SEEN, "t=1,x"), "--seen t=1,x: write TENSOR=1,3,48,320"),
        ((*SEEN, "t"), "--seen t: write TENSOR=1,3,48,320"),
        ((*OUTGROWN, f"{DIGITS}=1"), f"--outgrown {SHOWN}: give FRAGMENT=BYTES"),
        ((*OUTGROWN, f"1={DIGITS}"), "--outgrown 1=111"),
        (("coordinator", "--host", "my host"), "--host: 'my host' is no host such as 192.168.1."),
        (("coordinator", "--host", "10.0.0.1:74"), "'10.0.0.1:74' is no host such as 192.168.1."),
        (("coordinator", "--host", "10.0.0.1:74"), "[fd00::10]; the port is said with --port"),
        ((*OUTGROWN, "1=²"), "--outgrown 1=²: give FRAGMENT=BYTES"),
        ((*RUN, "--metrics-address", f"h:{DIGITS}"), "is not HOST:PORT"),
        ((*RUN, "--budget=-5Mi"), "--budget: '-5Mi' is no size such as 64Mi"),
        ((*RUN, "--budget", "0"), "--budget 0: a device has from 1Mi to 16Ti"),
        ((*RUN, "--budget", "64"), "64: a device has from 1Mi to 16Ti (did you mean 64Mi?)"),
        ((*RUN, "--budget", "NaN"), "--budget: 'NaN' is no size such as 64Mi"),
        ((*RUN, "--budget", "24MB"), "1.5Gi or 500M (did you mean 24Mi?)"),
        ((*RUN, "--budget", "1e999999999"), "--budget: '1e999999999' is no size"),
        ((*RUN, "--budget", "8Mi", "--budget", "9Mi", "--devices", "3"), "is given 2 times"),
        ((*RUN, "--devices", "99999999999999999999"), "is not in the range 1<=x<=64"),
        ((*RUN, "--tolerance", "nan"), "nan is not a finite number"),
        ((*RUN, "--tolerance", "inf"), "inf is not a finite number"),
        ((*RUN, "--task-seconds", "nan"), "nan is not a finite number"),
        ((*RUN, "--task-seconds", "inf"), "inf is not in the range 0.1<=x<=86400000"),
        ((*RUN, "--task-seconds", "1e9"), "is not in the range 0.1<=x<=86400000"),
        ((*BENCH, "--task-seconds", "inf"), "inf is not in the range 0.1<=x<=86400000"),
        (("top", "--interval", "nan"), "nan is not a finite number"),
        ((*RUN, "--policy", "best"), "'best' is not one of 'fifo', 'leastloaded'"),
        ((*RUN, "--fragments", "200"), "cannot make 200 fragments: the finest possible cut"),
        pytest.param(
            *((*RUN, "--budget", "1Mi"), "by itself, the limit is 1 MiB"),
            marks=pytest.mark.minutes,
        ),
        ((*RUN, "--otlp", "localhost:4318"), "'localhost:4318' is not a URL such as http://"),
        ((*RUN, "--report", "empty"), "--report empty: is a folder; name a file"),
        ((*RUN, "--report", "model.onnx/x"), "model.onnx: File exists"),
        ((*RUN, "--report", "/proc/report"), "/proc/report: /proc cannot be written"),
        ((*RUN, "--html", "empty"), "--html empty: is a folder; name a file"),
        (("report", "gone.json"), "there is no gone.json; name a report (`shoal run --report`)"),
        (("report", "empty"), "empty has no report.json: no run has ended there"),
        (("report", "pool.yaml"), "pool.yaml is no report: it is not JSON"),
        ((*RUN, "--work", "model.onnx"), "model.onnx: File exists"),
        (("run", "gone.onnx", *RUN[2:]), "there is no file"),
        (("run", "folder.onnx", *RUN[2:]), "folder.onnx is a folder, not a file"),
        (("run", "text.onnx", *RUN[2:]), "text.onnx: is not an ONNX model"),
        (("run", "empty.onnx", *RUN[2:]), "empty.onnx: has 0 bytes"),
        pytest.param(
            *(("run", "text.ONNX", *RUN[2:]), "text.ONNX: is not an ONNX model"),
            marks=pytest.mark.minutes,
        ),
        (("run", "model.pt", *RUN[2:]), "model.pt is neither an .onnx model nor a manifest"),
        (("inspect", "model.pt"), "is not an ONNX model but a zip archive, as PyTorch writes"),
        (("run", "claims.yaml"), "pvc://models/m.onnx: there is no folder"),
        (("run", "claims.yaml"), "say --volume models=DIR\n"),
        (("run", "claims.yaml", "--volume", "modles=in"), "(did you mean models?)"),
        ((*RUN, "--volume", "data=in"), "--volume data: nothing is at pvc://data/"),
        ((*RUN[:3], "gone", *RUN[4:]), "there is no folder of inputs"),
        ((*RUN[:3], "pool.yaml", *RUN[4:]), "is a file; inputs are a folder of .npz and .npy"),
        ((*RUN[:3], "empty", *RUN[4:]), "has no .npz or .npy file"),
        ((*RUN[:5], "in"), "would write over its own inputs"),
        (
            ("run", "text.onnx", *RUN[2:5], "pool.yaml/out"),
            "cannot be written: Not a directory",
        ),
        (("run", "text.onnx", *RUN[2:5], "/proc/out"), "cannot be written: No such file"),
        (("bench-device", "gone.onnx"), "gone.onnx: there is no such file"),
        (("bench-device", "folder.onnx"), "folder.onnx: is a folder, not a file"),
        (("bench-device", "text.onnx"), "text.onnx: is not an ONNX model"),
        ((*BENCH, "--budget", "64Mb"), "--budget: '64Mb' is no size"),
        ((*BENCH, "--budget", "0"), "--budget 0: a device has from 1Mi to 16Ti"),
        (
            (*BENCH, "--budget", "1Mi"),
            "device-1 has 1 MiB; raise the budget, or let shoal run cut it finer",
        ),
        ((*BENCH, "--budgets", "8Mi"), "--budgets 8Mi: write FROM..TO, such as ample..least"),
        ((*BENCH, "--budgets", "ample..all"), "--budgets: 'all' is no size"),
        (
            (*BENCH, "--budgets", "ample..1Mi"),
            "device-1 has 3 MiB; raise the budget, or let shoal run cut it finer",
        ),
        ((*BENCH, "--budgets", "ample..least", "--budget", "8Mi"), "not both"),
        ((*BENCH, "--turns", "1"), "'--turns'"),
        ((*BENCH, "--picture", "picture.png"), "picture.png: pictures are SVG"),
        ((*BENCH, "--picture", "gone/picture.svg"), "gone cannot be written"),
        ((*BENCH, "--shape", "x=1"), "tensor x: cannot have the shape [1]"),
        ((*BENCH, "--shape", "y=1,256"), "no input y to give a shape"),
        ((*BENCH, "--inputs", "empty"), "inputs empty: is empty: it has no .npz or .npy"),
    ],
)
def test_what_was_wrong_is_said_in_a_few_lines(
    folder: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert len(shown.err.splitlines()) <= 7


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ("\tbudget: {memory: 32Mi}", "pool.yaml:6: is not YAML: found character '\\t'"),
        ("  budgt: {memory: 32Mi}", "pool.yaml:6: DevicePool shelf: spec.budgt: there is no such"),
        ("  budget: {memory: -32Mi}", 'spec.budget.memory: "-32Mi" is not a quantity'),
        ("  budget: {memory: 0}", "spec.budget.memory: 0 is less than 1Mi"),
        ("  budget: {memory: 1Ki}", "spec.budget.memory: 1Ki is less than 1Mi\n"),
        ("  budget: {memory: .nan}", "spec.budget.memory: NaN is not a quantity"),
        ("  budget: {memory: 1e99}", "spec.budget.memory: 1e99 is more than 16Ti"),
        ("  residency: Singel", '"Singel" is not one of Adaptive, Single (did you mean Single?)'),
        (f"---\n{MANIFEST}", "DevicePool shelf is there already, at pool.yaml:3"),
    ],
)
def test_a_wrong_line_of_a_manifest_is_named(
    folder: Path, instead: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = MANIFEST.replace("  budget: {memory: 32Mi}", instead)
    (folder / "pool.yaml").write_text(text)
    assert run_app(["run", "pool.yaml"]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.real
def test_broken_inputs_fail_one_by_one_with_their_reasons_each_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = np.load(folder / "in" / "00.npz")["x"]
    np.savez(folder / "in" / "name.npz", other=given)
    np.savez(folder / "in" / "none.npz")
    np.savez(folder / "in" / "type.npz", x=given.astype(np.int64))
    (folder / "in" / "cut.npz").write_bytes((folder / "in" / "00.npz").read_bytes()[:-40])
    assert run_app([*RUN, "--devices", "1", "--progress", "plain"]) == 1
    shown = capsys.readouterr().out
    assert "name.npz: lacks x; it holds other" in shown
    assert "none.npz: lacks x; it holds no array" in shown
    assert "type.npz: has x of type int64, the model takes float32" in shown
    assert "cut.npz: is no readable .npz file" in shown
    assert shown.count("cut.npz") == 1
    assert "the results of the other" in shown


@pytest.mark.parametrize(
    "command",
    [RUN, ("plan", "model.onnx"), BENCH, ("coordinator",), ("plan", "model.onnx", "--work", "own")],
)
def test_a_user_without_a_home_folder_is_told_what_to_set(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
) -> None:
    def unknown(number: int) -> pwd.struct_passwd:
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    if "--work" in command:
        assert run_app(list(command)) == 0
        return
    assert run_app(list(command)) == 2
    assert "this user has no home folder: set HOME, or XDG_" in capsys.readouterr().err


@pytest.mark.parametrize("command", [RUN, ("coordinator",)])
def test_the_root_folder_is_no_home_of_a_user_who_may_not_write_it(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
) -> None:
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/")
    allowed = os.access
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != "/" and allowed(path, mode))
    assert run_app(list(command)) == 2
    assert "this user has no home folder: set HOME, or XDG_" in capsys.readouterr().err


@pytest.mark.parametrize("command", [RUN, ("plan", "model.onnx"), BENCH])
def test_a_work_folder_that_cannot_be_made_is_named_with_the_way_out(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))
    assert run_app(list(command)) == 2
    title, said = capsys.readouterr().err.splitlines()[-2:]
    assert title == "shoal: the work folder cannot be used"
    assert "Not a directory; name another one with --work DIR" in said


@pytest.mark.parametrize("name", TITLES)
def test_every_error_that_has_a_title_is_a_class_of_that_name(name: str) -> None:
    module, _, found = name.rpartition(".")

    assert issubclass(getattr(import_module(module), found), Exception)


def test_an_interruption_before_anything_ran_says_what_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert print_failure(Interrupted()) == INTERRUPTED
    assert "no process is left, and what was prepared is kept" in capsys.readouterr().err


def test_every_error_that_passes_has_a_title() -> None:
    assert {name.rpartition(".")[2] for name in TITLES} >= PASSING


def test_a_plan_says_what_of_the_manifests_it_leaves_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "models").mkdir()
    suspended = CLAIMS.replace("outputs: {uri: out}", "outputs: {uri: out}\n  suspend: true")
    (folder / "job.yaml").write_text(suspended)
    assert run_app(("plan", "job.yaml")) == 2
    said = capsys.readouterr().err
    assert "InferenceJob job: suspended, not run" in said
    assert "no InferenceJob that is not" in said
