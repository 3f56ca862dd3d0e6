"""The least budget that a refusal tells of one device: with it, and with any larger one, the model
is cut, and the plan has room for the fragments of that cut; so it is with several such devices, and
with smaller ones beside it."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragment_pools import device
from made_models import TOPOLOGIES, Made, Values, weight
from random_graphs import WIDTH, models
from shoal_compiler.cutting import Cut
from shoal_compiler.profile import Source
from shoal_planner.costs import Costs, Span
from shoal_planner.cuts import CutRequest, Frames, Refusal, choose_cuts
from shoal_planner.few_fragments import cut_for_budgets
from shoal_planner.goal import Goal
from shoal_planner.outcome import Plan
from shoal_planner.placement import plan_without_alternatives
from shoal_planner.profile import Profile
from shoal_planner.segments import Layout
from shoal_protocol.choices import Objective
from shoal_protocol.partition import PartitionDocument

MOST_STEPS = 40
GOAL = Goal(Objective.THROUGHPUT)


def least_budget(profile: Profile, frames: Frames = Frames.NONE) -> int:
    refused = choose_cuts(profile, CutRequest(max_bytes=1, frames=frames))
    assert isinstance(refused, Refusal)
    assert refused.need_bytes is not None
    return refused.need_bytes


def ladder(profile: Profile, percent: int) -> list[int]:
    """Budgets from the least upward, each by so many per cent larger, to what all of it needs."""
    whole = Layout(profile, moving=True).segment(0, len(profile.nodes)).resident_bytes
    budgets = [least_budget(profile)]
    while budgets[-1] <= whole and len(budgets) < MOST_STEPS:
        budgets.append(budgets[-1] * (100 + percent) // 100 + 1)
    return budgets


def refused_of(
    source: Source, profile: Profile, budgets: Sequence[int], parts: Sequence[int] = (1,)
) -> list[int]:
    """The budgets of which a device each with so small a part of it are refused."""
    documents: dict[tuple[int, ...], PartitionDocument] = {}
    refused = []
    for budget in budgets:
        shares = [budget // part for part in parts]
        cuts = cut_for_budgets(profile, shares, one_device=len(parts) == 1)
        if isinstance(cuts, Refusal):
            cuts = cut_for_budgets(profile, shares, one_device=len(parts) == 1, waiting=True)
        if isinstance(cuts, Refusal):
            refused.append(budget)
            continue
        if cuts not in documents:
            documents[cuts] = Cut(source, profile, cuts).document
        document = documents[cuts]
        pool = [device(f"device-{number}", share) for number, share in enumerate(shares)]
        if not isinstance(plan_without_alternatives(document, pool, GOAL), Plan):
            refused.append(budget)
    return refused


def opened(folder: Path, model: onnx.ModelProto, rows: int) -> tuple[Source, Profile]:
    onnx.save(model, folder / "model.onnx")
    source = Source.open(folder / "model.onnx")
    return source, source.profile({each.name: (rows, WIDTH) for each in model.graph.input})


@settings(max_examples=30, deadline=None)
@given(
    made=models(),
    rows=st.sampled_from((3, 500, 5_000, 20_000)),
    percent=st.integers(1, 3),
    parts=st.sampled_from(((1,), (1, 1, 1), (2, 1))),
)
def test_every_budget_from_the_least_on_is_enough(
    made: onnx.ModelProto, rows: int, percent: int, parts: Sequence[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, profile = opened(Path(folder), made, rows)
        assert refused_of(source, profile, ladder(profile, percent), parts) == []


@pytest.mark.parametrize("parts", [(1,), (1, 2)])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_budget_from_the_least_on_is_enough_for_graphs_of_all_forms(
    name: str, parts: Sequence[int], tmp_path: Path
) -> None:
    made = TOPOLOGIES[name]
    source = Source.open(made.save(tmp_path))
    profile = source.profile({key: value.shape for key, value in made.inputs().items()})
    assert refused_of(source, profile, ladder(profile, 1), parts) == []


def attentive(layers: int = 3, width: int = 128) -> Made:
    """Layers of attention, each of which takes the model's second input, too: cut finely, several
    fragments take each of the two."""
    lines, weights = list[str](), dict[str, Values]()
    for number in range(layers):
        last = "x" if not number else f"h{number}"
        for part in "qkv":
            lines.append(f"{part}{number} = MatMul({last}, W{part}{number})")
            weights[f"W{part}{number}"] = weight(width, width, seed=len(weights))
        lines += [
            f"t{number} = Transpose<perm = [1, 0]>(k{number})",
            f"s{number} = MatMul(q{number}, t{number})",
            f"m{number} = Add(s{number}, mask)",
            f"p{number} = Softmax(m{number})",
            f"a{number} = MatMul(p{number}, v{number})",
            f"h{number + 1} = Add(a{number}, {last})",
        ]
    inputs = f"float[N,{width}] x, float[N,N] mask"
    text = f"g ({inputs}) => (float[N,{width}] h{layers}) {{ {' '.join(lines)} }}"
    return Made(text=text, weights=weights, shapes={"x": (300, width), "mask": (300, 300)})


@pytest.mark.parametrize("parts", [(1,), (1, 2)])
@pytest.mark.parametrize("percent", [1, 2, 3])
def test_every_budget_is_enough_where_several_fragments_take_an_input(
    percent: int, parts: Sequence[int], tmp_path: Path
) -> None:
    made = attentive()
    source = Source.open(made.save(tmp_path))
    profile = source.profile(made.shapes)
    budgets = ladder(profile, percent)
    finest = choose_cuts(profile, CutRequest(max_bytes=budgets[0], frames=Frames.NONE))
    assert isinstance(finest, tuple)
    taken = [each.takes for each in Layout(profile).pieces(finest)]
    assert sum("x" in takes for takes in taken) > 1
    assert sum("mask" in takes for takes in taken) > 1
    assert refused_of(source, profile, budgets, parts) == []


@pytest.mark.parametrize("rows", [5_000, 100_000])
@pytest.mark.parametrize("name", ["a chain", "a residual network"])
def test_what_a_cut_for_one_device_reckons_with_is_what_its_plan_does(
    name: str, rows: int, tmp_path: Path
) -> None:
    """Of a model with one input, which one fragment takes: to the byte."""
    source = Source.open(TOPOLOGIES[name].save(tmp_path))
    profile = source.profile({"x": (rows, 16)})
    budget = least_budget(profile, Frames.MODEL)
    cuts = choose_cuts(profile, CutRequest(max_bytes=budget, frames=Frames.MODEL))
    assert isinstance(cuts, tuple)
    costs = Costs(Cut(source, profile, cuts).document)
    assert costs.least_in_turn(Span(0, costs.count), waiting=False) == budget
