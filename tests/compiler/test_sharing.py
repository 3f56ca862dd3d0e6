"""Weights that several fragments use: one file of the store, whoever uses it, and sound results."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaining import manifest, run_chained, run_whole
from compiler.cut_everywhere import assert_same_as_whole
from made_models import Made, tied_encoder, weight
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_compiler.sharing import LEAST_BYTES, shared_groups
from shoal_planner.cuts import CutRequest, Refusal, choose_cuts
from shoal_planner.segments import Layout
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.manifest import MOST_SHARED_FILES, is_shared
from shoal_protocol.partition import PartitionDocument

MIB = 1 << 20


def cut(made: Made, folder: Path, fragments: int) -> PartitionDocument:
    path = made.save(folder)
    feeds = made.inputs()
    profile = profile_model(path, {name: value.shape for name, value in feeds.items()})
    cuts = choose_cuts(profile, CutRequest(fragments=fragments))
    assert not isinstance(cuts, Refusal)
    document = cut_model(path, profile, cuts, folder / "store")
    assert document == cut_model(path, profile, cuts, None)
    got = run_chained(folder / "store", document, feeds)
    for name, value in run_whole(path, feeds).items():
        # What is computed in parts may be added up in another order.
        np.testing.assert_allclose(got[name].astype(float), value.astype(float), 1e-5, 1e-5)
    return document


def stored_bytes(store: Path) -> int:
    """What a store takes on the disk: a file with several names once."""
    files = (path.stat() for path in store.rglob("*") if path.is_file())
    return sum({each.st_ino: each.st_size for each in files}.values())


def listed(store: Path, document: PartitionDocument) -> list[dict[str, int]]:
    """The files that each fragment shares, with their bytes."""
    manifests = (FragmentStore(store).manifest(each.digest) for each in document.fragments)
    return [
        {name: file.size_bytes for name, file in each.files.items() if is_shared(name)}
        for each in manifests
    ]


def test_a_weight_of_several_names_is_one(tmp_path: Path) -> None:
    made = Made(
        text="""agraph (float[1, 64] x, bool c) => (float[1, 64] y, float[64, 64] same) {
            W1 = Identity (W)
            W2 = Identity (W1)
            same = Identity (W)
            a = MatMul (x, W1)
            b = MatMul (a, W2)
            y = If (c) <
                then_branch = t () => (float[1, 64] d) { d = MatMul (b, W2) },
                else_branch = e () => (float[1, 64] d) { d = Neg (b) } >
        }""",
        weights={"W": weight(64, 64)},
        shapes={"x": (1, 64)},
        feeds={"c": np.array(True)},
    )
    profile = profile_model(made.save(tmp_path))
    assert set(profile.weights) == {"W"}
    names = [node.label.split("(")[1] for node in profile.nodes]
    assert sorted(names) == ["Identity)", "If)", "MatMul)", "MatMul)"]
    store = tmp_path / "store"
    document = cut_model(tmp_path / "model.onnx", profile, Layout(profile).legal, store)
    for flag in (True, False):
        feeds = {**made.inputs(), "c": np.array(flag)}
        want, got = run_whole(tmp_path / "model.onnx", feeds), run_chained(store, document, feeds)
        for name, value in want.items():
            np.testing.assert_allclose(got[name].astype(float), value.astype(float), 1e-5, 1e-5)


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_weight_keeps_its_other_name_where_a_body_has_the_first_for_something_else(
    is_listed: bool, tmp_path: Path
) -> None:
    given = ", float[16, 16] W" if is_listed else ""
    made = Made(
        text=f"""agraph (float[16, 16] x{given}) => (float[16, 16] y) {{
            W1 = Identity (W)
            a = Relu (x)
            n = Constant <value_int = 2> ()
            go = Constant <value = bool {{1}}> ()
            b = Loop (n, go, a) <body = step (int64 i, bool c, float[16, 16] W)
                => (bool c2, float[16, 16] d) {{ c2 = Identity (c) d = MatMul (W, W1) }}>
            y = Tanh (b)
        }}""",
        weights={"W": weight(16, 16)},
        shapes={"x": (16, 16)},
    )
    assert_same_as_whole(made.save(tmp_path), made.inputs())


def test_what_all_layers_use_is_stored_once(tmp_path: Path) -> None:
    document = cut(tied_encoder(8), tmp_path, 4)
    weights = sum(each.nbytes for each in tied_encoder().weights.values())
    assert listed(tmp_path / "store", document) == [{"shared.0.bin": weights}] * 4
    assert stored_bytes(tmp_path / "store") < weights + 64 * 1024
    store = FragmentStore(tmp_path / "store")
    assert all(store.is_sound(each.digest) for each in document.fragments)


def test_a_table_that_is_the_output_layer_too_is_stored_once(tmp_path: Path) -> None:
    made = tied_encoder(2, 512, tables=17 * MIB // 2048)
    profile = profile_model(made.save(tmp_path))
    layout = Layout(profile)
    head = min(at for at, node in enumerate(profile.nodes) if {"T.0", "T.1"} & set(node.weights))
    before_head = max(position for position in layout.legal if position <= head)
    path, store = tmp_path / "model.onnx", tmp_path / "store"
    document = cut_model(path, profile, (before_head,), store)
    feeds = made.inputs()
    got = run_chained(store, document, feeds)
    for name, value in run_whole(path, feeds).items():
        np.testing.assert_allclose(got[name].astype(float), value.astype(float), 1e-5, 1e-5)
    table = made.weights["T"].nbytes
    first, last = (manifest(tmp_path / "store", document.fragments[at].digest) for at in (0, -1))
    assert "T" in first["initializers"]  # type: ignore[operator]
    assert {"T.0", "T.1"} <= set(last["initializers"])  # type: ignore[call-overload]
    assert table in listed(tmp_path / "store", document)[-1].values()
    weights = sum(each.nbytes for each in made.weights.values())
    assert stored_bytes(tmp_path / "store") < weights + MIB


def test_what_one_fragment_uses_twice_is_in_it_once(tmp_path: Path) -> None:
    document = cut(tied_encoder(8), tmp_path, 1)
    assert listed(tmp_path / "store", document) == [{}]
    weights = sum(each.nbytes for each in tied_encoder().weights.values())
    assert stored_bytes(tmp_path / "store") < weights + 64 * 1024


def test_what_is_small_is_not_shared(tmp_path: Path) -> None:
    document = cut(tied_encoder(8, 128), tmp_path, 4)
    assert listed(tmp_path / "store", document) == [{}] * 4


def test_a_second_cut_takes_what_the_first_has_stored(tmp_path: Path) -> None:
    cut(tied_encoder(8), tmp_path, 4)
    before = stored_bytes(tmp_path / "store")
    cut(tied_encoder(8), tmp_path, 2)
    assert stored_bytes(tmp_path / "store") < before + 64 * 1024


def test_a_shared_file_that_is_damaged_is_written_anew_for_all(tmp_path: Path) -> None:
    document = cut(tied_encoder(8), tmp_path, 4)
    store = FragmentStore(tmp_path / "store")
    file = store.folder(document.fragments[2].digest) / "shared.0.bin"
    with file.open("r+b") as opened:
        opened.write(b"damage")
    assert not any(store.is_sound(each.digest) for each in document.fragments)
    assert cut(tied_encoder(8), tmp_path, 4) == document
    assert all(store.is_sound(each.digest) for each in document.fragments)
    assert len({path.stat().st_ino for path in tmp_path.rglob("shared.0.bin")}) == 1


def test_without_hard_links_each_fragment_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    document = cut(tied_encoder(8), tmp_path, 4)
    assert len({path.stat().st_ino for path in tmp_path.rglob("shared.0.bin")}) == 4
    store = FragmentStore(tmp_path / "store")
    assert all(store.is_sound(each.digest) for each in document.fragments)


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcdefgh"), st.just(0), max_size=8), min_size=1, max_size=6
    ),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 2 * LEAST_BYTES)),
)
def test_weights_of_the_same_users_are_one_file_if_that_is_large(
    used: list[dict[str, int]], sizes: dict[str, int]
) -> None:
    uses = [{name: sizes.get(name, LEAST_BYTES) for name in each} for each in used]
    groups = shared_groups(uses)
    users = {
        name: {index for index, each in enumerate(uses) if name in each}
        for name in chain.from_iterable(uses)
    }
    shared = [name for names in groups for name in names]
    assert len(shared) == len(set(shared)), "a weight is in one file"
    for names in groups:
        (among,) = {frozenset(users[name]) for name in names}
        assert len(among) > 1
        assert {name for name in users if users[name] == among} == set(names)
    for name in users.keys() - set(shared):
        alike = [other for other in users if users[other] == users[name]]
        size = sum(next(each[other] for each in uses if other in each) for other in alike)
        assert len(users[name]) == 1 or size < LEAST_BYTES


def test_a_fragment_lists_so_many_shared_files_and_no_more() -> None:
    others = [{f"w{number}": LEAST_BYTES + number} for number in range(MOST_SHARED_FILES + 5)]
    hub = {name: size for each in others for name, size in each.items()}
    groups = shared_groups([hub, *others])
    largest = sorted(hub, key=lambda name: -hub[name])[:MOST_SHARED_FILES]
    assert {name for names in groups for name in names} == set(largest)
