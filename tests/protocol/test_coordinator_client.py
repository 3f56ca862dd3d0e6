"""A client of a coordinator that is not what it should be."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
    """Has more jobs and devices than anybody could have; `told`: bytes of jobs that were asked
    for; `asked`: for devices, which are of `device_bytes`."""

    told = 0
    asked = 0
    device_bytes = 1 << 20

    async def ListJobs(
        self, request: pb.ListJobsRequest, context: object
    ) -> AsyncIterator[pb.JobStatus]:
        status = pb.JobStatus(name="job", message="x" * (1 << 20))
        while True:
            self.told += status.ByteSize()
            yield status

    async def ListDevices(
        self, request: pb.ListDevicesRequest, context: object
    ) -> pb.ListDevicesResponse:
        self.asked += 1
        architecture = "x" * self.device_bytes
        device = pb.DeviceStatus(name=f"pi-{self.asked:06}", architecture=architecture)
        return pb.ListDevicesResponse(devices=[device], more=True)


@asynccontextmanager
async def asking(folder: Path, endless: _Endless) -> AsyncIterator[CoordinatorClient]:
    server = grpc.aio.server()
    add_CoordinatorServicer_to_server(endless, server)
    target = f"unix:{folder}/c"
    server.add_insecure_port(target)
    await server.start()
    client = CoordinatorClient(open_channel(target))
    try:
        yield client
    finally:
        await client.close()
        await server.stop(None)


async def test_a_list_of_jobs_without_end_is_given_up(tmp_path: Path) -> None:
    """The operator asks the coordinators of all namespaces, and keeps what they answer."""
    endless = _Endless()  # type: ignore[abstract] # of the others nobody asks
    async with asking(tmp_path, endless) as client:
        with pytest.raises(CallFailed, match="more than 64 MiB of jobs"):
            await client.jobs(seconds=60)
    assert endless.told < 2 * MOST_LISTED_BYTES


@pytest.mark.parametrize("device_bytes", [1, 2 << 20])
async def test_a_list_of_devices_without_end_is_given_up(tmp_path: Path, device_bytes: int) -> None:
    endless = _Endless()  # type: ignore[abstract]
    endless.device_bytes = device_bytes
    async with asking(tmp_path, endless) as client:
        with pytest.raises(CallFailed, match="more devices than 64 MiB hold"):
            await client.devices(seconds=60)
    assert endless.asked <= 64
