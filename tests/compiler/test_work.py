"""What is reckoned as work for nodes and fragments, in what a device's calibration measures."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from made_models import Made, weight
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import Source, profile_model
from shoal_compiler.work import FEATURES, Estimator, features, nominal, works
from shoal_protocol.partition import Work

SHAPES = {"x": (1, 32, 28, 28)}
MODEL = Made(
    text="""g (float[N,32,28,28] x) => (float[N,10] y) {
        a = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, K) b = Relu(a)
        c = GlobalAveragePool(b) d = Flatten(c) y = Gemm(d, G, bias) }""",
    weights={"K": weight(64, 32, 3, 3), "G": weight(64, 10), "bias": weight(10)},
)


def test_a_node_computes_at_the_rate_of_its_kind_and_moves_what_it_reads_and_writes(
    tmp_path: Path,
) -> None:
    settings = Source.open(MODEL.save(tmp_path)).settings(SHAPES)
    amounts = {each.shaped.node.op_type: nominal(each) for each in settings}
    image, kernels, made = 32 * 28 * 28 * 4, 64 * 32 * 9 * 4, 64 * 28 * 28 * 4
    assert amounts["Conv"] == Work(
        convolution=2 * (64 * 28 * 28) * (32 * 9), memory=image + kernels + made
    )
    assert amounts["Relu"] == Work(memory=2 * made)
    assert amounts["Gemm"] == Work(matrix=2 * 64 * 10, memory=64 * 4 + (64 * 10 + 10) * 4 + 10 * 4)


def test_the_estimate_knows_that_an_activation_is_joined_with_the_convolution_before_it(
    tmp_path: Path,
) -> None:
    settings = Source.open(MODEL.save(tmp_path)).settings(SHAPES)
    relu = next(each for each in settings if each.shaped.node.op_type == "Relu")
    (estimated,), amount = works([relu]), nominal(relu)
    assert estimated is not None
    assert amount is not None
    assert estimated.memory < amount.memory / 4


def test_work_is_unknown_where_a_size_is_and_of_no_nodes_there_is_none(tmp_path: Path) -> None:
    profile = profile_model(MODEL.save(tmp_path))
    assert [node.operator for node in profile.nodes if node.work is None] == [
        *("Conv", "Relu", "GlobalAveragePool", "Flatten", "Gemm")
    ]
    assert works([]) == []


def test_the_work_of_fragments_adds_up_to_that_of_the_model(tmp_path: Path) -> None:
    path = MODEL.save(tmp_path)
    profile = profile_model(path, SHAPES)
    total = sum((node.work or Work() for node in profile.nodes), Work())
    document = cut_model(path, profile, (2, 4), tmp_path / "store")
    assert len(document.fragments) == 3
    assert sum((each.work or Work() for each in document.fragments), Work()) == total
    assert total.convolution > 0
    assert total.memory > 0


def test_there_are_as_many_features_as_names(tmp_path: Path) -> None:
    settings = Source.open(MODEL.save(tmp_path)).settings(SHAPES)
    assert {len(features(each)) for each in settings} == {len(FEATURES)}


TREE = [[0, 1.0, 1, 2], [0.5], [1, 3.0, 3, 4], [-0.25], [2.0]]


def by_hand(row: tuple[float, float]) -> float:
    if row[0] <= 1.0:
        return 0.5
    return -0.25 if row[1] <= 3.0 else 2.0


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), max_size=20))
def test_trees_are_followed_and_added_up_and_an_estimate_is_never_negative(
    rows: list[tuple[float, float]],
) -> None:
    estimator = Estimator(0.1, [TREE, TREE])
    found = estimator.estimate(np.array(rows, np.float64).reshape(-1, 2))
    assert np.allclose(found, [max(0.0, 0.1 + 2 * by_hand(row)) for row in rows])
