"""A small model with its inputs, and `shoal` run on it as a user runs it."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import forked
from shoal_cli.commands.app import run_app
from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.preparation import cut_into_store, partition_path
from shoal_planner.devices import PoolDevice
from shoal_protocol.partition import PartitionDocument, document_from_json
from shoal_protocol.units import Bytes

MIB = 1 << 20
LAYERS = 6
WIDTH = 256


def save_model(path: Path) -> None:
    """Six layers with a skip over each pair: 1.5 MiB of weights, a batch of any size."""
    chance = np.random.default_rng(7)
    nodes, weights = [], []
    last, skip = "x", "x"
    for layer in range(LAYERS):
        weight = chance.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"m{layer}"]))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [f"r{layer}"]))
        last = f"r{layer}"
        if layer % 2:
            nodes.append(helper.make_node("Add", [last, skip], [f"a{layer}"]))
            last = skip = f"a{layer}"
    nodes.append(helper.make_node("Identity", [last], ["y"]))
    sizes: list[str | int | None] = ["batch", WIDTH]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, sizes)],
        weights,
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)


def save_inputs(folder: Path, files: int, stacked: int = 3, rows: int = 2) -> None:
    """Files of `stacked` items of so many rows; the first has a single one, of another batch
    size."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(11)
    for number in range(files):
        shape = (4, WIDTH) if number == 0 else (stacked, rows, WIDTH)
        array = chance.standard_normal(shape).astype(np.float32)
        np.savez(folder / f"{number:02}.npz", x=array)


MANIFEST = """\
apiVersion: shoal.dev/v1alpha1
kind: Model
metadata: {{name: small}}
spec:
  source: {{uri: small.onnx}}
---
apiVersion: shoal.dev/v1alpha1
kind: Partition
metadata: {{name: small-3}}
spec: {{modelRef: {{name: small}}, fragments: {fragments}}}
---
apiVersion: shoal.dev/v1alpha1
kind: DevicePool
metadata: {{name: shelf}}
spec:
  local:
    devices:
    - {{name: one, memory: {budget}}}
    - {{name: two, memory: {budget}}}
    - {{name: three, memory: {budget}}}
  budget: {{memory: {budget}}}
---
apiVersion: shoal.dev/v1alpha1
kind: InferenceJob
metadata: {{name: job}}
spec:
  partitionRef: {{name: small-3}}
  poolRef: {{name: shelf}}
  inputs: {{uri: pvc://lines/in}}
  outputs: {{uri: pvc://lines/out}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a command ended."""

    status: int
    out: str
    err: str
    report: Mapping[str, object]


def command(
    *arguments: str | Path, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> Ran:
    """`shoal ARGUMENTS` in this process: for commands that start no agent."""
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        if folder is not None:
            patch.chdir(folder)
        status = run_app(list(map(str, arguments)))
    return Ran(status=status, out=out.getvalue(), err=err.getvalue(), report={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    """A folder with a model, inputs and a manifest, and the environment to run `shoal` in."""

    folder: Path
    environment: Mapping[str, str]

    @property
    def manifest(self) -> Path:
        return self.folder / "job.yaml"

    @property
    def model(self) -> Path:
        return self.folder / "small.onnx"

    @property
    def inputs(self) -> Path:
        return self.folder / "lines" / "in"

    @property
    def outputs(self) -> Path:
        return self.folder / "lines" / "out"

    @property
    def report(self) -> Path:
        return self.folder / "report.json"

    def write_manifest(self, *, fragments: int = 3, budget: str = "32Mi") -> None:
        self.manifest.write_text(MANIFEST.format(fragments=fragments, budget=budget))

    def start(self, *arguments: str | Path, out: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """Begin `shoal ARGUMENTS`; `out` is its standard output."""
        return subprocess.Popen(
            [sys.executable, "-m", "shoal_cli", *map(str, arguments)],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, **self.environment},
        )

    def run(self, *arguments: str | Path) -> Ran:
        """Run `shoal ARGUMENTS` to its end."""
        with tempfile.TemporaryDirectory() as printed:
            out, err = Path(printed, "out"), Path(printed, "err")
            environment = {**os.environ, **self.environment}
            given = [str(argument) for argument in arguments]
            process = forked.start("shoal", given, out, environment, errors=err, folder=self.folder)
            process.join(120)
            if process.exitcode is None:
                process.kill()
            assert process.exitcode is not None, "it has not ended"
            return Ran(
                status=process.exitcode,
                out=out.read_text(),
                err=err.read_text(),
                report=self._reported(),
            )

    def command(self, *arguments: str | Path) -> Ran:
        """As `run`, but in this process: for commands that start no agent."""
        ran = command(*arguments, folder=self.folder, environment=self.environment)
        return replace(ran, report=self._reported())

    def _reported(self) -> Mapping[str, object]:
        found: Mapping[str, object]
        found = json.loads(self.report.read_bytes()) if self.report.exists() else {}
        return found


def make_workbench(folder: Path) -> Workbench:
    """A workbench in an empty folder, with four files of inputs."""
    environment = {"XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "120", "NO_COLOR": "1"}
    made = Workbench(folder=folder, environment=environment)
    save_model(made.model)
    save_inputs(made.inputs, files=4)
    made.write_manifest()
    return made


def assert_results_are_the_whole_models(bench: Workbench) -> None:
    session = onnxruntime.InferenceSession(str(bench.model), providers=["CPUExecutionProvider"])
    files = sorted(path.name for path in bench.inputs.glob("*.npz"))
    assert sorted(path.name for path in bench.outputs.glob("*.npz")) == files
    for name in files:
        with np.load(bench.inputs / name) as inputs, np.load(bench.outputs / name) as outputs:
            array = inputs["x"]
            items = [array] if array.ndim == 2 else list(array)
            whole = [session.run(None, {"x": item})[0] for item in items]
            expected = whole[0] if array.ndim == 2 else np.stack(whole)
            assert outputs.files == ["y"]
            np.testing.assert_allclose(outputs["y"], expected, rtol=0, atol=1e-5)


def cut_within(
    model: Path, folder: Path, *budgets_mib: int, pinned: bool = False
) -> PartitionDocument:
    """What a model is cut into for devices with these budgets."""
    devices = tuple(
        PoolDevice(name=f"d{number}", budget_bytes=Bytes(size * MIB))
        for number, size in enumerate(budgets_mib)
    )
    order = CutOrder(name="deep", model="deep", path=model, devices=devices, pinned=pinned)
    cut_into_store(order, folder, lambda done, total: None)
    return document_from_json(partition_path(folder, "deep").read_bytes())
