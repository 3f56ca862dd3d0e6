"""Advice about a cut that fits on no device, against every cut there is."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from random_profiles import chain, every_cut, profiles
from shoal_planner.advice import CutAdvice, CutForSize, advise, in_words, largest
from shoal_planner.cuts import CutRequest, Frames, Refusal, choose_cuts
from shoal_planner.profile import Profile
from shoal_planner.segments import Layout


def fits_somehow(profile: Profile, budget: int) -> bool:
    layout = Layout(profile, moving=True)
    return any(
        all(segment.resident_bytes <= budget for segment in segments)
        for count in range(1, len(layout.legal) + 2)
        for segments in every_cut(layout, count)
    )


@settings(max_examples=75, deadline=None)
@given(profile=profiles(), count=st.integers(1, 5), share=st.integers(20, 110))
def test_advice_is_true_when_it_is_followed(profile: Profile, count: int, share: int) -> None:
    cuts = choose_cuts(profile, CutRequest(fragments=count))
    if isinstance(cuts, Refusal):
        return
    budget = largest(profile, cuts) * share // 100
    advice = advise(profile, cuts, budget)
    more = range(count + 1, len(Layout(profile).legal) + 2)
    fitting = [
        number
        for number in more
        if not isinstance(other := choose_cuts(profile, CutRequest(fragments=number)), Refusal)
        and largest(profile, other) <= budget
    ]
    match advice:
        case None:
            assert largest(profile, cuts) <= budget
        case CutAdvice(fragments, need):
            assert fragments == fitting[0] > count
            asked = choose_cuts(profile, CutRequest(fragments=fragments))
            assert not isinstance(asked, Refusal)
            assert largest(profile, asked) == need <= budget
            assert f"fragments: {fragments} would need" in in_words(advice)
        case CutForSize(fragments, need):
            assert not fitting
            asked = choose_cuts(profile, CutRequest(max_bytes=budget))
            assert not isinstance(asked, Refusal)
            assert len(asked) + 1 == fragments
            assert largest(profile, asked) == need <= budget
            assert f"{fragments} fragment{'s' * (fragments > 1)}, the largest needs" in in_words(
                advice
            )
        case Refusal(reason=reason, node=node, need_bytes=need):
            assert not fits_somehow(profile, budget)
            assert node is not None
            assert need is not None
            assert need > budget
            assert in_words(advice).startswith(f"cutting finer does not help: node {node} needs")
            assert reason in in_words(advice)


MIB = 1 << 20


def test_a_number_of_fragments_is_named_that_is_more_than_there_are() -> None:
    assert advise(chain(*[10 * MIB] * 6), (3,), 24 * MIB) == CutAdvice(3, 22_831_216)


def test_a_cut_through_a_wide_place_is_to_be_undone_not_made_finer() -> None:
    advice = advise(chain(MIB, MIB, sent=20 * MIB), (1,), 36 * MIB)
    assert isinstance(advice, CutForSize)
    assert advice.fragments == 1
    assert "1 fragment, the largest needs" in in_words(advice)


def test_one_node_that_is_too_large_is_named_with_what_it_needs() -> None:
    advice = advise(chain(MIB, 40 * MIB, MIB), (1,), 24 * MIB)
    assert isinstance(advice, Refusal)
    assert in_words(advice) == (
        "cutting finer does not help: node layer 1 (MatMul) needs 41.8 MiB by itself, the limit is "
        "24 MiB; the smallest limit that some cut keeps is 41.8 MiB; raise the budget"
    )


def test_a_finer_cut_in_which_other_items_wait_is_advised_where_no_other_fits() -> None:
    profile = chain(*[8 * MIB] * 12)
    (taken,) = profile.inputs
    wide = replace(profile.tensors[taken.name], bytes=8 * MIB)
    profile = replace(profile, tensors={**profile.tensors, taken.name: wide})
    least = choose_cuts(profile, CutRequest(max_bytes=1, frames=Frames.NONE))
    assert isinstance(least, Refusal)
    need = least.need_bytes or 0
    assert isinstance(choose_cuts(profile, CutRequest(max_bytes=need)), Refusal)
    found = advise(profile, (3,), need)
    assert isinstance(found, CutForSize)
    assert found.need_bytes <= need
    asked = choose_cuts(profile, CutRequest(max_bytes=need, frames=Frames.NONE))
    assert not isinstance(asked, Refusal)
    assert len(asked) + 1 == found.fragments
    refused = advise(profile, (3,), need - 1)
    assert isinstance(refused, Refusal)
    assert refused.need_bytes == need
