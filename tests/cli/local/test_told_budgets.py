"""What is said of budgets before a run: which are enough, and which take few fragments."""

import re
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest

from cli.local.test_preparation import cut_for
from made_models import Made
from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.cut_search import PreparationRefused
from shoal_cli.local.preparation import cut_into_store
from shoal_planner.devices import PoolDevice
from shoal_protocol.units import Bytes

MIB = 1 << 20


def test_a_refusal_says_what_the_smallest_inputs_take_and_what_all_of_them_do(
    tmp_path: Path,
) -> None:
    """Budgets that are as large as it says are enough for both."""
    sizes = (5_000_000, 4_000_000)

    def cut_with(budget: int) -> str:
        (folder := tmp_path / str(budget)).mkdir()
        return cut_for(folder, sizes, budget=budget)[1]

    with pytest.raises(PreparationRefused, match="its smallest inputs") as refused:
        cut_with(8 * MIB)
    told = re.findall(r"([\d.]+) MiB (?:are|for all)", str(refused.value))
    smallest, largest = (int(float(each) * MIB) for each in told)
    assert smallest < largest
    assert cut_with(smallest).startswith("wide: 0.npy is larger than the plan covers")
    assert cut_with(largest) == ""


def test_that_the_budgets_take_many_fragments_is_told_each_time(tmp_path: Path) -> None:
    steps = [f"t{step} = Tanh (t{step - 1})" for step in range(1, 400)]
    text = "agraph (float[1, 64] t0) => (float[1, 64] y) {\n" + "\n".join(steps)
    path = Made(text=f"{text}\n y = Tanh (t399)\n}}", shapes={}).save(tmp_path)

    def note(budget_kib: int, **asked: int) -> object:
        devices = (PoolDevice(name="d", budget_bytes=Bytes(budget_kib << 10)),)
        order = CutOrder(name="long", model="long", path=path, devices=devices, **asked)  # type: ignore[arg-type]
        made = cut_into_store(order, tmp_path, lambda done, total: None, fragments=False)
        return made["note"]

    said = note(1_820)
    assert str(said).startswith("long: these budgets take "), said
    assert note(1_820) == said
    assert note(3_000) == ""
    assert note(1_820, max_bytes=1_820 << 10) == "", "it is what was asked for"


def test_a_batch_that_has_no_room_as_one_item_is_refused_with_how_its_rows_become_items(
    tmp_path: Path,
) -> None:
    text = "agraph (float[batch, 64, 64] x) => (float[batch, 64, 64] y) { y = Softmax (x) }"
    path = Made(text=text, shapes={}).save(tmp_path)
    rows = np.zeros((3000, 64, 64), np.float32)

    def cut_of(*files: np.ndarray, fragments: int | None = None) -> object:
        samples = Path(mkdtemp(dir=tmp_path))
        for number, array in enumerate(files):
            np.save(samples / f"{number}.npy", array)
        devices = (PoolDevice(name="d", budget_bytes=Bytes(8 * MIB)),)
        order = CutOrder(
            name="long",
            model="long",
            path=path,
            devices=devices,
            sample=samples,
            fragments=fragments,
        )
        return cut_into_store(order, tmp_path, lambda done, total: None, fragments=False)["note"]

    with pytest.raises(PreparationRefused) as refused:
        cut_of(rows)
    assert "0.npy is one item of 3000 rows; if each row is an item, give x" in str(refused.value)
    assert "0.npy, 1.npy are one item each, of up to 3000 rows" in str(cut_of(rows[:1], rows))
    assert cut_of(np.expand_dims(rows, 1)) == ""
    with pytest.raises(PreparationRefused) as refused:
        cut_of(rows, fragments=200)
    assert "rows" not in str(refused.value), "it is no matter of how large items are"
