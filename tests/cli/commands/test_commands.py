"""The `shoal` command: help, usage, and what errors look like."""

import contextlib
import functools
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import onnx
import pytest
import typer.main
from onnx import TensorProto, helper

from cli.local.workbench import command, save_model
from shoal_cli.commands.app import app, run_app
from shoal_cli.commands.options import parse_shapes
from shoal_coordinator.command import main as coordinator
from shoal_operator.command import main as operator
from shoal_protocol.partition import document_from_json

COMMANDS = tuple(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # of a Group


ENVIRONMENT = {"PATH": "/usr/bin:/bin", "COLUMNS": "100", "NO_COLOR": "1", "HOME": "/nonexistent"}


def shoal(*arguments: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`shoal ARGUMENTS` in this process."""
    ran = command(*arguments, folder=folder, environment=ENVIRONMENT)
    return subprocess.CompletedProcess(arguments, ran.status, ran.out, ran.err)


def process(
    module: str, *arguments: str, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=folder,
        env=ENVIRONMENT,
    )


PROCESSES = ("agent", "coordinator", "operator")
"""Commands that become a process with a command line of its own."""


@functools.cache
def help_of(command: str) -> str:
    """What `shoal COMMAND --help` prints; asked once."""
    if command in PROCESSES:
        asked = process("shoal_cli", command, "--help")
        assert (asked.returncode, asked.stderr) == (0, "")
        return asked.stdout
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run_app([command, "--help"]) == 0
    return printed.getvalue()


def test_help_lists_every_command_with_what_it_does() -> None:
    shown = shoal("--help")
    assert shown.returncode == 0
    for each in COMMANDS:
        assert each in shown.stdout
    assert "--install-completion" in shown.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    assert len(help_of(command).splitlines()) > 5


@pytest.mark.parametrize("command", [each for each in COMMANDS if each != "version"])
def test_help_has_an_example(command: str) -> None:
    assert f"shoal {command} " in help_of(command).split("Example", 1)[1]


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from shoal_cli.commands.app import app, run_app\n"
        "run_app(sys.argv[1:])\n"
        "heavy = {'onnx', 'onnxruntime', 'grpc', 'numpy', 'yaml', 'urllib.request'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    for arguments in (["--help"], ["run", "--help"], ["version"]):
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)


def test_commands_are_there_where_python_leaves_docstrings_out() -> None:
    """A user may have set PYTHONOPTIMIZE for all of Python."""
    command = [sys.executable, "-OO", "-m", "shoal_cli", "run", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "--inputs" in shown.stdout


@pytest.mark.parametrize("asked", ["version", "--version"])
def test_version_names_what_it_stands_on(asked: str) -> None:
    shown = shoal(asked).stdout
    assert all(name in shown for name in ("shoal", "protocol", "python", "onnxruntime", "grpcio"))


@pytest.mark.parametrize(
    ("process", "option"),
    [("agent", "--budget"), ("coordinator", "--store"), ("operator", "--settings")],
)
def test_a_process_shows_its_own_help(process: str, option: str) -> None:
    assert option in help_of(process)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("coordinator", "--listen", "nowhere", "--store", "s"), "neither unix:/path nor"),
        (("coordinator", "--listen", "unix:s", "--store", "pool.yaml"), "pool.yaml"),
        (("operator", "--settings", "nowhere.yaml"), "nowhere.yaml"),
        (
            ("coordinator", "--listen", "unix:s", "--store", "s", "--metrics-address", "8080"),
            "HOST:PORT for metrics",
        ),
    ],
)
def test_a_process_says_in_one_line_what_is_wrong(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "pool.yaml").write_text("")
    shown = process(f"shoal_{arguments[0]}", *arguments[1:], folder=tmp_path)
    assert shown.returncode == 2
    assert shown.stderr.startswith(f"shoal {arguments[0]}: ")
    assert said in shown.stderr
    assert len(shown.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (coordinator, ("--listen", "unix:s"), "required: --store"),
        (coordinator, ("--listen", "unix:s", "--store", "s", "--task-seconds", "0"), "shorter"),
        (coordinator, ("--listen", "unix:s", "--store", "s", "--tls-ca", "a"), "go together"),
        (operator, ("--settings", "s", "--coordinator", "shelf=x"), "write NAMESPACE/POOL"),
        (operator, ("--settings", "s", "--metrics-address", "8080"), "is not HOST:PORT"),
    ],
)
def test_a_bad_command_line_of_a_process_gives_one_line_and_status_2(
    main: Callable[[Sequence[str]], int],
    arguments: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert ending.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"shoal {main.__module__.partition('_')[2].partition('.')[0]}: ")
    assert said in line


def test_completion_scripts_are_there_for_the_usual_shells() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shoal_cli", "--show-completion", "bash"],
        capture_output=True,
        text=True,
        check=False,
        # Else the name is ignored, and the shell is the one that the tests were started from.
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )
    assert "complete" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "model.onnx"], "--inputs"),
        (["run", "model.onnx", "--inputs", "i", "--outputs", "o", "--budget", "64Mb"], "64Mb"),
        (["run", "a.onnx", "b.yaml"], "not both"),
        (["run", "job.yaml", "--devices", "3"], "--devices"),
        (["run", "job.yaml", "--volume", "lines"], "CLAIM=DIR"),
        (["partition", "model.onnx"], "--fragments"),
        (["partition", "model.onnx", "--fragments", "2", "--shape", "x=a"], "INPUT=1,3,48,320"),
        (["run", "no-such-file.yaml"], "no-such-file.yaml"),
        (["nonsense"], "nonsense"),
    ],
)
def test_wrong_usage_ends_with_status_2_and_says_what_is_meant(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run_app(arguments) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert "Traceback" not in errors


def test_a_malformed_manifest_is_refused_with_file_line_and_field(tmp_path: Path) -> None:
    manifest = tmp_path / "pool.yaml"
    manifest.write_text(
        "apiVersion: shoal.dev/v1alpha1\n"
        "kind: DevicePool\n"
        "metadata: {name: shelf}\n"
        "spec:\n"
        "  budget: {memory: 64Mb}\n"
        "  residencee: Single\n"
    )
    done = shoal("run", manifest)
    assert done.returncode == 2
    assert f"{manifest}:5" in done.stderr
    assert "spec.budget.memory" in done.stderr
    assert f"{manifest}:6" in done.stderr
    assert "did you mean residency?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_is_none_is_refused_without_a_traceback(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(b"this is not a model")
    done = shoal("partition", model, "--fragments", "2")
    assert done.returncode == 2
    assert done.stderr.startswith("shoal: model refused")
    assert "Traceback" not in done.stderr


def test_a_name_that_looks_like_markup_is_shown_as_it_is(tmp_path: Path) -> None:
    name = "x[/0][bold]"
    nodes = [
        helper.make_node("Relu", [name], ["h[red]"]),
        helper.make_node("Neg", ["h[red]"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "named",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n[/]", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n[/]", 8])],
    )
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=9), tmp_path / "m.onnx")
    shown = shoal("inspect", tmp_path / "m.onnx")
    assert name in shown.stdout, shown.stderr
    assert "[?, 8]" in shown.stdout or "[n[/], 8]" in shown.stdout
    cut = shoal("partition", tmp_path / "m.onnx", "--fragments", "2")
    assert "h[red]" in cut.stdout, cut.stderr


def test_a_model_is_cut_at_tensors_whose_names_may_have_commas(tmp_path: Path) -> None:
    inner = ["ij,jk->ik", "h", "-"]
    ends = ["x", *inner, "y"]
    nodes = [helper.make_node("Relu", [each], [made]) for each, made in pairwise(ends)]
    given, taken = (helper.make_tensor_value_info(each, TensorProto.FLOAT, [1, 8]) for each in "xy")
    graph = helper.make_graph(nodes, "named", [given], [taken])
    opset = helper.make_opsetid("", 17)
    model = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=9), model)

    def boundaries(*options: str) -> list[str]:
        shown = shoal("partition", model, *options, "--document")
        assert shown.returncode == 0, shown.stderr
        document = document_from_json(shown.stdout.splitlines()[-1].encode())
        return [each.outputs[0].name for each in document.fragments]

    assert boundaries("--cut", inner[0]) == [inner[0], "y"]
    assert boundaries(*(word for name in inner for word in ("--cut", name))) == [*inner, "y"]
    assert boundaries("--cuts", "h,-") == ["h", "-", "y"]


def test_what_is_piped_is_not_cut_at_80_columns(tmp_path: Path) -> None:
    save_model(tmp_path / "model.onnx")
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    shown = subprocess.run(
        [sys.executable, "-m", "shoal_cli", "inspect", str(tmp_path / "model.onnx")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment,
    )
    assert re.search(r"sha256:[0-9a-f]{64}$", shown.stdout, re.MULTILINE)


def test_a_shape_may_be_that_of_a_scalar_and_a_name_may_be_anything() -> None:
    texts = ["x=1,3", "/a/b=c:0=2", "scalar="]
    assert parse_shapes(texts) == {"x": (1, 3), "/a/b=c:0": (2,), "scalar": ()}
