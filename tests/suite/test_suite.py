"""No model runs over its budget, and none is refused that a smaller cut or blocks would let run.

More than forty models, published and made, on one to three devices, each with budgets from ample
down to the smallest that it runs in (`descent`). A row of figures is printed for each run,
`out/suite/MODEL-DEVICES.json` has them, and `table` shows all.
"""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from real_models import ROOT
from suite.descent import KIB, MIB, Bench, Row, descend
from suite.subjects import ENTRIES, LIGHT

pytestmark = [pytest.mark.real, pytest.mark.slow]
DEVICES = (1, 2, 3)
OFTEN = ("u_net",)
"""In every check: activations that weigh more than weights."""


def bench_of(name: str, folder: Path) -> Bench:
    return Bench.of(ENTRIES[name].subject(name, folder / "model"), folder)


def check(row: Row, tolerance: float) -> None:
    assert row.outcome != "failed", row
    assert row.peak <= 1, row
    assert row.difference <= tolerance, row


@pytest.mark.minutes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", ENTRIES)
def test_every_budget_that_a_model_runs_in_is_kept(
    name: str, devices: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = bench_of(name, tmp_path)
    rows = []
    for row in descend(bench, devices):
        with capsys.disabled():
            print(f"\n{row}", end="")
        rows.append(row)
    record(rows)
    assert any(row.outcome == "ran" for row in rows)
    for row in rows:
        check(row, bench.subject.tolerance)


@pytest.mark.minutes
@pytest.mark.parametrize(
    ("name", "devices", "budget_mib"), [("ppocr_rec_half", 2, 63), ("ppocr_det_mixed", 1, 89)]
)
def test_items_run_where_what_would_cover_all_their_shapes_does_not(
    name: str, devices: int, budget_mib: int, tmp_path: Path
) -> None:
    """Six lines of 320 columns and one of 640 are covered by six of 640, which there are not."""
    bench = bench_of(name, tmp_path)
    row = bench.run(devices, budget_mib * MIB)
    check(row, bench.subject.tolerance)
    assert row.outcome == "ran", row


@pytest.mark.minutes
def test_a_model_is_cut_for_the_sizes_that_its_items_have_shown(tmp_path: Path) -> None:
    """Sound is as long as its text says: divided blindly, this came to hundreds of fragments."""
    bench = bench_of("kokoro", tmp_path)
    row = bench.run(3, 60 * MIB)
    check(row, bench.subject.tolerance)
    assert row.outcome == "ran", row
    assert row.fragments <= 16, row


@pytest.mark.parametrize(
    ("name", "share"),
    [
        pytest.param(name, share, marks=[] if name in OFTEN else pytest.mark.minutes)
        for name, share in LIGHT.items()
    ],
)
def test_a_budget_near_the_need_is_kept(name: str, share: float, tmp_path: Path) -> None:
    bench = bench_of(name, tmp_path)
    need = bench.run(1, 1 << 30).need_bytes
    row = bench.run(2, round(need * share / KIB + 1) * KIB)
    assert row.outcome == "ran", row
    check(row, bench.subject.tolerance)


def record(rows: list[Row]) -> None:
    """Write a model's rows where a table can be made of all."""
    folder = ROOT / "out" / "suite"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{rows[0].model}-{rows[0].devices}.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2))
