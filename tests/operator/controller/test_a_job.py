"""An InferenceJob from `kubectl apply` to Complete, on a real API server, with a real pool.

The nodes are played (`fake_node`); what workers do, the coordinator and the agents are real, and
are reached over a Unix socket.
"""

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pool import read_results

from cluster_fixtures import or_skip
from operator_processes import Operators, wait_until
from parity_with_whole import TOLERANCE, largest_difference, whole
from real_models import MODELS, find
from shoal_cluster import ControlPlane
from shoal_protocol.v1 import enrolment_pb2 as pb
from shoal_protocol.v1.enrolment_pb2_grpc import EnrolmentStub
from simulated_world import DEVICES, ITEMS, MODEL, NAMESPACE, World, job_spec, operating

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """One of its own, with played nodes."""
    with or_skip(lambda: ControlPlane(audit=True)) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def pool(world: World) -> None:
    """What every job refers to."""
    world.apply_pool()


@pytest.mark.minutes
async def test_a_job_runs_from_apply_to_complete(world: World, running: Operators) -> None:
    with operating(running, world):
        world.apply("InferenceJob", "ocr", **job_spec())
        await world.wait("devicepool", "shelf", "Ready")
        await world.wait("inferencejob", "ocr", "Complete")
    job = world.get("inferencejob", "ocr")
    assert job["status"]["items"] == {
        "total": ITEMS,
        "active": 0,
        "succeeded": ITEMS,
        "failed": 0,
    }
    results = read_results(world.claims / "lines" / "out")
    inputs = [MODELS[MODEL].inputs(seed) for seed in range(ITEMS)]
    for given, right in zip(results, whole(find(MODEL), inputs), strict=True):
        assert largest_difference(given, right) <= TOLERANCE
    devices = world.plane.access.get("devices", f"--namespace={NAMESPACE}")["items"]
    assert sorted(each["status"]["node"] for each in devices) == sorted(DEVICES)
    events = world.plane.access.get("events", f"--namespace={NAMESPACE}")["items"]
    told = {each["reason"] for each in events if each["reportingComponent"] == "shoal-operator"}
    assert {"StartedJob", "FinishedJob"} <= told, told


async def test_an_agents_pod_gets_a_certificate_for_its_node_and_for_no_other(
    world: World, running: Operators
) -> None:
    """The token is one that the API server gives to the pod that the DaemonSet has made."""
    with operating(running, world) as operator:
        await world.wait("devicepool", "shelf", "Ready")
        pods = world.plane.access.get(
            "pods", f"--namespace={NAMESPACE}", "--selector=app.kubernetes.io/component=agent"
        )["items"]
        pod = next(each for each in pods if each["spec"].get("nodeName") == "one")
        token = token_of(world, pod)
        authority = secret(world.plane, "shoal-system", "shoal-ca")["ca.crt"]
        await asyncio.to_thread(
            wait_until, "enrolment listens", lambda: operator.enrolment is not None
        )
        options = [("grpc.ssl_target_name_override", "shoal-operator.shoal-system.svc")]
        credentials = grpc.ssl_channel_credentials(root_certificates=authority)
        assert operator.enrolment is not None
        async with grpc.aio.secure_channel(operator.enrolment, credentials, options) as channel:
            stub: Any = EnrolmentStub(channel)
            answer = await stub.Enrol(
                pb.EnrolRequest(token=token, certificate_request=request_for("one")), timeout=30
            )
            with pytest.raises(grpc.aio.AioRpcError, match="may have 'one'"):
                await stub.Enrol(
                    pb.EnrolRequest(
                        token=token_of(world, pod, "20m"), certificate_request=request_for("two")
                    ),
                    timeout=30,
                )
    certificate = x509.load_pem_x509_certificate(answer.certificate_chain)
    assert certificate.subject.rfc4514_string() == "CN=one"
    of_the_pool = secret(world.plane, NAMESPACE, "shelf-ca")["tls.crt"]
    assert answer.authority == of_the_pool
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(of_the_pool))


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


async def test_a_job_survives_the_death_of_its_operator_and_one_that_is_deleted_is_cancelled(
    world: World, running: Operators
) -> None:
    with operating(running, world) as operator:
        await world.wait("devicepool", "shelf", "Ready")
        world.apply("InferenceJob", "long", **job_spec(outputs={"uri": "pvc://lines/long"}))
        await world.wait("inferencejob", "long", "Planned")
        operator.kill()
        world.apply("InferenceJob", "gone", **job_spec(outputs={"uri": "pvc://lines/gone"}))
    with operating(running, world):
        await world.wait("inferencejob", "long", "Complete")
        world.plane.kubectl("delete", "inferencejob", "gone", f"--namespace={NAMESPACE}")
        await asyncio.to_thread(
            wait_until, "nothing of the deleted job is left", lambda: not left_of(world, "gone")
        )
        await until_forgotten(world, "gone")
    assert len(read_results(world.claims / "lines" / "long")) == ITEMS


def left_of(world: World, name: str) -> list[str]:
    kinds = "inferencejobs,partitions,placements,jobs"
    found = world.plane.access.get(kinds, f"--namespace={NAMESPACE}")["items"]
    names = [each["metadata"]["name"] for each in found]
    return [each for each in names if each == name or each.startswith(f"{name}-")]


async def until_forgotten(world: World, name: str) -> None:
    """Until the coordinator has no run of a job."""
    async with asyncio.timeout(60):
        while True:
            runs = [each.name for each in await world.pool.client.jobs()]
            if not any(each.startswith(f"{name}-") for each in runs):
                return
            await asyncio.sleep(0.2)


async def test_a_new_operator_has_nothing_new_to_tell_of_a_pool_at_rest(
    world: World, running: Operators
) -> None:
    """Above all not that the coordinator, which it has not asked yet, does not answer."""
    kinds = ("devicepools,devices,placements,inferencejobs", f"--namespace={NAMESPACE}")

    def conditions() -> dict[str, Any]:
        found = world.plane.access.get(*kinds)["items"]
        return {
            f"{each['kind']}/{each['metadata']['name']}": each["status"]["conditions"]
            for each in found
        }

    with operating(running, world) as operator:
        await world.wait("devicepool", "shelf", "Ready")
        await asyncio.to_thread(
            wait_until, "all is told", lambda: operator.metric("shoal_operator_queue_depth") == 0
        )
        before = conditions()
        assert operator.stop() == 0
    with operating(running, world) as operator:
        await asyncio.to_thread(
            wait_until,
            "all was looked at",
            lambda: operator.metric("shoal_operator_reconcile_seconds_count") >= len(before),
        )
        assert conditions() == before
