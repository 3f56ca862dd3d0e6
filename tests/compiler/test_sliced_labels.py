"""Products with more axes than two, and those that labels describe, in parts."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from compiler.layers import Layer, profile_of
from compiler.test_slicing import cut_everywhere, small_limit
from made_models import weight

__all__ = ["small_limit"]


def labels(equation: str, *reads: str) -> onnx.NodeProto:
    return helper.make_node("Einsum", reads or ["x", "w"], ["y"], equation=equation)


PARTED = {
    "several matrices": Layer(
        helper.make_node("MatMul", ["x", "w"], ["y"]), weight(1, 3, 40), {"w": weight(5, 40, 128)}
    ),
    "several matrices for one row": Layer(
        helper.make_node("MatMul", ["x", "w"], ["y"]), weight(40), {"w": weight(5, 40, 128)}
    ),
    "columns": Layer(labels("nd,dk->nk"), weight(3, 70), {"w": weight(70, 400)}),
    "rows": Layer(labels("nd,kd->nk"), weight(3, 70), {"w": weight(400, 70)}),
    "heads of columns": Layer(labels("btd,dhk->bthk"), weight(2, 3, 64), {"w": weight(64, 8, 40)}),
    "heads before places": Layer(
        labels("btd,dhk->bhtk"), weight(2, 3, 64), {"w": weight(64, 8, 40)}
    ),
    "heads that are summed": Layer(
        labels("bthk,hkd -> btd"), weight(2, 3, 8, 40), {"w": weight(8, 40, 64)}
    ),
    "a weight on the left": Layer(
        labels("kd,nd->kn", "w", "x"), weight(3, 70), {"w": weight(400, 70)}
    ),
    "axes without labels": Layer(labels("...d,dk->...k"), weight(2, 3, 70), {"w": weight(70, 400)}),
    "axes without labels at the end": Layer(
        labels("kd,d...->k...", "w", "x"), weight(70, 3, 2), {"w": weight(400, 70)}
    ),
    "a result that is not said": Layer(labels("bd,da"), weight(3, 70), {"w": weight(70, 400)}),
    "the second of three": Layer(
        labels("ab,bc,ad->acd", "x", "w", "v"),
        weight(3, 70),
        {"w": weight(70, 400), "v": weight(3, 5)},
    ),
    "the last of three": Layer(
        labels("ab,bc,cd", "x", "v", "w"),
        weight(3, 20),
        {"w": weight(70, 400), "v": weight(20, 70)},
    ),
    "experts": Layer(labels("ebk,ekn->ebn"), weight(4, 3, 60), {"w": weight(4, 60, 96)}),
}


@pytest.mark.parametrize("name", PARTED)
def test_a_product_of_any_axes_is_parted(tmp_path: Path, name: str) -> None:
    layer = PARTED[name]
    profile = profile_of(layer, tmp_path)
    parts = [size for each, size in profile.weights.items() if each.startswith("w.")]
    assert len(parts) > 1
    assert sum(parts) == layer.weights["w"].nbytes
    cut_everywhere(tmp_path, profile, layer.x)


WHOLE = {
    "a sum over all": Layer(labels("nd,dk->n"), weight(3, 70), {"w": weight(70, 400)}),
    "a diagonal": Layer(labels("nd,dkk->nk"), weight(3, 7), {"w": weight(7, 40, 40)}),
    "labels of both": Layer(labels("ek,ek->ek"), weight(80, 90), {"w": weight(80, 90)}),
    "a weight with axes without labels": Layer(
        labels("nd,...dk->...nk"), weight(3, 70), {"w": weight(2, 70, 200)}
    ),
    "neither labels nor a result": Layer(labels("...d,dk"), weight(3, 70), {"w": weight(70, 400)}),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_joined_stays_whole(tmp_path: Path, name: str) -> None:
    layer = WHOLE[name]
    profile = profile_of(layer, tmp_path)
    assert set(profile.weights) == {"w"}
    cut_everywhere(tmp_path, profile, layer.x)


def test_one_weight_that_both_operands_are_is_left_whole(tmp_path: Path) -> None:
    node = helper.make_node("Einsum", ["w", "w"], ["v"], equation="ab,cb->ac")
    add = helper.make_node("Add", ["x", "v"], ["y"])
    layer = Layer(add, np.zeros((80, 80), np.float32), {"w": weight(80, 90)}, before=[node])
    assert set(profile_of(layer, tmp_path).weights) == {"w"}
