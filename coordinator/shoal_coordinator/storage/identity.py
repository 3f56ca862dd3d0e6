"""Whose results a folder holds: `.shoal/JOB/job.json`.

A result counts while the model and its own input file are what they were. So `job.json` names the
model and each input file, with a fingerprint of what it holds and the number that its results have
on the disk (its part, its lines in journal and logs). When the job runs again:

    the file is the same                            it keeps its number
    it was changed or is gone, and has a result     the job is refused
    it was changed, and has no result               it gets a new number
    it was added                                    it gets a new number

A new number is one that no file of the job has had, so nothing that an earlier run left behind is
taken for the result of another file. Numbers of items are given anew for each run, in the order of
the names.

A job that follows a folder has one identity in place of that. So have the results of versions of
Shoal that knew no fingerprints: with the same identity they are taken over, with another refused.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from shoal_coordinator.storage.file_names import encodable, result_name
from shoal_coordinator.storage.folders import Folder
from shoal_coordinator.storage.kept_results import kept_results

_NAME: Final = "job.json"
_WHOLE_VERSION: Final = 2
"""Of a file with one identity."""
_VERSION: Final = 3
_MOST_BYTES: Final = 256 << 20
_MOST: Final = 1 << 31
"""Numbers of files: a log has 32 bits for one."""
_SHOWN: Final = 3
"""Files that a refusal names."""


class Conflict(Exception):
    """The folder has results that this job cannot go on with; the text says why, and what to do."""


class Origin(NamedTuple):
    """An input file: its name, and a fingerprint of what it holds."""

    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """What the results of a job depend on, whose input files are all known, in their order."""

    model: str
    lossy: bool
    files: Sequence[Origin]


@dataclass(frozen=True, slots=True)
class _Known:
    """What `job.json` says of the files: fingerprint and number of each, and the number that is
    next."""

    files: Mapping[str, tuple[str, int]]
    following: int


def claim(
    folder: Folder, outputs: Folder, job: str, identity: str, origins: Origins | None
) -> Sequence[int] | None:
    """Take the job's `folder` for these results, or go on with those that are there; the numbers of
    the files of `origins`. Raises `Conflict` and `OSError`."""
    whole = {"version": _WHOLE_VERSION, "job": job, "identity": identity}
    before = _read(folder)
    if origins is None:
        if before is None:
            folder.replace(_NAME, json.dumps(whole).encode())
        elif before != whole:
            raise _other(folder, job, "of another model or other inputs")
        return None
    if before is None or before == whole:
        numbers, following = list(range(len(origins.files))), len(origins.files)
    else:
        known = _known(folder, job, before, origins)
        _require_unchanged(folder, outputs, known, origins.files)
        numbers, following = _numbered(known, origins.files)
    document = {
        "version": _VERSION,
        "job": job,
        "model": origins.model,
        "lossy": origins.lossy,
        "next": following,
        "names": [each.name for each in origins.files],
        "fingerprints": [each.fingerprint for each in origins.files],
        "numbers": numbers,
    }
    if document != before:
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        folder.replace(_NAME, text.encode(errors="surrogateescape"))
    return numbers


def _read(folder: Folder) -> Mapping[str, object] | None:
    """What the file says; None where there is none."""
    if folder.size(_NAME) is None:
        return None
    with open(folder.open(_NAME, os.O_RDONLY), "rb") as file:
        content = file.read(_MOST_BYTES)
    try:
        found = json.loads(content.decode(errors="surrogateescape"))
    except (ValueError, RecursionError) as e:
        raise _damaged(folder) from e
    return found if isinstance(found, dict) else {}


def _known(folder: Folder, job: str, before: Mapping[str, object], origins: Origins) -> _Known:
    """The files of results that are of the same job and model. Raises `Conflict`."""
    match before:
        case {
            "version": 3,
            "job": str(name),
            "model": str(model),
            "lossy": bool(lossy),
            "next": int(following),
            "names": list(names),
            "fingerprints": list(fingerprints),
            "numbers": list(numbers),
        }:
            pass
        case {"version": 3}:
            raise _damaged(folder)
        case _:
            raise _other(folder, job, "of another model or other inputs")
    if (name, model) != (job, origins.model):
        raise _other(folder, job, "of another model; the inputs were not compared")
    if lossy != origins.lossy:
        raise _other(folder, job, "with another transferPrecision")
    given = {number for number in numbers if isinstance(number, int) and 0 <= number < following}
    if not len(given) == len(numbers) == len(names) == len(fingerprints) or following > _MOST:
        raise _damaged(folder)
    marks = zip(map(str, fingerprints), numbers, strict=True)
    return _Known(dict(zip(map(str, names), marks, strict=True)), following)


def _require_unchanged(
    folder: Folder, outputs: Folder, known: _Known, files: Sequence[Origin]
) -> None:
    """Raises `Conflict` where a file that has a result was changed or is gone."""
    now = dict(files)
    suspect = {
        number: name
        for name, (fingerprint, number) in known.files.items()
        if now.get(name) != fingerprint
    }
    if not suspect:
        return
    results = {number: result_name(name) for number, name in suspect.items()}
    kept = kept_results(folder, outputs, results)
    if not kept:
        return
    names = sorted(suspect[number] for number in kept)
    changed = [name for name in names if name in now]
    gone = [name for name in names if name not in now]
    kinds = (("have changed since", changed), ("are gone", gone))
    what = " and that ".join(f"{how} ({_listed(which)})" for how, which in kinds if which)
    raise Conflict(
        f"hold results of inputs that {what}; put these back as they were, choose another folder, "
        f"or delete {_listed([path for paths in kept.values() for path in paths])}, and what these "
        "inputs hold now is computed"
    )


def _numbered(known: _Known, files: Sequence[Origin]) -> tuple[list[int], int]:
    """The numbers of the files, and the one that is next."""
    numbers, following = list[int](), known.following
    for name, fingerprint in files:
        before, number = known.files.get(name, ("", following))
        if before != fingerprint:
            number, following = following, following + 1
        numbers.append(number)
    return numbers, following


def _listed(names: Sequence[str]) -> str:
    """The first of these, and how many there are beside them."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(encodable, names[:_SHOWN])) + more


def _other(folder: Folder, job: str, how: str) -> Conflict:
    return Conflict(
        f"hold results of another {job!r}, {how}; choose another folder, "
        f"or delete {folder.path.parent}"
    )


def _damaged(folder: Folder) -> Conflict:
    """Without its numbers nobody knows what else there is: all of it has to go."""
    return Conflict(f"hold a damaged {folder.path / _NAME}; delete {folder.path}")
