"""The jobs that were submitted, on disk, so that a coordinator that dies goes on with them.

`STATE/jobs/NAME.json` holds the request, the newest epoch, and whether the job has ended. Ended
ones are kept for their epoch: agents refuse an older one of a job that they have heard of.
"""

import fcntl
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf import json_format

from shoal_protocol.durable_files import replace_file
from shoal_protocol.v1.coordinator_pb2 import JobStatus, SubmitJobRequest

logger = logging.getLogger(__name__)

_VERSION: Final = 1
KEPT_ENDED: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job that was submitted: its `request` while it runs, its `status` once it has ended,
    neither when it was removed. `submitted_seconds` is when, by the clock on the wall (since 1970),
    which is the only one that two coordinators share; None where nobody noted it."""

    name: str
    epoch: int
    request: SubmitJobRequest | None = None
    status: JobStatus | None = None
    submitted_seconds: float | None = None


class Ledger:
    """The submissions by name."""

    def __init__(self, state: Path) -> None:
        """Raises `OSError` where the folder cannot be made, or another coordinator uses it."""
        self._folder = state / "jobs"
        self._folder.mkdir(parents=True, exist_ok=True)
        # Held until this process ends, however it ends.
        self._lock = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise OSError(f"{state} is in use by another coordinator") from error

    def close(self) -> None:
        """Let another coordinator have the folder."""
        os.close(self._lock)

    def load(self) -> dict[str, Submission]:
        """Everything that stands there; what cannot be read is left aside with a warning."""
        found: dict[str, Submission] = {}
        for path in sorted(self._folder.glob("*.json")):
            try:
                submission = _parse(path.read_bytes())
            except (OSError, ValueError, json_format.ParseError) as error:
                logger.warning("%s is not read: %s", path, error)
                continue
            if f"{submission.name}.json" == path.name:
                found[submission.name] = submission
        return found

    def put(self, submission: Submission) -> None:
        """Note a job; it stands when this returns. Raises `OSError`."""
        document: dict[str, object] = {
            "version": _VERSION,
            "name": submission.name,
            "epoch": submission.epoch,
        }
        if submission.request is not None:
            document["request"] = json_format.MessageToDict(submission.request)
        if submission.submitted_seconds is not None:
            document["submitted_seconds"] = submission.submitted_seconds
        if submission.status is not None:
            document["status"] = json_format.MessageToDict(submission.status)
        replace_file(self._path(submission.name), json.dumps(document).encode())

    def forget(self, name: str) -> None:
        """Drop an ended job for good."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def _parse(content: bytes) -> Submission:
    match json.loads(content):
        case {"version": 1, "name": str(name), "epoch": int(epoch), **rest}:
            request = status = None
            match rest:
                case {"request": dict(described)}:
                    request = json_format.ParseDict(described, SubmitJobRequest())
                case {"status": dict(described)}:
                    status = json_format.ParseDict(described, JobStatus())
                case _:
                    pass  # it was removed
            submitted = rest.get("submitted_seconds")
            return Submission(
                name=name,
                epoch=epoch,
                request=request,
                status=status,
                submitted_seconds=submitted if isinstance(submitted, float) else None,
            )
        case _:
            raise ValueError("it is of another version")
