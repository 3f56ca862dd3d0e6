"""What `shoal bench-device` draws, and what it says where nothing can be drawn."""

import json
from pathlib import Path

import pytest

from shoal_cli.commands import bench_device
from shoal_cli.commands.device_pictures import picture
from shoal_cli.local.device_figures import (
    BudgetFigures,
    DeviceFigures,
    Runs,
    Swapping,
    Times,
    Traced,
)
from shoal_cli.local.resident import Sample

MIB = 1 << 20


def measured(budget_mib: int) -> DeviceFigures:
    """A device that has taken 20 MiB above its floor of 40."""
    floor = Sample(seconds=0.0, anonymous_bytes=40 * MIB, file_bytes=0)
    high = Sample(seconds=2.0, anonymous_bytes=60 * MIB, file_bytes=0)
    times = Times(seconds=(1.0, 1.0))
    runs = Runs(
        first_seconds=1.0,
        kept_bytes=0,
        items_per_second=1.0,
        compute=times,
        latency=times,
        cold=times,
        peers={},
        traced=Traced(
            samples=(floor, high), begun=0.0, items_begun=1.0, items_ended=3.0, floor=floor
        ),
    )
    budget = BudgetFigures(
        budget_bytes=budget_mib * MIB,
        floor_bytes=40 * MIB,
        peak_bytes=20 * MIB,
        swapping=Swapping(granted_bytes=MIB, least_bytes=MIB, resident_bytes=MIB, weight_bytes=MIB),
        runs=runs,
        enforced="",
        out_of_memory_kills=0,
        restarts=0,
    )
    return DeviceFigures(
        model="m.onnx",
        digest="sha256:0",
        threads=1,
        turns=2,
        smallest_budget_bytes=MIB,
        budgets=(budget,),
        peers=(),
    )


@pytest.mark.parametrize(("budget_mib", "is_far"), [(24, False), (190, False), (100 << 10, True)])
def test_a_budget_far_above_all_that_was_taken_is_named_and_leaves_the_picture_readable(
    budget_mib: int, is_far: bool
) -> None:
    drawn = picture(measured(budget_mib))
    assert "floor + budget of" in drawn
    assert ("is far above" in drawn) is is_far
    assert ">100,000<" not in drawn, "that is where a budget of 100 GiB would be"


@pytest.mark.parametrize("as_json", [False, True])
def test_what_was_measured_is_shown_where_the_picture_cannot_be_written(
    as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone" / "m.svg"
    with pytest.raises(OSError, match=r"m\.svg") as failed:
        bench_device._show(measured(24), gone, as_json=as_json)
    assert failed.value.filename == str(gone), "the user is told which file"
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out)["picture"] is None
    else:
        assert "the smallest budget that the model runs in is" in out
        assert "cannot be written" in out
