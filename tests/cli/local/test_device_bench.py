"""`shoal bench-device`: a real agent, in turns with ONNX Runtime, measured and drawn."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from cli.local.test_preparation import MIB
from cli.local.workbench import Workbench
from made_models import Made, deep, vocabulary
from shoal_cli.local.device_figures import NoItem
from shoal_cli.local.made_items import make_item
from shoal_cli.local.resident import ResidencySampler, mapped_bytes
from shoal_protocol.partition import TensorSpec
from shoal_protocol.units import format_upwards


def spec(name: str, dtype: str, *shape: int | str | None) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def test_an_item_is_made_of_what_the_inputs_say() -> None:
    specs = [spec("x", "float", "batch", 3), spec("mask", "int64", 1, "length"), spec("on", "bool")]
    item = make_item(specs, {"mask": (1, 7)})
    assert item["x"].shape == (1, 3)
    assert item["x"].dtype == np.float32
    assert np.abs(item["x"]).max() <= 1
    assert (item["mask"] == np.ones((1, 7), np.int64)).all()
    assert item["on"].shape == ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (spec("x", "float", 1, "h", None), r"shape \[1, h, \?\]: say which with --shape x="),
        (TensorSpec(name="x", dtype="float", shape=None), "say which with --shape x="),
        (spec("x", "string", 1), "x is string: no item is made; give --inputs FOLDER"),
    ],
)
def test_what_cannot_be_made_is_asked_for(given: TensorSpec, said: str) -> None:
    with pytest.raises(NoItem, match=said):
        make_item([given], {})


def test_memory_is_seen_from_outside_heap_and_mapped_files_apart(tmp_path: Path) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(bytes(16 * MIB))
    script = (
        "import mmap, sys\n"
        f"file = open({str(weights)!r}, 'rb')\n"
        "print('idle', flush=True); sys.stdin.readline()\n"
        "mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "sum(mapped[::4096]); heap = b'x' * (8 << 20)\n"
        "print('full', flush=True); sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        sampler = ResidencySampler(lambda: process.pid)
        process.stdout.readline()
        before = sampler.sample()
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        after = sampler.sample()
        assert mapped_bytes(process.pid, tmp_path) == 16 * MIB
        process.stdin.close()
    assert before is not None
    assert after is not None
    assert after.file_bytes - before.file_bytes >= 15 * MIB
    assert after.anonymous_bytes - before.anonymous_bytes >= 7 * MIB
    assert sampler.sample() is None, "it has ended"
    assert len(sampler.samples) == 2


@pytest.mark.real
@pytest.mark.timeout(150)
def test_a_model_is_measured_within_its_budget_and_drawn(bench: Workbench) -> None:
    model, picture = deep().save(bench.folder), bench.folder / "deep.svg"
    budgets = ("--budget", "12Mi", "--budget", "48Mi")
    ran = bench.run("bench-device", model, *budgets, "--turns", "3", "--json", "--picture", picture)
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    small, ample = found["budgets"]
    for each in (small, ample):
        assert 0 < each["peak_bytes"] <= each["budget_bytes"]
        assert each["compute_seconds"]["lower_quartile"] <= each["compute_seconds"]["median"]
        assert set(each["peers"]) == {"default", "mapped"}
        assert each["items_per_second"] > 0
        assert each["first_seconds"] > each["latency_seconds"]["median"]
    assert small["plan"]["blocks"] > 1
    assert small["plan"]["dropped_blocks"] > 0
    assert small["kept_bytes"] < small["plan"]["weight_bytes"]
    assert small["plan"]["least_bytes"] <= small["plan"]["granted_bytes"] <= 12 * MIB
    assert ample["plan"]["blocks"] == 0
    assert ample["plan"]["dropped_bytes"] == 0
    assert ample["kept_bytes"] >= 24 * MIB
    assert all(peer["peak_bytes"] > 24 * MIB for peer in found["peers"])
    texts = [each.text or "" for each in ET.parse(picture).iter() if each.tag.endswith("text")]  # noqa: S314
    assert any("floor + budget of 12 MiB" in text for text in texts)
    assert any("ONNX Runtime, mapped" in text for text in texts)


@pytest.mark.real
@pytest.mark.timeout(150)
def test_the_least_budget_is_one_in_which_the_model_runs_on_items_that_are_large(
    bench: Workbench,
) -> None:
    made = deep()
    text = made.text.replace("[1, 512]", "[1200, 512]")
    model = replace(made, text=text, shapes={"x": (1200, 512)}).save(bench.folder)
    options = ("--budgets", "least..least", "--turns", "2", "--no-peers", "--json")
    ran = bench.run("bench-device", model, *options)
    assert "does not fit" not in ran.err
    found = json.loads(ran.out)
    (least,) = found["budgets"]
    needed = found["smallest_budget_bytes"]
    assert least["plan"]["least_bytes"] == needed, "items wait while it runs"
    assert needed <= least["budget_bytes"] < needed + MIB


@pytest.mark.real
@pytest.mark.timeout(150)
def test_a_model_of_large_layers_is_measured_in_the_budgets_that_a_run_of_it_keeps(
    bench: Workbench,
) -> None:
    """Its layer of 16 MiB is computed in smaller parts where the budget asks for that."""
    model = bench.folder / "model.onnx"
    onnx.save(vocabulary(words=1 << 14), model)
    options = ("--shape", "x=1,2,256", "--turns", "2", "--no-peers", "--json")
    ran = bench.run("bench-device", model, "--budget", "12Mi", "--budget", "64Mi", *options)
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    small, ample = found["budgets"]
    assert small["peak_bytes"] <= 12 * MIB
    assert small["plan"]["dropped_blocks"] > ample["plan"]["blocks"] == 0
    least = found["smallest_budget_bytes"]
    assert least < 12 * MIB
    for less in (least - MIB, MIB):
        ran = bench.run("bench-device", model, "--budget", str(less), *options)
        assert ran.status == 2
        assert "does not fit" in ran.err
        assert f"needs at least {format_upwards(least)} " in ran.err, "in the cut that needs least"


@pytest.mark.real
@pytest.mark.parametrize(
    ("peers", "said"),
    [
        ("--peers", "has not run model.onnx once within 0.5 s"),
        ("--no-peers", "tasks ran out of time, and none finished"),
    ],
)
def test_a_model_without_an_end_is_given_up(bench: Workbench, peers: str, said: str) -> None:
    made = Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            go = Constant<value = bool {1}>()
            y = Loop (, go, x) < body = step (int64 i, bool c, float[N,16] v)
                => (bool c2, float[N,16] v2) { c2 = Identity(c) v2 = Tanh(v) } > }""",
        weights={},
        shapes={"x": (1, 16)},
    )
    model = made.save(bench.folder)
    options = ("--budget", "16Mi", "--shape", "x=1,16", "--task-seconds", "0.5")
    ran = bench.run("bench-device", model, *options, peers, "--progress", "plain")
    assert ran.status == 1
    assert said in ran.err


@pytest.mark.real
def test_both_peers_run_a_model_with_an_input_that_nothing_reads(bench: Workbench) -> None:
    made = Made(
        text="""g (float[N,16] x, float[N] unread) => (float[N,16] y) { y = Tanh(x) }""",
        shapes={"x": (1, 16), "unread": (1,)},
    )
    model = made.save(bench.folder)
    options = ("--budget", "16Mi", "--shape", "x=1,16", "--shape", "unread=1", "--turns", "2")
    ran = bench.run("bench-device", model, *options, "--json")
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert [peer["way"] for peer in found["peers"] if not peer["problem"]] == ["default", "mapped"]


@pytest.mark.real
@pytest.mark.minutes
@pytest.mark.timeout(150)
def test_tables_say_what_was_planned_and_a_run_without_peers_leaves_nothing(
    bench: Workbench,
) -> None:
    model = deep().save(bench.folder)
    ran = bench.run("bench-device", model, "--budgets", "10Mi..least", "--turns", "2", "--no-peers")
    assert ran.status in (0, 1), ran.err
    assert "the smallest budget that the model runs in is" in ran.out
    assert "ONNX Runtime" not in ran.out
    assert (bench.folder / "model.memory.svg").stat().st_size > 1000
    left = [path for path in (bench.folder / "cache").glob("shoal/runs/*/cache/*")]
    assert left == []
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if _is_ours(path, bench)]


def _is_ours(path: Path, bench: Workbench) -> bool:
    try:
        return os.fsencode(bench.folder) in path.read_bytes()
    except OSError:
        return False
