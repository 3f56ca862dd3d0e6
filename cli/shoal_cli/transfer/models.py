"""A model by its address, on this machine's disk: fetched if it is remote, and verified.

```
CACHE/models/KEY/VERSION/model.onnx, ...      KEY: of the address, VERSION: of what the server says
                         fetched.json         which of the files are whole
```

An address names the ONNX file, or a folder (a prefix, an artifact) with one ONNX file in it. Files
of external data that the model names are fetched from beside it. A fetch that broke off is resumed;
what is here and unchanged at its source is not fetched again.

The digest is that of `shoal_planner.profile.Profile`: the file's own, or that of the list of all
files where there is external data.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

from shoal_cli.transfer.addresses import Access, is_remote
from shoal_cli.transfer.folders import receive_file, translated
from shoal_cli.transfer.places import (
    Entry,
    ModelMissing,
    OnBytes,
    Source,
    TransferBroken,
    TransferRefused,
    reader,
    with_tries,
)
from shoal_protocol.digests import Digest, digest_of_model, is_digest
from shoal_protocol.durable_files import replace_file
from shoal_protocol.units import format_bytes

LIMIT_BYTES: Final = 64 << 30
"""Of one model, unless the caller says otherwise."""
UNUSED_SECONDS: Final = 7 * 24 * 3600.0
"""Another version of a model that was not used for so long is removed."""

_NOTES: Final = "fetched.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetching:
    """How models are fetched: where they are kept, how large they may be, who counts bytes."""

    access: Access
    cache: Path
    limit_bytes: int = LIMIT_BYTES
    on_bytes: OnBytes = lambda size: None

    async def model(self, uri: str, digest: str | None = None) -> Path:
        """The ONNX file that an address names, with its external data beside it.

        Raises `TransferRefused` (also where it is not what `digest` says), `TransferBroken`,
        `ModelRefused`, `AddressRefused`. A local model is not copied, nor its digest checked: its
        profile has it.
        """
        if not is_remote(uri):
            return await asyncio.to_thread(_local_model, uri, self.access.local_path(uri))
        folder = self.cache / "models" / _key(uri)
        with translated(uri):
            async with _locked(folder):
                return await self._fetched(uri, digest, folder)

    async def _fetched(self, uri: str, digest: str | None, folder: Path) -> Path:
        async with self.access.source(uri) as source:
            entries = await with_tries(source.entries)
            model = _choose(uri, entries)
            place = folder / _key(model.name, _mark(model))
            if not model.version and model.digest is None:
                shutil.rmtree(place, ignore_errors=True)  # it cannot be told from another
            bundle = _Bundle(self, uri, source, place, {each.name: each for each in entries})
            return await bundle.fetch(model, digest)


@dataclass(slots=True)
class _Bundle:
    """One version of a model, with its files of external data, on its way into a folder."""

    how: Fetching
    uri: str
    source: Source
    folder: Path
    beside: Mapping[str, Entry]
    taken_bytes: int = 0
    notes: dict[str, tuple[str, Digest]] = field(default_factory=dict)

    async def fetch(self, model: Entry, digest: str | None) -> Path:
        # Imported where a model is here: a worker that only copies files has no use for it.
        from shoal_compiler.external import external_locations  # noqa: PLC0415

        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / model.name
        self._load_notes()
        own = await self._file(self.source, model, model.name)
        locations = await asyncio.to_thread(external_locations, path)
        found = digest_of_model(own, {each: await self._external(each) for each in locations})
        if digest is not None and found != digest:
            shutil.rmtree(self.folder)
            raise TransferRefused(f"{self.uri} is {found}, not {digest} as it should be")
        _remove_unused(self.folder)
        return path

    async def _external(self, location: str) -> Digest:
        """One file of external data, from beside the model."""
        if location in self.beside:
            return await self._file(self.source, self.beside[location], location)
        if self.uri.startswith("oci://"):
            raise TransferRefused(f"{self.uri}: the model's data {location} is no layer there")
        async with self.how.access.source(_sibling(self.uri, location)) as source:
            entries = await with_tries(source.entries)
            if len(entries) != 1:
                raise TransferRefused(f"{source.address}: there is no such file")
            return await self._file(source, entries[0], location)

    async def _file(self, source: Source, entry: Entry, location: str) -> Digest:
        """Have one file at its place below the folder; its digest."""
        path = self.folder / location
        path.parent.mkdir(parents=True, exist_ok=True)
        mark = _mark(entry)
        noted = self.notes.get(location)
        if noted is not None and noted[0] == mark and path.is_file():
            self.how.on_bytes(entry.size_bytes)
            return noted[1]
        self._check_room(entry)
        part = path.with_name(f".{path.name}.{mark[:16]}.part")
        read = reader(source, entry)
        digest = await with_tries(
            lambda: receive_file(source.address, part, path, entry, read, self.how.on_bytes),
        )
        self.notes[location] = (mark, digest)
        notes = json.dumps(self.notes).encode()
        await asyncio.to_thread(replace_file, self.folder / _NOTES, notes)
        return digest

    def _check_room(self, entry: Entry) -> None:
        self.taken_bytes += entry.size_bytes
        if self.taken_bytes > self.how.limit_bytes:
            raise TransferRefused(
                f"{self.uri}: has {format_bytes(self.taken_bytes)} or more; "
                f"at most {format_bytes(self.how.limit_bytes)} are fetched; raise --max-download, "
                f"or worker.disk of the chart, half of which it is in a cluster"
            )
        free = shutil.disk_usage(self.folder).free
        if entry.size_bytes > free:
            raise TransferBroken(
                f"{self.uri}: {entry.name} would need {format_bytes(entry.size_bytes)}, "
                f"{format_bytes(free)} are free in {self.folder}"
            )

    def _load_notes(self) -> None:
        """What is noted of files that are whole here: which version it was, and its digest."""
        with contextlib.suppress(OSError, ValueError):
            notes: dict[str, object] = json.loads((self.folder / _NOTES).read_bytes())
            for location, note in notes.items():
                match note:
                    case [str(mark), str(digest)] if is_digest(digest):
                        self.notes[location] = (mark, Digest(digest))


def _local_model(uri: str, path: Path) -> Path:
    """The ONNX file at a path, or the only one in a folder."""
    if not path.is_dir():
        if not path.is_file():
            raise ModelMissing(f"{uri}: there is no file {path}")
        return path
    found = sorted(each for each in path.iterdir() if each.suffix == ".onnx" and each.is_file())
    if len(found) != 1:
        raise ModelMissing(_how_many(uri, [each.name for each in found]))
    return found[0]


def _choose(uri: str, entries: Sequence[Entry]) -> Entry:
    """The ONNX file among the files of a source; the only file is it, whatever it is called."""
    if len(entries) == 1:
        return entries[0]
    found = [entry for entry in entries if entry.name.endswith(".onnx")]
    if len(found) != 1:
        raise TransferRefused(_how_many(uri, [entry.name for entry in found]))
    return found[0]


def _how_many(uri: str, names: Sequence[str]) -> str:
    if not names:
        return f"{uri}: there is no .onnx file"
    return f"{uri}: there are {len(names)} models, {', '.join(names[:8])}; name one"


def _sibling(uri: str, location: str) -> str:
    """The address of a file beside another; a signature in the address stays."""
    parts = urlsplit(uri)
    folder = parts.path.rpartition("/")[0]
    path = location if parts.scheme == "s3" else quote(location)
    return urlunsplit(parts._replace(path=f"{folder}/{path}"))


def _remove_unused(folder: Path) -> None:
    """Remove other versions that nobody has used for long."""
    os.utime(folder)
    limit = time.time() - UNUSED_SECONDS
    for other in folder.parent.iterdir():
        if other.is_dir() and other.stat().st_mtime < limit:
            shutil.rmtree(other, ignore_errors=True)


@contextlib.asynccontextmanager
async def _locked(folder: Path) -> AsyncIterator[None]:
    """One process at a time fetches from one address."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        yield


def _mark(entry: Entry) -> str:
    """What tells a version of a file from another."""
    return _key(str(entry.size_bytes), entry.version, entry.digest or "")


def _key(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]
