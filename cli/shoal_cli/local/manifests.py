"""Manifests for local mode: files in, the kinds out, or every error with its file and line.

The same files serve a cluster, so what is ordinary Kubernetes is skipped with a note, and what
only a cluster uses is noted once.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

from shoal_api.kinds import KINDS, AnyKind, DevicePool, InferenceJob, Model, Partition, Placement
from shoal_api.schema import API_VERSION, GROUP, parse
from shoal_api.shapes import Path as FieldPath
from shoal_api.shapes import did_you_mean, path_text
from shoal_cli.local.yaml_documents import MAX_BYTES, YamlDocument, YamlRefused, read_documents
from shoal_cli.transfer.places import redacted

STDIN: Final = Path("-")
_SUFFIXES: Final = (".yaml", ".yml", ".json")
_REFERENCES: Final = {
    "modelRef": "Model",
    "poolRef": "DevicePool",
    "partitionRef": "Partition",
    "placementRef": "Placement",
}
# What a manifest may say that local mode does not follow. Which nodes a pool has is not noted: its
# `local.devices` replaces it.
_CLUSTER_ONLY: Final[tuple[tuple[str, FieldPath], ...]] = (
    ("DevicePool", ("spec", "cache", "storageClassName")),
    ("DevicePool", ("spec", "coordinator", "storage")),
    ("Model", ("spec", "source", "secretRef")),
    ("InferenceJob", ("spec", "inputs", "secretRef")),
    ("InferenceJob", ("spec", "outputs", "secretRef")),
    ("InferenceJob", ("spec", "ttlSecondsAfterFinished")),
)

K = TypeVar("K", bound=AnyKind)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ManifestError:
    """What is wrong, where. `subject` is kind and name as far as they are known."""

    file: str
    line: int
    subject: str = ""
    field: str = ""
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return ": ".join(filter(None, (place, self.subject, self.field, self.message)))


class ManifestErrors(Exception):
    """All errors of all files, in the order of files and lines."""

    def __init__(self, errors: Iterable[ManifestError]) -> None:
        self.errors = tuple(sorted(errors))
        super().__init__(redacted("\n".join(str(error) for error in self.errors)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Addresses of other machines: files come from the one, results go to the other, while a job
    runs."""

    inputs: str | None = None
    outputs: str | None = None


NO_STREAMS: Final = Streams()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifests:
    """The objects by name, and notes for the user, each once. `streams` are those of jobs whose
    folders are on this machine by now."""

    models: Mapping[str, Model]
    pools: Mapping[str, DevicePool]
    partitions: Mapping[str, Partition]
    placements: Mapping[str, Placement]
    jobs: Mapping[str, InferenceJob]
    notes: tuple[str, ...]
    folders: Mapping[tuple[str, str], Path]
    streams: Mapping[str, Streams] = field(default_factory=dict)

    def folder_of(self, value: AnyKind) -> Path:
        """The folder of an object's file: relative addresses start there."""
        return self.folders[type(value).__name__, value.metadata.name]


def load_manifests(paths: Sequence[Path]) -> Manifests:
    """Read files, folders (their .yaml, .yml and .json files) and `-` for standard input.

    Raises `ManifestErrors` with everything that is wrong.
    """
    loading = _Loading()
    for file in _files(paths, loading.refuse_file):
        loading.read(file)
    if not loading.errors and not loading.objects:
        where = ", ".join(str(path) for path in paths) or "no file"
        message = f"has no object of {GROUP}; a manifest starts with apiVersion: {API_VERSION}"
        loading.refuse_file(where, message)
    return loading.result()


def manifests_of(source: str, values: Iterable[object]) -> Manifests:
    """Parse documents that were made here, of the `source` to name in errors, without lines."""
    loading = _Loading()
    for value in values:
        document = YamlDocument(value=value, lines={(): 0})
        loading.take(_Origin(file=source, folder=Path.cwd(), document=document))
    return loading.result()


def _files(paths: Sequence[Path], refuse: Callable[[str, str], None]) -> list[Path]:
    """The files to read, each once, in the order given; a folder's in the order of names."""
    files: dict[Path, None] = {}
    for path in paths:
        if path != STDIN and path.is_dir():
            found = sorted(each for each in path.iterdir() if each.suffix in _SUFFIXES)
            if not found:
                message = f"has no {', '.join(_SUFFIXES)} file"
                refuse(str(path), message)
            files.update(dict.fromkeys(found))
        else:
            files[path] = None
    return list(files)


def _read(file: Path) -> bytes:
    if file == STDIN:
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    with file.open("rb") as stream:
        return stream.read(MAX_BYTES + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Where a document is. `subject` is its kind and name for errors."""

    file: str
    folder: Path
    document: YamlDocument
    subject: str = ""


@dataclass(slots=True)
class _Loading:
    """What has been read so far. `seen` has invalid objects too: a reference to one is no error."""

    errors: list[ManifestError] = field(default_factory=list)
    objects: dict[tuple[str, str], AnyKind] = field(default_factory=dict)
    seen: dict[tuple[str, str], _Origin] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def read(self, file: Path) -> None:
        label = "standard input" if file == STDIN else str(file)
        folder = Path.cwd() if file == STDIN else file.parent.absolute()
        try:
            for document in read_documents(_read(file)):
                self.take(_Origin(file=label, folder=folder, document=document))
        except OSError as error:
            self.refuse_file(label, f"cannot be read: {error.strerror or error}")
        except YamlRefused as refused:
            self.refuse_file(label, refused.message, refused.line)

    def refuse_file(self, file: str, message: str, line: int = 0) -> None:
        """A file of which nothing, or no more, can be read."""
        self.errors.append(ManifestError(file=file, line=line, message=message))

    def take(self, origin: _Origin) -> None:
        """Parse a document as the kind that it says it is; skip what is not Shoal's."""
        value = origin.document.value
        if not isinstance(value, dict):
            return self._refuse(origin, (), "a manifest is a mapping with apiVersion and kind")
        version, kind = value.get("apiVersion"), value.get("kind")
        if not isinstance(version, str) or not isinstance(kind, str):
            missing = "kind" if isinstance(version, str) else "apiVersion"
            example = f"for example apiVersion: {API_VERSION} and kind: InferenceJob"
            return self._refuse(origin, (missing,), f"must be given as text; {example}")
        if (version, kind) == ("v1", "List"):
            return self._take_items(value, origin)
        if not self._is_ours(version, kind, origin):
            return None
        name = _given(value, ("metadata", "name"))
        subject = f"{kind} {name}" if name and isinstance(name, str) else kind
        origin = replace(origin, subject=subject)
        if name and isinstance(name, str):
            self._note_name(kind, name, origin)
        parsed = parse(KINDS[kind].cls, value)
        if isinstance(parsed, tuple):
            for error in parsed:
                self._refuse(origin, error.path, error.message)
            return None
        self.objects.setdefault((kind, parsed.metadata.name), parsed)
        return self._note_cluster_only(kind, value, subject)

    def _take_items(self, value: dict[str, object], origin: _Origin) -> None:
        """Take each item as kubectl does: as a document of its own."""
        items = value.get("items")
        if not isinstance(items, list):
            return self._refuse(origin, ("items",), "must be a list of manifests")
        for document in origin.document.parts("items", items):
            self.take(replace(origin, document=document))
        return None

    def _refuse(self, origin: _Origin, path: FieldPath, message: str) -> None:
        line, name = origin.document.line_of(path), path_text(path)
        self.errors.append(
            ManifestError(
                file=origin.file, line=line, subject=origin.subject, field=name, message=message
            )
        )

    def _is_ours(self, version: str, kind: str, origin: _Origin) -> bool:
        group = version.partition("/")[0]
        if group == GROUP or group.endswith(f".{GROUP}"):
            if version != API_VERSION:
                message = f"{version} is not known; this program reads {API_VERSION}"
                self._refuse(origin, ("apiVersion",), message)
                return False
            written = [name for name, names in KINDS.items() if names.written]
            if kind not in written:
                near = did_you_mean(kind, written) or f"; known are {', '.join(written)}"
                own = "is written by the operator only" if kind in KINDS else "is no kind of Shoal"
                self._refuse(origin, ("kind",), f"{kind} {own}{near}")
                return False
            return True
        if kind in KINDS and did_you_mean(version, [API_VERSION]):
            message = f"{version} is not {API_VERSION}, of which {kind} is"
            self._refuse(origin, ("apiVersion",), message)
        else:
            self.notes[f"{origin.file}: {kind} ({version}) is for a cluster; ignored here"] = None
        return False

    def _note_name(self, kind: str, name: str, origin: _Origin) -> None:
        first = self.seen.setdefault((kind, name), origin)
        if first is not origin:
            line = first.document.line_of(("metadata", "name"))
            message = f"{kind} {name} is there already, at {first.file}:{line}"
            self._refuse(origin, ("metadata", "name"), message)

    def _note_cluster_only(self, kind: str, value: dict[str, object], subject: str) -> None:
        paths = (path for of, path in _CLUSTER_ONLY if of == kind)
        fields = ", ".join(path_text(path) for path in paths if _given(value, path) is not None)
        if fields:
            self.notes[f"{subject}: {fields}: for a cluster; ignored here"] = None

    def _check_references(self) -> None:
        for origin in self.seen.values():
            for field_name, kind in _REFERENCES.items():
                path: FieldPath = ("spec", field_name, "name")
                name = _given(origin.document.value, path)
                if isinstance(name, str) and (kind, name) not in self.seen:
                    known = sorted(each for of, each in self.seen if of == kind)
                    listed = f"known are {', '.join(known)}" if known else "there is none at all"
                    message = f"there is no {kind} {name}; {listed}{did_you_mean(name, known)}"
                    self._refuse(origin, path, message)

    def result(self) -> Manifests:
        """All objects. Raises `ManifestErrors`, also for references to what does not exist."""
        self._check_references()
        if self.errors:
            raise ManifestErrors(self.errors)
        return Manifests(
            models=self._of(Model),
            pools=self._of(DevicePool),
            partitions=self._of(Partition),
            placements=self._of(Placement),
            jobs=self._of(InferenceJob),
            notes=tuple(self.notes),
            folders={key: origin.folder for key, origin in self.seen.items()},
        )

    def _of(self, kind: type[K]) -> dict[str, K]:
        return {
            value.metadata.name: value for value in self.objects.values() if isinstance(value, kind)
        }


def _given(value: object, path: FieldPath) -> object:
    for step in path:
        if not isinstance(value, dict):
            return None
        value = value.get(step)
    return value
