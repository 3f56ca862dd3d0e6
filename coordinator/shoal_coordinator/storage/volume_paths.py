"""The paths of a coordinator's volume (`volume`), parsed: what cannot be written as one of these
values cannot be asked for.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_protocol.digests import Digest, from_hexadecimal, hexadecimal, is_hexadecimal
from shoal_protocol.manifest import is_file_name

INPUTS: Final = "in"
OUTPUTS: Final = "out"
FOLDERS: Final = (INPUTS, OUTPUTS)
LONGEST_JOB: Final = 245
"""Characters of a job's name: files are called so with as much as `.tally.tmp` behind it."""
_JOB: Final = re.compile(rf"[a-z0-9]([-a-z0-9.]{{0,{LONGEST_JOB - 2}}}[a-z0-9])?")
_NAME_BYTES: Final = 255


class PathRefused(ValueError):
    """No path of the volume, or not one for this use."""


@dataclass(frozen=True, slots=True)
class FragmentPath:
    """A file of a fragment."""

    digest: Digest
    name: str

    def __str__(self) -> str:
        return f"fragments/{hexadecimal(self.digest)}/{self.name}"

    @property
    def owner(self) -> str:
        """What one upload at a time may write: a fragment, whose files become one folder."""
        return self.digest


@dataclass(frozen=True, slots=True)
class JobPath:
    """A file of a job; `folder` is `in` or `out`."""

    job: str
    folder: str
    name: str

    def __str__(self) -> str:
        return f"jobs/{self.job}/{self.folder}/{self.name}"

    @property
    def owner(self) -> str:
        """What one upload at a time may write: this file."""
        return str(self)


def parse_path(text: str) -> FragmentPath | JobPath:
    """A path of the volume. Raises `PathRefused`."""
    match text.split("/"):
        case ["fragments", digest, file] if is_hexadecimal(digest) and is_file_name(file):
            return FragmentPath(from_hexadecimal(digest), file)
        case ["jobs", job, folder, name] if is_job(job) and folder in FOLDERS and is_name(name):
            return JobPath(job, folder, name)
    raise PathRefused(
        f"{text[:300]!r} is no path here; there are fragments/DIGEST/FILE, jobs/JOB/in/NAME and "
        f"jobs/JOB/out/NAME"
    )


def is_name(name: str) -> bool:
    """Whether a job's file can be called like this: visible, printable, one level."""
    return (
        0 < len(name.encode(errors="replace")) <= _NAME_BYTES
        and not name.startswith(".")
        and "/" not in name
        and name.isprintable()
    )


def is_job(name: str) -> bool:
    """Whether a job can be called like this."""
    return _JOB.fullmatch(name) is not None


def jobs_in(root: Path) -> tuple[str, ...]:
    """The jobs that have a folder on a volume."""
    try:
        return tuple(sorted(filter(is_job, os.listdir(root / "jobs"))))
    except FileNotFoundError:
        return ()
