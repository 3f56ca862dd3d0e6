"""Under TLS, what a caller may do depends on the name in its certificate, and on nothing else."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from certificates import Pki
from coordinator.scripted import ScriptedDevice, connected, put_model
from coordinator.world import refusal
from shoal_coordinator.server import Coordinator, CoordinatorSettings, serving
from shoal_protocol.channels import open_channel
from shoal_protocol.partition import document_to_json
from shoal_protocol.services import SessionClient
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import files_pb2 as files
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub
from shoal_protocol.v1.files_pb2_grpc import FilesStub
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest

DENIED = grpc.StatusCode.PERMISSION_DENIED
Call = Callable[[grpc.aio.Channel], Awaitable[object]]


async def read_all(call: grpc.aio.UnaryStreamCall) -> object:  # type: ignore[type-arg]
    return [message async for message in call]


async def put(channel: grpc.aio.Channel) -> object:
    header = files.PutHeader(path="jobs/job/in/a.npz", bytes=1)
    call = FilesStub(channel).Put(iter([files.PutRequest(header=header)]), timeout=60)
    return await read_all(call)  # type: ignore[arg-type]


# Those that are to be refused send nothing: gRPC loses the status of a call (`STATUS_LOST`) whose
# first write finds it refused.
async def begin_put(channel: grpc.aio.Channel) -> object:
    return await FilesStub(channel).Put(timeout=60).read()


async def connect(channel: grpc.aio.Channel) -> object:
    return await SessionClient(channel).connect().read()


async def exchange(channel: grpc.aio.Channel) -> object:
    return await SessionClient(channel).exchange("pi-4").read()


def fetch_fragment(channel: grpc.aio.Channel) -> Awaitable[object]:
    request = FetchFragmentRequest(digest="sha256:" + "0" * 64, file="model.onnx")
    return read_all(SessionClient(channel).fetch_fragment(request, timeout=60))


CLIENT: dict[str, Call] = {
    "SubmitJob": lambda c: CoordinatorStub(c).SubmitJob(api.SubmitJobRequest(), timeout=60),
    "WatchJob": lambda c: read_all(
        CoordinatorStub(c).WatchJob(api.WatchJobRequest(name="x"), timeout=60)
    ),
    "CancelJob": lambda c: CoordinatorStub(c).CancelJob(api.CancelJobRequest(name="x"), timeout=60),
    "RetryJob": lambda c: CoordinatorStub(c).RetryJob(api.RetryJobRequest(name="x"), timeout=60),
    "ListJobs": lambda c: read_all(CoordinatorStub(c).ListJobs(api.ListJobsRequest(), timeout=60)),
    "RemoveJob": lambda c: CoordinatorStub(c).RemoveJob(api.RemoveJobRequest(name="x"), timeout=60),
    "PlaceFragments": lambda c: CoordinatorStub(c).PlaceFragments(
        api.PlaceFragmentsRequest(), timeout=60
    ),
    "ListDevices": lambda c: CoordinatorStub(c).ListDevices(api.ListDevicesRequest(), timeout=60),
    "ExportTraces": lambda c: CoordinatorStub(c).ExportTraces(
        api.ExportTracesRequest(), timeout=60
    ),
    "GetTimeline": lambda c: CoordinatorStub(c).GetTimeline(api.GetTimelineRequest(), timeout=60),
    "ListFragments": lambda c: CoordinatorStub(c).ListFragments(
        api.ListFragmentsRequest(), timeout=60
    ),
}
VIEWER: dict[str, Call] = {
    "GetOverview": lambda c: CoordinatorStub(c).GetOverview(api.GetOverviewRequest(), timeout=60),
    "ListItems": lambda c: read_all(
        CoordinatorStub(c).ListItems(api.ListItemsRequest(name="x"), timeout=60)
    ),
}
WORKER: dict[str, Call] = {
    "Put": begin_put,
    "Fetch": lambda c: read_all(
        FilesStub(c).Fetch(files.FetchFileRequest(path="jobs/x/out/a.npz"), timeout=60)
    ),
    "ListFiles": lambda c: read_all(
        FilesStub(c).ListFiles(files.ListFilesRequest(folder="fragments"), timeout=60)
    ),
    "DescribeFile": lambda c: FilesStub(c).DescribeFile(
        files.DescribeFileRequest(path="jobs/x/out/a.npz"), timeout=60
    ),
}
DEVICE: dict[str, Call] = {
    "Connect": connect,
    "Exchange": exchange,
    "FetchFragment": fetch_fragment,
}
REFUSALS = [
    *((name, call) for name in ("shoal-worker", "shoal-viewer", "pi-4") for call in CLIENT.items()),
    *((name, call) for name in ("shoal-worker", "pi-4") for call in VIEWER.items()),
    *(
        (name, call)
        for name in ("shoal-operator", "shoal-viewer", "pi-4")
        for call in WORKER.items()
    ),
    *(
        (name, call)
        for name in ("shoal-operator", "shoal-viewer", "shoal-worker", "shoal-user")
        for call in DEVICE.items()
    ),
]


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@asynccontextmanager
async def secured(pki: Pki, folder: Path) -> AsyncIterator[Coordinator]:
    settings = CoordinatorSettings(
        listen="localhost:0",
        store=folder / "store",
        state=folder / "state",
        credentials=pki.issue("shelf-coordinator"),
    )
    async with serving(settings) as coordinator:
        yield coordinator


@pytest.fixture
async def coordinator(pki: Pki, tmp_path: Path) -> AsyncIterator[Coordinator]:
    async with secured(pki, tmp_path) as coordinator:
        yield coordinator


@pytest.mark.parametrize(("name", "call"), REFUSALS, ids=[f"{n}-{c[0]}" for n, c in REFUSALS])
async def test_nobody_does_what_is_anothers(
    coordinator: Coordinator, pki: Pki, name: str, call: tuple[str, Call]
) -> None:
    async with open_channel(f"localhost:{coordinator.port}", pki.issue(name)) as channel:
        code, text = await refusal(call[1](channel))
    assert code == DENIED
    assert text.startswith(f"'{name}' is a ")


async def test_everyone_may_do_what_is_theirs(
    coordinator: Coordinator, pki: Pki, tmp_path: Path
) -> None:
    target = f"localhost:{coordinator.port}"
    document = put_model(tmp_path / "store")
    device = ScriptedDevice(target, "pi-4", document, credentials=pki.issue("pi-4"))
    async with (
        connected(device),
        open_channel(target, pki.issue("shoal-operator")) as operator,
        open_channel(target, pki.issue("shoal-worker")) as worker,
    ):
        listed = await CoordinatorStub(operator).ListFragments(
            api.ListFragmentsRequest(), timeout=60
        )
        assert list(listed.digests) == sorted(each.digest for each in document.fragments)
        devices = await CoordinatorStub(operator).ListDevices(api.ListDevicesRequest(), timeout=60)
        assert [each.name for each in devices.devices] == ["pi-4"]
        for name in ("shoal-operator", "shoal-viewer"):
            async with open_channel(target, pki.issue(name)) as viewer:
                seen = await CoordinatorStub(viewer).GetOverview(
                    api.GetOverviewRequest(), timeout=60
                )
            assert [each.status.name for each in seen.devices] == ["pi-4"]
        code, _ = await refusal(put(worker))
        assert code == grpc.StatusCode.DATA_LOSS  # it was let in, and then sent nothing


async def test_a_device_has_no_session_under_another_name(
    coordinator: Coordinator, pki: Pki, tmp_path: Path
) -> None:
    document = put_model(tmp_path / "store")
    target = f"localhost:{coordinator.port}"
    device = ScriptedDevice(target, "pi-4", document, credentials=pki.issue("jetson"))
    code, text = await refusal(device.run())
    assert (code, text) == (DENIED, "device 'pi-4' came with the certificate of 'jetson'")


@pytest.mark.parametrize("call", [CLIENT["ListDevices"], fetch_fragment])
async def test_a_certificate_with_two_common_names_opens_nothing(
    coordinator: Coordinator, pki: Pki, call: Call
) -> None:
    both = pki.issue_for("pi-4", "shoal-operator")
    async with open_channel(f"localhost:{coordinator.port}", both) as channel:
        code, text = await refusal(call(channel))
    assert code == DENIED
    assert text.startswith("the certificate does not have exactly one common name")


async def test_a_certificate_of_another_pool_does_not_even_connect(
    coordinator: Coordinator, pki: Pki, tmp_path: Path
) -> None:
    other = Pki(tmp_path / "other", "attic").issue("shoal-operator")
    mixed = type(other)(ca=pki.ca, certificate=other.certificate, key=other.key)
    async with open_channel(f"localhost:{coordinator.port}", mixed) as channel:
        code, _ = await refusal(CLIENT["ListDevices"](channel))
    assert code == grpc.StatusCode.UNAVAILABLE


async def test_a_user_submits_jobs_and_carries_their_files(
    coordinator: Coordinator, pki: Pki, tmp_path: Path
) -> None:
    target, user = f"localhost:{coordinator.port}", pki.issue("shoal-user")
    document = document_to_json(put_model(tmp_path / "store")).encode()
    async with open_channel(target, user) as channel:
        code, _ = await refusal(put(channel))
        assert code == grpc.StatusCode.DATA_LOSS  # it was let in, and then sent nothing
        request = api.SubmitJobRequest(name="lines", partition=document, epoch=1)
        status = await CoordinatorStub(channel).SubmitJob(request, timeout=60)
        assert status.name == "lines"


@pytest.mark.parametrize("folder", ["inputs_uri", "outputs_uri"])
async def test_a_users_job_has_no_other_folder_of_the_coordinators_machine(
    coordinator: Coordinator, pki: Pki, tmp_path: Path, folder: str
) -> None:
    document = document_to_json(put_model(tmp_path / "store")).encode()
    request = api.SubmitJobRequest(name="lines", partition=document, epoch=1)
    setattr(request, folder, str(tmp_path / "private"))
    target = f"localhost:{coordinator.port}"
    async with open_channel(target, pki.issue("shoal-user")) as channel:
        code, text = await refusal(CoordinatorStub(channel).SubmitJob(request, timeout=60))
    assert code == DENIED
    assert text.startswith("'shoal-user' may not name folders")
