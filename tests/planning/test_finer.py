"""Advice about a cut that fits on no device, against every cut there is."""

from hypothesis import given, settings
from hypothesis import strategies as st

from random_profiles import every_cut, profiles
from shoal_operator.api.profile import Profile
from shoal_operator.api.segments import Layout
from shoal_operator.planning.cuts import CutRequest, Refusal, choose_cuts
from shoal_operator.planning.finer import CutForSize, FinerCut, finer, in_words, largest


def fits_somehow(profile: Profile, budget: int) -> bool:
    layout = Layout(profile)
    return any(
        all(segment.resident_bytes <= budget for segment in segments)
        for count in range(1, len(layout.legal) + 2)
        for segments in every_cut(layout, count)
    )


@settings(max_examples=200, deadline=None)
@given(profile=profiles(), count=st.integers(1, 5), share=st.integers(20, 110))
def test_advice_is_true_when_it_is_followed(profile: Profile, count: int, share: int) -> None:
    cuts = choose_cuts(profile, CutRequest(fragments=count))
    if isinstance(cuts, Refusal):
        return
    budget = largest(profile, cuts) * share // 100
    advice = finer(profile, cuts, budget)
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
        case FinerCut(fragments, need):
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
            assert f"{fragments} fragments, the largest needs" in in_words(advice)
        case Refusal(reason=reason, node=node, need_bytes=need):
            assert not fits_somehow(profile, budget)
            assert node is not None
            assert need is not None
            assert need > budget
            assert in_words(advice).startswith(f"cutting finer does not help: node {node} needs")
            assert reason in in_words(advice)
