"""Weights that a model has in one tensor, and picks by constants: each is a weight of its own."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper

from chaining import Tensors, run_chained, run_whole
from compiler.layers import integers
from compiler.test_resident_estimate import MIB, measured
from made_models import Made, weight
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import Source, profile_model
from shoal_planner.cuts import CutRequest, Refusal, choose_cuts

EXPERTS, WIDTH = 6, 512
STACKED = weight(EXPERTS, WIDTH, WIDTH) * np.float32(0.05)
"""Of 6 MiB, 1 MiB for each expert."""
INDICES = {f"i{each}": np.array(each - EXPERTS * (each % 2)) for each in range(EXPERTS)}
"""Every other one counts from the end."""
SHAPES = {"x": (2, WIDTH)}


def chained(picks: str, names: list[str], outputs: str = "float[2,512] y") -> str:
    """A model that multiplies with one weight after the other."""
    steps, last = [], "x"
    for number, name in enumerate(names):
        steps.append(f"m{number} = MatMul({last}, {name}) h{number} = Tanh(m{number})")
        last = f"h{number}"
    return f"g (float[2,512] x) => ({outputs}) {{ {picks} {' '.join(steps)} y = Identity({last}) }}"


PICKED = [f"w{each}" for each in range(EXPERTS)]
GATHERS = " ".join(f"w{each} = Gather<axis = 0>(W, i{each})" for each in range(EXPERTS))
BY_GATHER = Made(
    text=chained(GATHERS, PICKED), weights={"W": STACKED, **INDICES}, shapes=SHAPES, tolerance=1e-5
)
BY_SPLIT = Made(
    text=chained(
        f"{', '.join(f's{each}' for each in range(EXPERTS))} = Split<axis = 0>(W, sizes) "
        + " ".join(f"w{each} = Squeeze(s{each}, first)" for each in range(EXPERTS)),
        PICKED,
    ),
    weights={"W": STACKED, "sizes": np.full(EXPERTS, 1), "first": np.array([0])},
    shapes=SHAPES,
    tolerance=1e-5,
)
BY_ROWS_OF_ONE = Made(
    text=chained(
        " ".join(
            f"r{each} = Gather(W, i{each}) w{each} = Squeeze(r{each}, first)"
            for each in range(EXPERTS)
        ),
        PICKED,
    ),
    weights={
        "W": STACKED,
        "first": np.array([0]),
        **{f"i{each}": np.array([each], np.int32) for each in range(EXPERTS)},
    },
    shapes=SHAPES,
    tolerance=1e-5,
)
MODELS = pytest.mark.parametrize(
    "made", [BY_GATHER, BY_SPLIT, BY_ROWS_OF_ONE], ids=["Gather", "Split", "rows of one"]
)


@MODELS
def test_a_device_holds_one_of_the_weights_at_a_time(made: Made, tmp_path: Path) -> None:
    path = made.save(tmp_path)
    profile = profile_model(path)
    cuts = choose_cuts(profile, CutRequest(fragments=EXPERTS, max_bytes=3 * MIB))
    assert not isinstance(cuts, Refusal)
    document = cut_model(path, profile, cuts, tmp_path)
    assert {fragment.weight_bytes // MIB for fragment in document.fragments} == {1}


@MODELS
def test_the_result_is_that_of_the_model(made: Made, tmp_path: Path) -> None:
    path = made.save(tmp_path)
    profile = profile_model(path)
    cuts = choose_cuts(profile, CutRequest(fragments=3))
    assert not isinstance(cuts, Refusal)
    item = made.inputs()
    given = run_chained(tmp_path, cut_model(path, profile, cuts, tmp_path), item)["y"]
    wanted = run_whole(path, item)["y"].astype(float)
    np.testing.assert_allclose(given.astype(float), wanted, atol=made.tolerance)


def test_a_picked_weight_is_in_parts_where_it_is_large(tmp_path: Path) -> None:
    source = Source.open(BY_GATHER.save(tmp_path)).sliced(3)
    assert max(each.bytes for each in source.graph.weights.values()) <= 256 << 10


def test_what_is_picked_and_is_an_output_stays(tmp_path: Path) -> None:
    made = Made(
        text=chained(GATHERS, PICKED, "float[2,512] y, float[512,512] w3"),
        weights=BY_GATHER.weights,
        shapes=SHAPES,
    )
    path, item = made.save(tmp_path), made.inputs()
    given = run_chained(tmp_path, cut_model(path, profile_model(path), (), tmp_path), item)
    np.testing.assert_array_equal(given["w3"], STACKED[3])


def test_a_table_that_is_read_otherwise_too_stays_as_it_is(tmp_path: Path) -> None:
    source = Source.open(both_ways(tmp_path))
    assert "W" in source.graph.weights
    assert sum(node.op_type == "Gather" for node in source.graph.nodes) == EXPERTS + 1


def both_ways(folder: Path) -> Path:
    """A model that picks by constants, and by an input too."""
    model = BY_GATHER.proto()
    model.graph.input.append(helper.make_tensor_value_info("chosen", TensorProto.INT64, [1]))
    model.graph.output.append(helper.make_empty_tensor_value_info("z"))
    model.graph.node.extend(
        (
            helper.make_node("Gather", ["W", "chosen"], ["rows"]),
            helper.make_node("ReduceMax", ["rows"], ["z"], axes=[0, 1]),
        )
    )
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def reckoned_and_measured(path: Path, item: Tensors, folder: Path) -> tuple[int, int]:
    (fragment,) = cut_model(path, profile_model(path), (), folder).fragments
    place = folder / "fragments" / fragment.digest.removeprefix("sha256:")
    return fragment.resident_bytes, measured(place, item, folder)


@pytest.mark.parametrize("otherwise", [False, True], ids=["picked only", "read otherwise too"])
def test_no_more_is_in_memory_than_is_reckoned(otherwise: bool, tmp_path: Path) -> None:
    path = both_ways(tmp_path) if otherwise else BY_GATHER.save(tmp_path)
    item = BY_GATHER.inputs() | ({"chosen": np.array([2])} if otherwise else {})
    reckoned, peak = reckoned_and_measured(path, item, tmp_path)
    assert peak <= reckoned


INTEGERS = {f"q{each}": integers(WIDTH, WIDTH) for each in range(EXPERTS)}
MADE = {
    "dequantised": (
        " ".join(f"w{each} = DequantizeLinear(q{each}, s, z)" for each in range(EXPERTS)),
        INTEGERS | {"s": np.float32(0.001), "z": np.uint8(120)},
    ),
    "gathered": (
        " ".join(f"w{each} = Gather(q{each}, order)" for each in range(EXPERTS)),
        {
            "order": np.arange(WIDTH)[::-1].copy(),
            **{f"q{each}": STACKED[each] for each in range(EXPERTS)},
        },
    ),
}


@pytest.mark.parametrize(("makers", "weights"), MADE.values(), ids=MADE)
def test_weights_of_a_chain_are_made_one_after_the_other(
    makers: str, weights: dict[str, npt.NDArray[np.generic]], tmp_path: Path
) -> None:
    made = Made(text=chained(makers, PICKED), weights=weights, shapes=SHAPES)
    reckoned, peak = reckoned_and_measured(made.save(tmp_path), made.inputs(), tmp_path)
    assert peak <= reckoned
