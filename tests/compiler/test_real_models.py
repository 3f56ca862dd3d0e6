"""Real models, cut into 2, 3 and 5, run in a chain, equal the whole to the bit."""

from pathlib import Path

import numpy as np
import pytest

from chaining import run_chained, run_whole
from real_models import HEAVY, MODELS, PACKAGED, ZOO, find
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_planner.cuts import CutRequest, Refusal, choose_cuts

QUICK_ZOO = ("minilm_l6", "squeezenet1_1", "mobilenet_v2")
LATER = ("minilm_l6", "ppocr_det", "ppocr_rec")
"""Every check runs them in pieces on devices already."""


def check(name: str, store: Path, counts: tuple[int, ...] = (2, 3, 5)) -> None:
    model, path = MODELS[name], find(name)
    profile = profile_model(path, model.shapes())
    items = [model.inputs(seed) for seed in (0, 1)]
    wanted = [run_whole(path, item) for item in items]
    for count in counts:
        cuts = choose_cuts(profile, CutRequest(fragments=count))
        if count > model.finest:
            assert isinstance(cuts, Refusal)
            continue
        assert not isinstance(cuts, Refusal), cuts
        document = cut_model(path, profile, cuts, store)
        assert len(document.fragments) == count
        for item, whole in zip(items, wanted, strict=True):
            got = run_chained(store, document, item)
            for output, value in whole.items():
                np.testing.assert_array_equal(got[output], value, err_msg=f"{name} in {count}")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.minutes if name in LATER else [])
        for name in (*PACKAGED, *QUICK_ZOO)
    ],
)
def test_a_real_model_in_pieces_gives_what_the_whole_gives(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize("name", [each for each in ZOO if each not in {*QUICK_ZOO, *HEAVY}])
def test_a_larger_model_in_pieces_gives_what_the_whole_gives(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize("name", sorted(HEAVY))
def test_a_heavy_model_in_pieces_gives_what_the_whole_gives(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


def test_weights_in_constant_nodes_are_mapped_as_well(tmp_path: Path) -> None:
    path = find("ppocr_rec")  # its exporter keeps every weight in a Constant node
    profile = profile_model(path, {"x": (1, 3, 48, 320)})
    assert profile.weight_bytes > 10 << 20
    document = cut_model(path, profile, (), tmp_path)
    folder = tmp_path / "fragments" / document.fragments[0].digest.removeprefix("sha256:")
    assert (folder / "model.onnx").stat().st_size < 300_000
    assert (folder / "weights.bin").stat().st_size > 10 << 20


def test_every_size_in_text_recognition_is_known() -> None:
    profile = profile_model(find("ppocr_rec"), {"x": (1, 3, 48, 320)})
    assert all(tensor.bytes is not None for tensor in profile.tensors.values())
    assert profile.flops is not None


def test_control_flow_of_speech_detection_is_kept_whole() -> None:
    profile = profile_model(find("silero_vad"))
    cuts = choose_cuts(profile, CutRequest(fragments=5))
    assert isinstance(cuts, Refusal)
    assert "the finest possible cut gives 4" in cuts.reason
