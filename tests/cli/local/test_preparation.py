"""Where a model is cut that the devices decide the cut of."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cli.local.workbench import cut_within
from made_models import DENSE, Made, deep
from shoal_cli.local import cut_search, preparation
from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.cut_search import PreparationRefused
from shoal_cli.local.known_cuts import find_base, find_known
from shoal_cli.local.preparation import (
    cut_into_store,
    partition_path,
    prepare,
)
from shoal_compiler.profile import digest_at
from shoal_planner.devices import PoolDevice
from shoal_protocol.choices import Objective
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.partition import Outgrown, PartitionDocument, document_from_json
from shoal_protocol.units import Bytes
from underestimated import spoken

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deep().save(tmp_path_factory.mktemp("model"))


def test_a_model_that_one_device_cannot_hold_runs_there_whole_in_blocks(
    model: Path, tmp_path: Path
) -> None:
    document = cut_within(model, tmp_path, 16)
    (fragment,) = document.fragments
    assert fragment.least_bytes <= 16 * MIB < fragment.resident_bytes
    stored = list(tmp_path.glob("fragments/*/fragment.json"))
    assert len(stored) == 1, "what was only tried is not stored"


def test_a_model_that_the_devices_can_hold_together_is_cut_so_that_they_do(
    model: Path, tmp_path: Path
) -> None:
    document = cut_within(model, tmp_path, 16, 16, 16)
    assert 1 < len(document.fragments) <= 3
    assert all(each.resident_bytes <= 16 * MIB for each in document.fragments)


def test_fragments_that_are_tied_to_devices_stay_as_fine_as_the_budget_asks(
    model: Path, tmp_path: Path
) -> None:
    assert len(cut_within(model, tmp_path, 16, pinned=True).fragments) > 1


def test_a_cut_that_was_chosen_is_used_again_until_the_devices_change(
    model: Path, tmp_path: Path
) -> None:
    def order(size: int) -> CutOrder:
        devices = (PoolDevice(name="d", budget_bytes=Bytes(size * MIB)),)
        return CutOrder(name="deep", model="deep", path=model, devices=devices)

    def is_warm(size: int) -> object:
        return cut_into_store(order(size), tmp_path, lambda done, total: None)["warm"]

    assert [is_warm(16), is_warm(16), is_warm(17), is_warm(40)] == [False, True, False, False]


def test_a_cut_for_less_memory_gives_way_when_budgets_grow_and_its_fragments_stay(
    model: Path, tmp_path: Path
) -> None:
    small = cut_within(model, tmp_path, 6, 6)
    large = cut_within(model, tmp_path, 40, 40)
    assert len(large.fragments) < len(small.fragments)
    assert large == cut_within(model, tmp_path / "alone", 40, 40)
    store = FragmentStore(tmp_path)
    assert all(store.is_sound(each.digest) for each in small.fragments)
    assert cut_within(model, tmp_path, 6, 6) == small


def wide_order(folder: Path, made: Made | None = None) -> CutOrder:
    """Of a copy of a model whose need depends on its inputs, all in this folder."""
    (folder / "in").mkdir(parents=True)
    np.save(folder / "in/0.npy", np.zeros(1000, np.float32))
    path = (made or WIDE).save(folder)
    return CutOrder(
        name="wide",
        model="wide",
        path=path,
        sample=folder / "in",
        devices=(PoolDevice(name="d", budget_bytes=Bytes(16 * MIB)),),
    )


async def test_a_cut_of_which_nothing_has_changed_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = wide_order(tmp_path)
    cut_into_store(order, tmp_path, lambda done, total: None)
    monkeypatch.setattr(preparation, "run_step", None)
    prepared = await prepare(order, tmp_path, lambda done, total: None)
    assert prepared.files == {str(order.path): digest_at(order.path)}


def change_model(order: CutOrder, store: Path) -> CutOrder:
    order.path.write_bytes(order.path.read_bytes() + b"\0")
    return order


def change_inputs(order: CutOrder, store: Path) -> CutOrder:
    assert order.sample is not None
    np.save(order.sample / "1.npy", np.zeros(2000, np.float32))
    return order


def change_fragment(order: CutOrder, store: Path) -> CutOrder:
    fragment = next(store.glob("fragments/*/model.onnx"))
    content = fragment.read_bytes()
    fragment.chmod(0o600)
    fragment.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return order


def change_order(order: CutOrder, store: Path) -> CutOrder:
    return replace(order, objective=Objective.LATENCY)


@pytest.mark.parametrize("change", [change_model, change_inputs, change_fragment, change_order])
def test_a_cut_of_which_anything_has_changed_is_looked_at_anew(
    tmp_path: Path, change: Callable[[CutOrder, Path], CutOrder]
) -> None:
    order = wide_order(tmp_path)
    cut_into_store(order, tmp_path, lambda done, total: None)
    store, path = FragmentStore(tmp_path), partition_path(tmp_path, "wide")
    assert find_known(path, order, store)
    assert not find_known(path, change(order, tmp_path), store)


def divided(model: Path, folder: Path, *outgrown: int) -> PartitionDocument:
    """Cut for a device of 12 MiB, where fragments took more."""
    order = CutOrder(
        name="deep",
        model="deep",
        path=model,
        devices=(PoolDevice(name="d", budget_bytes=Bytes(12 * MIB)),),
        outgrown=tuple(Outgrown(fragment=each, need_bytes=13 * MIB) for each in outgrown),
    )
    cut_into_store(order, folder, lambda done, total: None)
    return document_from_json(partition_path(folder, "deep").read_bytes())


def test_a_fragment_that_took_too_much_is_divided_and_the_others_stay(
    model: Path, tmp_path: Path
) -> None:
    whole = divided(model, tmp_path)
    halves = divided(model, tmp_path, 0)
    again = divided(model, tmp_path, 0, 1)
    assert [len(each.fragments) for each in (whole, halves, again)] == [1, 2, 5]
    assert again.fragments[0].digest == halves.fragments[0].digest
    assert again.fragments[1].digest != halves.fragments[1].digest
    assert divided(model, tmp_path) == whole, "what was divided is no part of the next cut"


def divide_anew(order: CutOrder, folder: Path, *outgrown: int) -> PartitionDocument:
    """The same order, with these fragments divided."""
    found = tuple(Outgrown(fragment=each, need_bytes=17 * MIB) for each in outgrown)
    cut_into_store(replace(order, outgrown=found), folder, lambda done, total: None)
    return document_from_json(partition_path(folder, order.name).read_bytes())


def sums_order(folder: Path) -> CutOrder:
    """Of a model that can be divided, for one device and the inputs beside it."""
    return replace(wide_order(folder, SUMS), name="sums", model="sums")


def test_a_cut_is_searched_for_once_however_often_fragments_are_divided_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = sums_order(tmp_path)
    elsewhere = [divide_anew(order, tmp_path / str(n), *([0] * n)) for n in range(3)]
    assert len({len(each.fragments) for each in elsewhere}) == 3
    assert divide_anew(order, tmp_path) == elsewhere[0]
    with monkeypatch.context() as forbidding:
        for search in ("choose_cuts", "plan_without_alternatives"):
            forbidding.setattr(cut_search, search, None)
        assert divide_anew(order, tmp_path, 0) == elsewhere[1]
        assert divide_anew(order, tmp_path, 0, 0) == elsewhere[2]
        assert divide_anew(order, tmp_path) == elsewhere[0]


@pytest.mark.parametrize("change", [change_model, change_inputs, change_order])
def test_a_cut_is_searched_for_again_where_more_has_changed_than_divisions(
    tmp_path: Path, change: Callable[[CutOrder, Path], CutOrder]
) -> None:
    order = sums_order(tmp_path)
    divide_anew(order, tmp_path)
    path, files = partition_path(tmp_path, "sums"), {str(order.path): digest_at(order.path)}
    assert find_base(path, order, files)
    order = change(order, tmp_path)
    assert not find_base(path, order, {str(order.path): digest_at(order.path)})


@pytest.mark.parametrize("damage", [{"slicing": 99}, {"positions": [7]}])
def test_a_record_that_is_damaged_is_as_none(tmp_path: Path, damage: dict[str, object]) -> None:
    order = sums_order(tmp_path)
    sound = divide_anew(order, tmp_path)
    divided = divide_anew(order, tmp_path, 0)
    record = partition_path(tmp_path, "sums").with_name("order.json")
    values = json.loads(record.read_bytes())
    record.write_text(json.dumps(values | {"base": values["base"] | damage}))
    assert divide_anew(order, tmp_path, 0) == divided
    record.write_text(json.dumps(values | {"base": values["base"] | damage}))
    assert divide_anew(order, tmp_path) == sound


def test_what_cannot_be_divided_is_refused_with_its_need(model: Path, tmp_path: Path) -> None:
    with pytest.raises(PreparationRefused, match="took 13 MiB, and it cannot be divided"):
        divided(model, tmp_path, *([0] * 64))


def test_a_cut_of_a_layer_in_parts_is_divided_in_the_same_parts(tmp_path: Path) -> None:
    devices = (PoolDevice(name="d", budget_bytes=Bytes(8 * MIB)),)
    path = DENSE.save(tmp_path)
    order = CutOrder(name="dense", model="dense", path=path, devices=devices)
    elsewhere = divide_anew(order, tmp_path / "elsewhere", 0)
    whole = divide_anew(order, tmp_path)
    assert divide_anew(order, tmp_path, 0) == elsewhere
    assert len(elsewhere.fragments) == len(whole.fragments) + 1


WIDE = Made(
    text="agraph (float[1, n] x) => (float[1, n] y) {\n  t = Sigmoid (x)\n  y = Relu (t)\n}",
    shapes={},
)
"""Its memory is what the input makes of it."""


SUMS = Made(
    text="agraph (float[1, n] x) => (float[1, n] y) {\n  a = Sigmoid (x)\n  b = Tanh (x)\n"
    "  c = Add (a, b)\n  d = Sigmoid (c)\n  e = Tanh (c)\n  y = Add (d, e)\n}",
    shapes={},
)
"""As one fragment it needs more than each of its nodes, in blocks too."""


def cut_for(
    folder: Path,
    sizes: Sequence[int],
    *,
    made: Made = WIDE,
    budget: int = 8 * MIB,
    fragments: int | None = None,
    left_out: int = 0,
) -> tuple[PartitionDocument, str]:
    """The model cut for a device and inputs of these sizes; and the note about it."""
    samples = folder / "inputs"
    samples.mkdir()
    for number, size in enumerate(sizes):
        np.save(samples / f"{number}.npy", np.zeros((1, size), np.float32))
    order = CutOrder(
        name="wide",
        model="wide",
        path=made.save(folder),
        sample=samples,
        fragments=fragments,
        devices=(PoolDevice(name="d", budget_bytes=Bytes(budget)),),
        left_out=left_out,
    )
    note = cut_into_store(order, folder, lambda done, total: None)["note"]
    return document_from_json(partition_path(folder, "wide").read_bytes()), note


@pytest.mark.parametrize("fragments", [None, 2])
def test_an_input_that_is_too_large_is_named_and_the_plan_covers_the_others(
    tmp_path: Path, fragments: int | None
) -> None:
    sizes = (1000, 5_000_000, 100_000, 100, 4_000_000)
    document, note = cut_for(tmp_path, sizes, fragments=fragments)
    assert note.startswith("wide: 1.npy, 4.npy are larger than the plan covers"), note
    assert "needs " in note
    assert "8 MiB" in note
    (tmp_path / "fits").mkdir()
    assert (document, "") == cut_for(tmp_path / "fits", sizes[2:4], fragments=fragments)


@pytest.mark.parametrize(("left_out", "named"), [(1, "1.npy is"), (2, "1.npy, 2.npy are")])
def test_the_largest_inputs_are_left_out_where_their_fragments_took_too_much(
    tmp_path: Path, left_out: int, named: str
) -> None:
    sizes = (1000, 200_000, 100_000, 100)
    document, note = cut_for(tmp_path, sizes, left_out=left_out)
    assert note.startswith(f"wide: {named} larger than the plan covers"), note
    assert "took more than the devices have" in note
    (tmp_path / "kept").mkdir()
    kept = tuple(sorted(sizes)[:-left_out])
    assert (document, "") == cut_for(tmp_path / "kept", kept)


def test_when_the_smallest_input_took_too_much_as_well_there_is_nothing_left(
    tmp_path: Path,
) -> None:
    (tmp_path / "smallest").mkdir()
    _, note = cut_for(tmp_path / "smallest", (1000, 100_000, 100), left_out=2)
    assert "0.npy, 1.npy are larger" in note
    with pytest.raises(PreparationRefused, match="took more than the devices have"):
        cut_for(tmp_path, (1000, 100_000, 100), left_out=4)


def test_the_plan_covers_an_input_for_which_only_the_finer_cut_fits(tmp_path: Path) -> None:
    document, note = cut_for(tmp_path, (1_000_000, 1000), made=SUMS, budget=24 * MIB)
    assert len(document.fragments) > 1
    assert note == ""


def test_where_even_the_smallest_input_is_too_large_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        PreparationRefused, match=r"needs 33.* 8 MiB.* raise the budget: 33.* 41 MiB for"
    ):
        cut_for(tmp_path, (5_000_000, 4_000_000))


def test_a_cut_that_was_asked_for_and_fits_no_device_is_left_to_the_plan(tmp_path: Path) -> None:
    document, note = cut_for(tmp_path, (5_000_000, 4_000_000), fragments=1)
    assert (len(document.fragments), note) == (1, "")


def test_a_fragment_is_tried_with_the_numbers_that_the_first_item_has(tmp_path: Path) -> None:
    made = Made(
        text="g (float[1, n] x, int64 rate) => (float[1, n] y) {\n"
        "  r = Cast <to=1> (rate)\n  y = Mul (x, r)\n}",
        shapes={},
    )
    samples = tmp_path / "inputs"
    samples.mkdir()
    np.savez(samples / "0.npz", x=np.zeros((1, 9), np.float32), rate=np.array(16_000))
    order = CutOrder(
        name="sound",
        model="sound",
        path=made.save(tmp_path),
        sample=samples,
        devices=(PoolDevice(name="d", budget_bytes=Bytes(8 * MIB)),),
    )
    cut_into_store(order, tmp_path, lambda done, total: None)
    (stored,) = tmp_path.glob("fragments/*/fragment.json")
    assert json.loads(stored.read_bytes())["values"] == {"rate": [16_000]}


def spoken_order(folder: Path, budget_mib: int, **sizes: tuple[int, ...]) -> CutOrder:
    """Of a model that makes as many rows as an input says, in the middle of 16 MiB of layers."""
    device = PoolDevice(name="d", budget_bytes=Bytes(budget_mib * MIB))
    path = folder / "model.onnx"
    if not path.exists():
        spoken().save(folder)
    return CutOrder(
        name="spoken",
        model="spoken",
        path=path,
        devices=(device, replace(device, name="e")),
        seen=sizes,
    )


def cut_of(order: CutOrder, folder: Path) -> PartitionDocument:
    cut_into_store(order, folder, lambda done, total: None)
    return document_from_json(partition_path(folder, order.name).read_bytes())


def test_a_model_is_cut_for_the_sizes_that_items_have_shown(tmp_path: Path) -> None:
    unseen = cut_of(spoken_order(tmp_path, 14), tmp_path)
    seen = cut_of(spoken_order(tmp_path, 14, t9=(1000, 512)), tmp_path)
    assert len(unseen.fragments) < len(seen.fragments)
    assert cut_of(spoken_order(tmp_path, 14), tmp_path) == unseen
    store = FragmentStore(tmp_path)
    paths = [store.folder(each.digest) / "fragment.json" for each in seen.fragments]
    said = [json.loads(path.read_bytes()) for path in paths]
    assert said[-1]["seen"].popitem()[1] == [1000, 512]
    assert all("seen" not in each for each in said[:1])
    assert [each.activation_bytes is None for each in seen.fragments][-1], "that is no promise"


def test_where_no_cut_suits_what_was_seen_the_nearest_is_tried(tmp_path: Path) -> None:
    seen = cut_of(spoken_order(tmp_path, 14, t9=(4000, 512)), tmp_path)
    assert [each.weight_bytes for each in seen.fragments[-6:-1]] == [MIB] * 5, "one layer each"
    assert max(each.weight_bytes for each in seen.fragments) > 5 * MIB, "others are as they were"


def test_layers_are_parted_for_the_sizes_that_items_have_shown(tmp_path: Path) -> None:
    """A convolution of integers spreads its input out, however long that is."""
    made = Made(
        text="""agraph (uint8[1, 64, 1] x, int64[1] n) => (int32[1, 8, m] y) {
            front = Constant <value_ints = [1, 64]> ()
            many = Concat <axis = 0> (front, n)
            t = Expand (x, many)
            y = ConvInteger <pads = [8, 8]> (t, W)
        }""",
        weights={"W": np.ones((8, 64, 17), np.uint8)},
    )
    device = PoolDevice(name="d", budget_bytes=Bytes(24 * MIB))
    order = CutOrder(name="m", model="m", path=made.save(tmp_path), devices=(device,))
    unseen, short, long = (
        sum(each.nodes for each in cut_of(replace(order, seen=seen), tmp_path).fragments)
        for seen in ({}, {"t": (1, 64, 500)}, {"t": (1, 64, 32000)})
    )
    assert unseen == short < long


def test_no_fewer_items_are_planned_for_where_their_sizes_are_all_alike(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "0.npz", x=np.ones((1, 512), np.float32), n=np.array([9]))
    order = replace(spoken_order(tmp_path, 14), sample=tmp_path / "in", left_out=1)
    with pytest.raises(PreparationRefused, match="took more than the devices have"):
        cut_into_store(order, tmp_path, lambda done, total: None)
