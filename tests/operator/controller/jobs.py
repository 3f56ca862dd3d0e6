"""What tests ask of jobs in a world that really runs, and of those who may act for it."""

import asyncio
import base64
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal_cluster import ControlPlane
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.enrolment_pb2 import EnrolRequest, EnrolResponse
from shoal_protocol.v1.enrolment_pb2_grpc import EnrolmentStub
from simulated_world import NAMESPACE, World, job_spec


def cut_already(**more: object) -> dict[str, object]:
    """A job that takes the Partition of the job `slow`, so that nothing is cut again."""
    spec = job_spec(partitionRef={"name": "slow"}, **more)
    del spec["modelRef"]
    return spec


def status_of(world: World, name: str) -> dict[str, Any]:
    found: dict[str, Any] = world.get("inferencejob", name).get("status", {})
    return found


def succeeded(world: World, name: str) -> int:
    return int(status_of(world, name).get("items", {}).get("succeeded", 0))


def events_of(world: World, name: str) -> dict[str, str]:
    """Reasons and types of what was told of a job."""
    fields = f"--field-selector=involvedObject.name={name},involvedObject.kind=InferenceJob"
    found = world.plane.access.get("events", fields, f"--namespace={NAMESPACE}")["items"]
    return {each["reason"]: each["type"] for each in found}


async def final_events(world: World, name: str) -> dict[str, str]:
    """The Events of a job once its end was reported; they come after the condition."""
    await world.until("its end is told", lambda: "FinishedJob" in events_of(world, name))
    return events_of(world, name)


def workers_of(world: World, name: str) -> set[str]:
    """Components of the workers that a job has had and still has."""
    found = world.plane.access.get("jobs", f"--namespace={NAMESPACE}")["items"]
    return {
        each["metadata"]["labels"]["app.kubernetes.io/component"]
        for each in found
        if each["metadata"]["name"].startswith(f"{name}-")
    }


def unready(world: World, kind: str, name: str) -> bool:
    return not world.holds(kind, name, "Ready")


async def run_of(world: World, name: str) -> "pb.JobStatus | None":
    """The job as its coordinator knows it."""
    uid = world.get("inferencejob", name)["metadata"]["uid"]
    runs = {each.name: each for each in await world.pool.client.jobs()}
    return runs.get(f"{name}-{uid[:8]}")


async def on_terms(world: World, name: str, **terms: float) -> None:
    """Until a job runs on these terms, in the epoch in which it ran before."""
    before = await run_of(world, name)
    assert before is not None
    async with asyncio.timeout(60):
        while True:
            run = await run_of(world, name)
            assert run is not None
            assert (run.state, run.epoch) == (pb.JobStatus.RUNNING, before.epoch)
            if all(getattr(run.terms, field) == value for field, value in terms.items()):
                return
            await asyncio.sleep(0.1)


def left_of(world: World, name: str) -> list[str]:
    kinds = "inferencejobs,partitions,placements,jobs"
    found = world.plane.access.get(kinds, f"--namespace={NAMESPACE}")["items"]
    names = [each["metadata"]["name"] for each in found]
    return [each for each in names if each == name or each.startswith(f"{name}-")]


def conditions_of(world: World) -> dict[str, Any]:
    """Those of every object that has some."""
    kinds = "devicepools,devices,placements,inferencejobs"
    found = world.plane.access.get(kinds, f"--namespace={NAMESPACE}")["items"]
    return {
        f"{each['kind']}/{each['metadata']['name']}": each["status"]["conditions"] for each in found
    }


async def until_forgotten(world: World, name: str) -> None:
    """Until the coordinator has no run of a job, and no files of one that was not submitted."""
    async with asyncio.timeout(60):
        while True:
            runs = [each.name for each in await world.pool.client.jobs()]
            runs += (await world.pool.client.fragments()).unsubmitted
            if not any(each.startswith(f"{name}-") for each in runs):
                return
            await asyncio.sleep(0.2)


def token_of(world: World, pod: Any, duration: str = "10m") -> str:
    """Another duration makes another token."""
    return world.plane.kubectl(
        *("create", "token", pod["spec"]["serviceAccountName"]),
        f"--namespace={NAMESPACE}",
        "--audience=shoal.dev/enrolment",
        "--bound-object-kind=Pod",
        f"--bound-object-name={pod['metadata']['name']}",
        f"--duration={duration}",
    ).strip()


def secret(plane: ControlPlane, namespace: str, name: str) -> dict[str, bytes]:
    found = plane.access.get("secret", name, f"--namespace={namespace}")["data"]
    return {key: base64.b64decode(value) for key, value in found.items()}


def request_for(name: str) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


async def enrolled(target: str, authority: bytes, token: str, name: str) -> EnrolResponse:
    """What the operator answers one who asks for a certificate in this name."""
    options = [("grpc.ssl_target_name_override", "shoal-operator.shoal-system.svc")]
    credentials = grpc.ssl_channel_credentials(root_certificates=authority)
    request = EnrolRequest(token=token, certificate_request=request_for(name))
    async with grpc.aio.secure_channel(target, credentials, options) as channel:
        stub: Any = EnrolmentStub(channel)
        answer: EnrolResponse = await stub.Enrol(request, timeout=30)
        return answer
