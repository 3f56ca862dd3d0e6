"""Jobs as a coordinator has them: their names, their folders there, and what is carried both ways.

A job is called there by its name and by what its results depend on: another model or other inputs
make another job.
"""

import contextlib
import hashlib
import platform
import re
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from functools import partial
from typing import Final

from shoal_cli.local.orders import JobOrder, JobRefused
from shoal_cli.local.planned_jobs import PlannedJob
from shoal_cli.transfer.coordinators import JobFolder
from shoal_cli.transfer.feeds import Feed, Feeds, Note
from shoal_cli.transfer.folders import Folder
from shoal_cli.transfer.joined import Reachable
from shoal_coordinator.storage.inputs import InputsRefused, scan_inputs
from shoal_protocol.coordinator_client import CoordinatorClient
from shoal_protocol.v1 import coordinator_pb2 as pb

_NAME_LENGTH: Final = 48
_NAMED: Final = 3
"""Jobs that a note names, at most."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A job under the name that it has on the coordinator."""

    name: str
    job: PlannedJob

    def request(self) -> pb.SubmitJobRequest:
        request = self.job.request()
        request.name = self.name
        request.inputs_uri = request.outputs_uri = ""  # its folders on the coordinator's volume
        return request

    @property
    def order(self) -> JobOrder:
        return self.job.order

    @property
    def inputs(self) -> Folder:
        """Its inputs on this machine."""
        return Folder(str(self.order.inputs), self.order.inputs)

    @property
    def outputs(self) -> Folder:
        """Where its results go on this machine."""
        return Folder(str(self.order.outputs), self.order.outputs)


def drop_failures(outputs: Folder) -> None:
    """Of a job that is complete: remove what an earlier one with the same outputs said of items
    that had failed. Raises `OSError`."""
    (outputs.path / "failures.json").unlink(missing_ok=True)


def folder_there(
    coordinator: Reachable, job: str, folder: str, client: CoordinatorClient
) -> JobFolder:
    """A job's folder on the coordinator's volume."""
    place = f"jobs/{job}/{folder}"
    return JobFolder(f"coordinator://{coordinator.target}/{place}", client, place)


def carrier(coordinator: Reachable, job: str, inputs: Folder, outputs: Folder, note: Note) -> Feeds:
    """The feeds of a job that follows a folder of this machine: its inputs go there as they come,
    its results come back as they are made."""

    @contextlib.asynccontextmanager
    async def there(folder: str) -> AsyncIterator[JobFolder]:
        async with coordinator.calling() as client:
            yield folder_there(coordinator, job, folder, client)

    sending = Feed(source=lambda: inputs, target=partial(there, "in"), note=note)
    fetching = Feed(source=partial(there, "out"), target=lambda: outputs, note=note, changed=True)
    return Feeds([sending], [fetching])


def name_there(job: PlannedJob) -> str:
    """What the coordinator calls a job: its name, and eight digits of what its results depend on.
    Raises `JobRefused` for inputs that cannot be read."""
    document = job.prepared.document
    try:
        inputs = _followed(job) or scan_inputs(job.order.inputs, document.inputs).digest
    except InputsRefused as error:
        raise JobRefused(f"job {job.order.name}: {error}") from error
    facts = (document.model_digest, inputs, str(job.order.lossy))
    digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()
    return f"{job.order.name[:_NAME_LENGTH].rstrip('-.')}-{digest[:8]}"


def other_work_note(sent: Sent, there: Collection[str]) -> str:
    """That the coordinator has this job with other inputs or another model: it does not resume; ""
    where it knows this work, or none of that name."""
    stem, _, _ = sent.name.rpartition("-")
    pattern = re.compile(rf"{re.escape(stem)}-[0-9a-f]{{8}}")
    others = [name for name in there if pattern.fullmatch(name)]
    if not others or sent.name in there:
        return ""
    known = ", ".join(others[-_NAMED:])
    return (
        f"{sent.name} is a new job: {known} there has other inputs or another model; "
        "`shoal cancel --remove` removes what is not wanted"
    )


def _followed(job: PlannedJob) -> str:
    """What inputs that are followed are: their folder here, whatever is in it; else empty."""
    return f"{platform.node()}:{job.order.inputs.resolve()}" if job.order.follows else ""
