"""Cuts of which nothing has changed since they were made: the model is not even opened.

Beside `partition.json`, `order.json` records what was ordered, the model's files with their
digests, how the inputs looked where the cut depends on them, and what the cut came to. Where all of
that is so still, and every fragment in the store is sound, a run starts with it. In any other case
the model is opened, and that finds out what is to be done. A record carries its own digest: one
that is damaged is none.

What is divided afterwards, because it took more than a device has, is divided in the same cut each
time. So that cut is recorded as well, and where only the divisions have changed, it is not searched
for again.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from shoal_cli.local.cut_orders import CutOrder
from shoal_protocol.digests import Digest, digest_of, digest_of_file
from shoal_protocol.durable_files import replace_file
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.partition import document_from_json

VERSION: Final = 20
"""Of what is recorded of cuts: one made before may have estimates too low, or turns for nothing."""
_RECORD: Final = "order.json"
Inputs: TypeAlias = dict[str, list[int]]
"""The size and the time of change (nanoseconds) of each file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A cut before anything in it was divided: which `slicing` of the model it is of, the `shapes`
    of inputs that it is for, the cuts that there were to choose from, the `positions` of the best,
    and what was said of it. `rest`: as of `Suited`."""

    slicing: int
    shapes: Mapping[str, tuple[int, ...]]
    choices: Sequence[tuple[int, ...]]
    positions: tuple[int, ...]
    rejected: list[Mapping[str, Any]]
    note: str
    rest: bool


def inputs_at(folder: Path) -> Inputs:
    """How a folder's files look; those that cannot be looked at are left out."""
    found: Inputs = {}
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # it was removed, or leads nowhere
                status = entry.stat()
                found[entry.name] = [status.st_size, status.st_mtime_ns]
    return found


def remember(
    path: Path,
    order: CutOrder,
    inputs: Inputs | None,
    answer: Mapping[str, Any],
    base: Base | None,
) -> None:
    """Record what a cut came to, whose `partition.json` is `path`. `inputs`: how they looked before
    they were read; None where the cut does not depend on them. Raises `OSError`."""
    record = {"version": VERSION, "order": _plain(order), "inputs": inputs, "answer": answer}
    record["base"] = None if base is None else dataclasses.asdict(base)
    record["digest"] = _digest(record)
    replace_file(path.with_name(_RECORD), json.dumps(record).encode())


def find_known(path: Path, order: CutOrder, store: FragmentStore) -> dict[str, Any] | None:
    """What this very cut came to; None where anything is not as it was. Reads the model's files and
    the fragments."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        record = _recorded(path, order)
        if record is None or record["order"] != _plain(order):
            return None
        answer: dict[str, Any] = record["answer"]
        if not are_unchanged(answer["files"]):
            return None
        document = document_from_json(path.read_bytes())
        if all(store.is_sound(fragment.digest) for fragment in document.fragments):
            return answer
    return None


def find_base(path: Path, order: CutOrder, files: Mapping[str, str]) -> Base | None:
    """The cut in which this order divides; None where it is not known, or anything is not as it
    was. `files` are the model's, with their digests as they are now."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        record = _recorded(path, order)
        if record is None or record["answer"]["files"] != files:
            return None
        base = record["base"]
        return Base(
            slicing=int(base["slicing"]),
            shapes={name: tuple(shape) for name, shape in base["shapes"].items()},
            choices=tuple(map(tuple, base["choices"])),
            positions=tuple(base["positions"]),
            rejected=list(base["rejected"]),
            note=str(base["note"]),
            rest=bool(base["rest"]),
        )
    return None


def _recorded(path: Path, order: CutOrder) -> dict[str, Any] | None:
    """What is recorded of an order, whatever it divides, if its inputs are as they were. Raises
    what reading a damaged record raises."""
    record: dict[str, Any] = json.loads(path.with_name(_RECORD).read_bytes())
    if record.pop("digest") != _digest(record):
        return None
    undivided: dict[str, Any] = {"outgrown": []}
    if record["version"] != VERSION or record["order"] | undivided != _plain(order) | undivided:
        return None
    known = record["inputs"]
    if known is not None and (order.sample is None or inputs_at(order.sample) != known):
        return None
    return record


def _digest(record: Mapping[str, Any]) -> Digest:
    """Of a record without its digest; the same before it is written and after."""
    return digest_of(json.dumps(record).encode())


def _plain(order: CutOrder) -> dict[str, Any]:
    """As it is read from JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(order), default=str))
    return plain


def are_unchanged(files: Mapping[str, str]) -> bool:
    """Whether files have these digests still. Raises `OSError`."""
    for name, digest in files.items():
        with Path(name).open("rb") as file:
            if digest_of_file(file) != digest:
                return False
    return True
