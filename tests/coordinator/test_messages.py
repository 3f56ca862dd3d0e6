"""What is said of a job on the wire says the same when it is read again."""

import pytest

from shoal_coordinator.jobs.values import End, Outcome
from shoal_coordinator.server.messages import end_of, with_end
from shoal_protocol.partition import Outgrown
from shoal_protocol.v1 import coordinator_pb2 as pb


@pytest.mark.parametrize(
    "outgrown",
    [(), (Outgrown(fragment=3, need_bytes=70), Outgrown(fragment=0, need_bytes=1 << 40))],
)
def test_an_end_is_read_as_it_was_written(outgrown: tuple[Outgrown, ...]) -> None:
    end = End(
        outcome=Outcome.FAILED,
        reason="Budget",
        message="too large",
        outgrown=outgrown,
        seen={"t": (1, 256, 2260), "scalar": ()} if outgrown else {},
    )
    status = pb.JobStatus()
    status.ParseFromString(with_end(pb.JobStatus(), end).SerializeToString())
    assert end_of(status) == end
