"""The jobs that were submitted, on disk, so that the next coordinator resumes them.

`STATE/jobs/NAME.json` holds the request, the newest epoch, and the status of a job that has ended.
Ended jobs stay for their epoch: agents refuse an older one of a job that they know.
`STATE/jobs/NAME.tally` holds the job's statistics over all its runs: it is written every few
seconds while the job runs, and the request may be large.
`STATE/jobs/NAME.crashes` says whether a job is being processed now (`CrashCount`).
"""

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Final

from google.protobuf import json_format

from shoal_coordinator.jobs.values import NOTHING, Tally
from shoal_protocol.durable_files import is_transient, replace_file
from shoal_protocol.v1.coordinator_pb2 import JobStatus, SubmitJobRequest

logger = logging.getLogger(__name__)

_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job: its `request` until it is complete, its `status` and the digests of its `work` and its
    `results` once it has ended, none of them when it was removed. `submitted_seconds` is when,
    since 1970 by the wall clock, which is the only one that two coordinators share; None where
    nobody recorded it. `crashes` is what `CrashCount` found."""

    name: str
    epoch: int
    request: SubmitJobRequest | None = None
    status: JobStatus | None = None
    work: str = ""
    results: str = ""
    submitted_seconds: float | None = None
    tally: Tally = NOTHING
    crashes: int = 0


class CrashCount:
    """How many coordinators in a row have died while they processed a job, and stored no result of
    it: whoever reads hostile bytes may be killed by a signal, and nobody is left to say of which
    job they were.

    The file holds two digits: the count, and whether the job is being processed now. It is written
    before and after each piece of work. It survives the process, and need not survive the machine,
    so it is not synced.
    """

    def __init__(self, path: Path) -> None:
        """Count what the file says. Raises `OSError`."""
        self._path = path
        self._lock = Lock()
        self._under_way = 0
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            content = b""
        self.crashes = sum(map(int, content.decode())) if content.isdigit() else 0

    @contextmanager
    def processing(self) -> Iterator[None]:
        """What happens in the context may end this process. For any thread."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        with self._lock:
            before, self._under_way = self._under_way, self._under_way + by
            if not before or not self._under_way:
                self._write()

    def progress(self) -> None:
        """A result is stored: the count begins anew."""
        with self._lock:
            if self.crashes:
                self.crashes = 0
                self._write()

    def _write(self) -> None:
        content = f"{min(self.crashes, 9)}{int(self._under_way > 0)}".encode()
        with suppress(OSError):  # then this job is not blamed for a crash
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.pwrite(descriptor, content, 0)
            finally:
                os.close(descriptor)


class Ledger:
    """The records by name."""

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

    def load(self) -> dict[str, JobRecord]:
        """All records, in the order in which their jobs were submitted; one that is damaged is
        skipped with a warning. Raises `OSError` where the records cannot be read for now
        (`is_transient`)."""
        found: list[JobRecord] = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                tally = self._load_tally(path.stem)
                record = _parse(path.read_bytes(), tally, self.crash_count(path.stem).crashes)
            except (OSError, ValueError, json_format.ParseError) as error:
                if isinstance(error, OSError) and is_transient(error):
                    raise
                logger.warning("%s is not read: %s", path, error)
                continue
            if f"{record.name}.json" == path.name:
                found.append(record)
        found.sort(key=lambda record: record.submitted_seconds or 0.0)
        return {record.name: record for record in found}

    def put(self, record: JobRecord) -> None:
        """Record a job; it is durable on return. Raises `OSError`."""
        document: dict[str, object] = {
            "version": _VERSION,
            "name": record.name,
            "epoch": record.epoch,
        }
        if record.request is not None:
            document["request"] = json_format.MessageToDict(record.request)
        if record.work:
            document["work"] = record.work
        if record.results:
            document["results"] = record.results
        if record.submitted_seconds is not None:
            document["submitted_seconds"] = record.submitted_seconds
        if record.status is not None:
            document["status"] = json_format.MessageToDict(record.status)
        self.put_tally(record.name, record.tally)
        replace_file(self._path(record.name, "json"), json.dumps(document).encode())
        if record.request is None or record.status is not None:
            self._path(record.name, "crashes").unlink(missing_ok=True)

    def put_tally(self, name: str, tally: Tally) -> None:
        """Record a job's statistics; they are durable on return. Raises `OSError`."""
        if tally == NOTHING:
            self._path(name, "tally").unlink(missing_ok=True)
        else:
            replace_file(self._path(name, "tally"), json.dumps(asdict(tally)).encode())

    def forget(self, name: str) -> None:
        """Delete the record of an ended job. Raises `OSError`."""
        for kind in ("tally", "crashes", "json"):
            self._path(name, kind).unlink(missing_ok=True)

    def crash_count(self, name: str) -> CrashCount:
        """The crashes of a job that has not ended. Raises `OSError`."""
        return CrashCount(self._path(name, "crashes"))

    def _load_tally(self, name: str) -> Tally:
        try:
            return _parse_tally(self._path(name, "tally").read_bytes())
        except FileNotFoundError:
            return NOTHING
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and is_transient(error):
                raise
            logger.warning("the statistics of job %s are not read: %s", name, error)
            return NOTHING

    def _path(self, name: str, kind: str) -> Path:
        return self._folder / f"{name}.{kind}"


def _parse_tally(content: bytes) -> Tally:
    match json.loads(content):
        case {
            "stored": int(stored),
            "retries": int(retries),
            "seconds": float(seconds),
            "started_seconds": float() | None as started,
            "tier_hits": list(tier_hits),
            "finished": list(finished),
        }:
            return Tally(
                stored=stored,
                retries=retries,
                seconds=seconds,
                started_seconds=started,
                tier_hits=tuple(map(int, tier_hits)),
                finished=tuple(map(int, finished)),
            )
        case _:
            raise ValueError("they are of another version")


def _parse(content: bytes, tally: Tally, crashes: int) -> JobRecord:
    match json.loads(content):
        case {"version": 1, "name": str(name), "epoch": int(epoch), **rest}:
            request = status = None  # of one that was removed
            match rest:
                case {"request": dict(described)}:
                    request = json_format.ParseDict(described, SubmitJobRequest())
            match rest:
                case {"status": dict(described)}:
                    status = json_format.ParseDict(described, JobStatus())
            submitted = rest.get("submitted_seconds")
            return JobRecord(
                name=name,
                epoch=epoch,
                request=request,
                status=status,
                work=str(rest.get("work", "")),
                results=str(rest.get("results", "")),
                submitted_seconds=submitted if isinstance(submitted, float) else None,
                tally=tally,
                crashes=crashes,
            )
        case _:
            raise ValueError("it is of another version")
