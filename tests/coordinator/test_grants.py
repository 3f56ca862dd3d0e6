"""What a plan grants fragments, from a client's request to the dispatcher."""

import pytest

from fragment_pools import MIB, partition
from shoal_coordinator.dispatch.instructions import Load, Tier
from shoal_coordinator.server.wire import Malformed, check_submission, job_spec, load_message
from shoal_protocol.units import Bytes
from shoal_protocol.v1 import coordinator_pb2 as pb

DOCUMENT = partition([1, 1], [20 * MIB] * 2, least=[6 * MIB] * 2)


def request(*stages: pb.StagePlacement) -> pb.SubmitJobRequest:
    return pb.SubmitJobRequest(name="job", stages=stages)


def granted(*stages: pb.StagePlacement) -> list[dict[str, int]]:
    wanted = request(*stages)
    check_submission(wanted, DOCUMENT)
    spec = job_spec(wanted, DOCUMENT, items=1, epoch=1, deadline=None)
    assert all(each.least_bytes == 6 * MIB for each in spec.stages)
    return [dict(each.granted) for each in spec.stages]


def test_a_grant_is_for_its_device_and_never_less_than_the_fragment_needs() -> None:
    first = pb.StagePlacement(devices=["a", "b", "c"], granted_bytes=[10 * MIB, 0, 20 * MIB])
    second = pb.StagePlacement(devices=["a"], granted_bytes=[1])
    assert granted(first, second) == [{"a": 10 * MIB}, {"a": 6 * MIB}]


def test_a_plan_without_grants_gives_fragments_all_that_they_need() -> None:
    assert granted(*[pb.StagePlacement(devices=["a"])] * 2) == [{}, {}]
    assert granted() == [{}, {}]


def test_a_prediction_is_for_its_device_and_what_is_no_time_is_not_predicted() -> None:
    placement = pb.StagePlacement(devices=["a", "b"], predicted_seconds=[0.25, float("nan")])
    spec = job_spec(request(placement, placement), DOCUMENT, items=1, epoch=1, deadline=None)
    assert spec.stages[0].predicted == (("a", 250_000_000),)


def test_grants_that_are_not_one_for_each_device_are_refused() -> None:
    wrong = pb.StagePlacement(devices=["a", "b"], granted_bytes=[1])
    with pytest.raises(Malformed, match="a stage of the plan has 2 devices, and 1 grants"):
        check_submission(request(wrong, wrong), DOCUMENT)


def test_a_load_says_how_urgent_the_fragment_is() -> None:
    order = Load(
        instruction=1,
        device="a",
        digest=DOCUMENT.fragments[0].digest,
        granted=Bytes(MIB),
        tier=Tier.IDLE,
        priority=-7,
    )
    assert load_message(order, ()).load.priority == -7
