"""A client of a coordinator that is not what it should be."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from shoal_protocol.channels import open_channel
from shoal_protocol.coordinator_client import MOST_LISTED_BYTES, CallFailed, CoordinatorClient
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.coordinator_pb2_grpc import (
    CoordinatorServicer,
    add_CoordinatorServicer_to_server,
)


class _Endless(CoordinatorServicer):
    """Has more jobs than anybody could have; `told`: bytes of them that were asked for."""

    told = 0

    async def ListJobs(
        self, request: pb.ListJobsRequest, context: object
    ) -> AsyncIterator[pb.JobStatus]:
        status = pb.JobStatus(name="job", message="x" * (1 << 20))
        while True:
            self.told += status.ByteSize()
            yield status


async def test_a_list_of_jobs_without_end_is_given_up(tmp_path: Path) -> None:
    """The operator asks the coordinators of all namespaces, and keeps what they answer."""
    server = grpc.aio.server()
    endless = _Endless()  # type: ignore[abstract] # of the others nobody asks
    add_CoordinatorServicer_to_server(endless, server)
    target = f"unix:{tmp_path}/c"
    server.add_insecure_port(target)
    await server.start()
    client = CoordinatorClient(open_channel(target))
    try:
        with pytest.raises(CallFailed, match="more than 64 MiB of jobs"):
            await client.jobs(seconds=60)
        assert endless.told < 2 * MOST_LISTED_BYTES
    finally:
        await client.close()
        await server.stop(None)
