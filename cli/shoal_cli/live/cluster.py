"""Pools of a cluster, through the user's own kubectl: its kubeconfig, plugins and rights.

`kubectl port-forward` carries the call, the Secret that the coordinator's Service names has the
certificate for it. So nothing of a cluster's client is installed or imported here.
"""

import asyncio
import base64
import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from shoal_api.labels import COMPONENT, POOL, VIEWED_WITH
from shoal_api.schema import GROUP
from shoal_cli.live.reasons import ClusterJob
from shoal_protocol.channels import open_secured_channel
from shoal_protocol.coordinator_client import CoordinatorClient
from shoal_protocol.units import format_number

SECONDS: Final = 30.0
_ENDS: Final = frozenset({"Complete", "Failed"})
_BAD: Final = frozenset({"Failed", "Suspended"})
"""Conditions that are bad news when they are True."""
_KLOG: Final = re.compile(r"^[IWEF]\d{4} .*\n?", re.MULTILINE)
"""What kubectl logs for its developers beside its message."""
_FORWARDING: Final = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+)")

Json = Mapping[str, Any]


class ClusterRefused(Exception):
    """What kubectl, or the cluster, does not do for this user; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """The user's kubectl with the options that say which cluster and namespace."""

    options: tuple[str, ...] = ()

    def command(self, *arguments: str) -> list[str]:
        """A command line. Raises `ClusterRefused` without a kubectl."""
        program = shutil.which("kubectl")
        if program is None:
            raise ClusterRefused(
                "kubectl is not on the PATH; install it, or name a coordinator with --coordinator"
            )
        return [program, *arguments, *self.options]

    def read(self, *arguments: str) -> str:
        """What a command prints. Raises `ClusterRefused` with kubectl's own words."""
        command = self.command(*arguments)
        try:
            done = subprocess.run(  # noqa: S603 - the user's kubectl
                command, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterRefused(
                f"kubectl {arguments[0]} has not answered within {SECONDS:g} s; does "
                "`kubectl get namespaces` answer?"
            ) from error
        if done.returncode:
            said = _KLOG.sub("", done.stderr).strip()
            raise ClusterRefused(said or f"kubectl {arguments[0]} failed")
        return done.stdout

    def get(self, *arguments: str) -> Json:
        """`kubectl get ... --output=json`."""
        found: Json = json.loads(self.read("get", *arguments, "--output=json"))
        return found

    def find(self, kind: str, *arguments: str) -> Json:
        """`kubectl get` of one of Shoal's kinds, by its full name: what else is installed may have
        a kind of that name as well, and kubectl would take the first of them."""
        return self.get(f"{kind}.{GROUP}", *arguments)

    def names(self, kind: str) -> list[str]:
        """The names of all objects of one of Shoal's kinds."""
        return [each["metadata"]["name"] for each in self.find(kind)["items"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPool:
    """A pool's coordinator as its Service describes it."""

    kubectl: Kubectl
    name: str
    namespace: str
    service: str
    port: int
    secret: str

    @contextlib.asynccontextmanager
    async def calling(self) -> AsyncIterator[CoordinatorClient]:
        """A client of the coordinator, through a port-forward that ends with it. Raises
        `ClusterRefused`."""
        credentials = await asyncio.to_thread(self._credentials)
        async with self._forwarded() as port:
            host = f"{self.service}.{self.namespace}.svc"
            target = f"127.0.0.1:{port}"
            client = CoordinatorClient(open_secured_channel(target, credentials, server_name=host))
            try:
                yield client
            finally:
                await client.close()

    def logs(self, component: str, device: str | None) -> list[str]:
        """The command that prints the logs of the coordinator, or of the agent on a node. Raises
        `ClusterRefused`."""
        chosen = f"{POOL}={self.name},{COMPONENT}={component}"
        pods = self.kubectl.get("pods", f"--selector={chosen}")["items"]
        found = [each for each in pods if device in (None, each["spec"].get("nodeName"))]
        if not found:
            nodes = ", ".join(sorted(each["spec"].get("nodeName", "?") for each in pods))
            where = "" if device is None else f" on {device}; there are some on {nodes or 'none'}"
            raise ClusterRefused(f"pool {self.name} has no pod of its {component}{where}")
        # One that was evicted stays, beside the one that took its place.
        name = max(found, key=_in_use)["metadata"]["name"]
        return self.kubectl.command("logs", f"pod/{name}")

    def _credentials(self) -> grpc.ChannelCredentials:
        try:
            data = self.kubectl.get("secret", self.secret)["data"]
        except ClusterRefused as error:
            raise ClusterRefused(
                f"{error}\nlooking at pool {self.name} needs the right to get Secret {self.secret} "
                f"and to create pods/portforward in namespace {self.namespace}; docs/top.md has a "
                "Role for that"
            ) from error
        ca, certificate, key = (
            base64.b64decode(data[name]) for name in ("ca.crt", "tls.crt", "tls.key")
        )
        return grpc.ssl_channel_credentials(ca, key, certificate)

    @contextlib.asynccontextmanager
    async def _forwarded(self) -> AsyncIterator[int]:
        """The local port that leads to the coordinator."""
        command = self.kubectl.command(
            "port-forward", "--address=127.0.0.1", f"service/{self.service}", f":{self.port}"
        )
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            async with asyncio.timeout(SECONDS):
                found = _FORWARDING.match(await child.stdout.readline())
                if found is None:
                    raise ClusterRefused((await child.stderr.read()).decode().strip())
            yield int(found[1])
        except TimeoutError as error:
            raise ClusterRefused(
                f"kubectl port-forward to service/{self.service} has not begun within {SECONDS:g} s"
            ) from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            await child.communicate()


def find_pool(kubectl: Kubectl, name: str | None) -> ClusterPool:
    """A pool's coordinator; without a name the only pool of the namespace. Raises
    `ClusterRefused`."""
    if name is None:
        name = _only_pool(kubectl)
    chosen = f"{POOL}={name},{COMPONENT}=coordinator"
    services = kubectl.get("services", f"--selector={chosen}")["items"]
    if not services:
        pools = kubectl.names("devicepools")
        known = f"there are {', '.join(pools)}" if pools else "there is none"
        if name in pools:
            known = f"kubectl describe devicepool {name} says why"
        raise ClusterRefused(f"pool {name} has no coordinator in this namespace; {known}")
    (service, *_) = services
    metadata, spec = service["metadata"], service["spec"]
    secret = metadata.get("annotations", {}).get(VIEWED_WITH)
    if secret is None:
        raise ClusterRefused(
            f"the coordinator of pool {name} was made by an operator that issues no certificate to "
            "look with; upgrade the operator"
        )
    return ClusterPool(
        kubectl=kubectl,
        name=name,
        namespace=metadata["namespace"],
        service=metadata["name"],
        port=next(port["port"] for port in spec["ports"] if port["name"] == "grpc"),
        secret=secret,
    )


def _in_use(pod: Json) -> tuple[bool, str]:
    """The pod that runs comes last, then the newest."""
    runs = pod.get("status", {}).get("phase") == "Running"
    return runs, pod["metadata"].get("creationTimestamp", "")


def _only_pool(kubectl: Kubectl) -> str:
    match kubectl.names("devicepools"):
        case [name]:
            return name
        case []:
            raise ClusterRefused(
                "there is no DevicePool in this namespace; name another with --namespace"
            )
        case names:
            known = ", ".join(names)
            raise ClusterRefused(f"there are several pools; name one with --pool: {known}")


# ---- what the cluster itself says of a job -------------------------------------------------------


def retry_job(kubectl: Kubectl, name: str, items: Sequence[int]) -> int:
    """Have an InferenceJob that has failed run once more, or one that follows its inputs take
    failed files again; which retry that is. Raises `ClusterRefused`."""
    job = _inference_job(kubectl, name)
    end, inputs = _end(job), job["spec"].get("inputs", {})
    follows = inputs.get("follow", False) and not job["spec"].get("end", False)
    if not end and not follows:
        raise ClusterRefused(
            f"InferenceJob {name} has not ended; what failed can be tried again when it has"
        )
    if end.startswith("Complete"):
        raise ClusterRefused(f"InferenceJob {name} is complete: no item of it has failed")
    known = (
        part.get("retry", {}).get("number", 0) for part in (job["spec"], job.get("status", {}))
    )
    number: int = max(known) + 1
    patch = {"spec": {"retry": {"number": number, "items": list(items) or None}}}
    what = (f"inferencejob.{GROUP}", name)
    kubectl.read("patch", *what, "--type=merge", f"--patch={json.dumps(patch)}")
    return number


def find_job(kubectl: Kubectl, name: str) -> ClusterJob:
    """Raises `ClusterRefused` where there is none."""
    job = _inference_job(kubectl, name)
    objects = _with_references(kubectl, job)
    ended = _end(job)
    unwell = objects[1:] if ended else objects
    return ClusterJob(
        pool=_reference("poolRef", objects),
        ended=ended,
        problems=tuple(line for each in unwell for line in _problems(each)),
        plan=tuple(line for each in objects if each["kind"] == "Placement" for line in _plan(each)),
    )


def _inference_job(kubectl: Kubectl, name: str) -> Json:
    try:
        return kubectl.find("inferencejob", name)
    except ClusterRefused as error:
        if "NotFound" not in str(error):
            raise
        known = ", ".join(kubectl.names("inferencejobs")) or "none"
        raise ClusterRefused(f"{error}\nthere are: {known}") from error


def _with_references(kubectl: Kubectl, job: Json) -> list[Json]:
    """A job, and what it and its references refer to; a Placement or Partition of its own has its
    name."""
    objects, own = [job], job["metadata"]["name"]
    for kind, key, default in (
        ("placement", "placementRef", own),
        ("partition", "partitionRef", own),
        ("model", "modelRef", None),
        ("devicepool", "poolRef", None),
    ):
        if (name := _reference(key, objects) or default) is not None:
            with contextlib.suppress(ClusterRefused):  # it is not there yet: the job says so
                objects.append(kubectl.find(kind, name))
    return objects


def _reference(key: str, objects: Sequence[Json]) -> str | None:
    """The name in the first reference of this key."""
    return next((each["spec"][key]["name"] for each in objects if key in each["spec"]), None)


def _end(job: Json) -> str:
    """`Complete: AllItemsSucceeded`; empty while it has not ended."""
    ends = (
        ": ".join(filter(None, (each["type"], each["reason"], each.get("message"))))
        for each in job.get("status", {}).get("conditions", [])
        if each["type"] in _ENDS and each["status"] == "True"
    )
    return next(ends, "")


def _plan(placement: Json) -> Iterator[str]:
    """What a Placement says of its plan, and of those that lost."""
    status = placement.get("status", {})
    for each in status.get("conditions", []):
        if each["type"] == "Planned" and each["status"] == "True":
            yield each["message"]
    for each in status.get("rejected", []):
        rate = each.get("itemsPerSecond")
        gives = "" if rate is None else f" would give {format_number(rate)} items/s"
        yield f"{each['alternative']}{gives}: {each['reason']}"


def _problems(document: Json) -> Iterator[str]:
    """The conditions that say that something is not well, or not yet; of several with one message
    the first."""
    conditions: Sequence[Json] = document.get("status", {}).get("conditions", [])
    what = f"{document['kind']} {document['metadata']['name']}"
    unwell = [
        each
        for each in conditions
        if each["status"] == ("True" if each["type"] in _BAD else "False") and each.get("message")
    ]
    by_message = {each["message"]: each for each in reversed(unwell)}
    for each in reversed(by_message.values()):
        yield f"{what}: {each['type']} {each['status']} ({each['reason']}): {each['message']}"
