"""What a stranger's model calls its tensors is shown, and commands nothing to the terminal."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rich.text import Text

from cli.local.test_report import FAILED, REPORT
from shoal_cli.commands.app import run_app
from shoal_cli.commands.columns import ColumnTable
from shoal_cli.commands.tables import errors, output, print_summary
from shoal_cli.local.report import FailedItem

TITLE = "\x1b]0;mine now\x07"
"""Has a terminal show another title."""
SHOWN = r"\x1b]0;mine now\x07"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    weights = numpy_helper.from_array(np.zeros((4, 4), np.float32), f"w{TITLE}")
    nodes = [
        helper.make_node("MatMul", [f"x{TITLE}", weights.name], [f"h{TITLE}"], f"first{TITLE}"),
        helper.make_node("Relu", [f"h{TITLE}"], [f"y{TITLE}"], f"second{TITLE}"),
    ]
    value = [(f"{name}{TITLE}", TensorProto.FLOAT, [1, 4]) for name in ("x", "y")]
    inputs, outputs = ([helper.make_tensor_value_info(*each)] for each in value)
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weights])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    made.ir_version = 8
    onnx.save(made, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.mark.parametrize("command", ["inspect", "partition --fragments 2"])
def test_a_table_shows_the_letters_of_a_name(
    model: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command.split()
    assert run_app([name, str(model), *options]) == 0
    shown = capsys.readouterr().out
    assert "x\\x1b]0;mine" in shown
    assert "\x1b" not in shown


def test_so_does_a_refusal(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stranger = onnx.load(model)
    stranger.graph.node[1].domain = "theirs"
    onnx.save(stranger, model)
    assert run_app(["inspect", str(model)]) == 2
    shown = capsys.readouterr().err
    assert f"second{SHOWN}" in shown
    assert "\x1b" not in shown


def test_and_progress_of_a_file_that_is_called_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = tmp_path / f"a{TITLE}.onnx"
    shutil.copyfile(model, named)
    assert run_app(["plan", str(named), "--devices", "1", "--budget", "64Mi"]) == 0
    captured = capsys.readouterr()
    assert r"a\x1b]0;mine now" in captured.err + captured.out
    assert "\x1b" not in captured.err + captured.out


@pytest.mark.parametrize("width", range(40, 90, 7))
def test_a_line_that_names_a_file_so_keeps_all_its_words(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    reason = " ".join(f"word{number}" for number in range(40))
    failure = FailedItem(item=0, input=f"a{TITLE}\n.npy", reason=reason)
    print_summary(output(), replace(REPORT, jobs=(replace(FAILED, failures=(failure,)),)))
    shown = capsys.readouterr().out
    assert rf"ocr: a{SHOWN}\n.npy: {reason}" in " ".join(shown.split())


def test_a_column_is_as_wide_as_what_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    table = ColumnTable(rows=(TITLE,), names=[("name", str)], columns=[("again", str)])
    output().print(table)
    assert capsys.readouterr().out.splitlines()[-1].split("  ") == [SHOWN, SHOWN]


def test_colours_of_our_own_stay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    errors().print(Text("a\x1b[2Jb", style="bold"))
    assert capsys.readouterr().err == "\x1b[1ma\\x1b[2Jb\x1b[0m\n"
