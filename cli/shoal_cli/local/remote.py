"""Addresses of other machines in local mode: inputs are downloaded, results uploaded.

The manifests are the cluster's, so they may name `s3://`, `https://` and `oci://`. Models are kept
in the user's cache folder (`transfer.models`), inputs and results in the work folder of the run:

```
WORK/inputs/JOB/      what the address held when the run began
WORK/outputs/JOB/     what the run has made, with its journal
```

After `download` the manifests name local files only; the rest of local mode knows no others. Where
a job follows its inputs, the addresses stay in the manifests' `streams`: files come from there, and
results go there, while the job runs (`feeds_of`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shoal_api.kinds.inference_job import Inputs
from shoal_cli.local.manifests import Manifests, Streams
from shoal_cli.local.orders import JobOrder
from shoal_cli.transfer.addresses import Access, is_remote
from shoal_cli.transfer.cache_folder import default_cache
from shoal_cli.transfer.copying import copy
from shoal_cli.transfer.feeds import Feed, Feeds
from shoal_cli.transfer.folders import Folder
from shoal_cli.transfer.models import Fetching
from shoal_cli.transfer.places import TransferRefused, redacted
from shoal_protocol.units import counted, format_bytes

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloaded:
    """Manifests of local addresses. `results` are folders, and the addresses to copy them to."""

    manifests: Manifests
    results: tuple[tuple[Path, str], ...] = ()


def is_far(manifests: Manifests) -> bool:
    """Whether there is anything to download or to upload."""
    uris = [model.spec.source.uri for model in manifests.models.values()]
    for job in manifests.jobs.values():
        uris += [job.spec.inputs.uri, job.spec.outputs.uri]
    return any(map(is_remote, uris))


async def download(manifests: Manifests, work: Path, note: Note) -> Downloaded:
    """Fetch what is far away. Raises `TransferRefused`, `TransferBroken`, `ModelRefused`."""
    access, results = Access(), []
    streams: dict[str, Streams] = {}
    models, jobs = dict(manifests.models), dict(manifests.jobs)
    for name, model in models.items():
        source = model.spec.source
        if is_remote(source.uri):
            fetching = Fetching(access=access, cache=default_cache())
            path = await fetching.model(source.uri, source.digest)
            note(redacted(f"Model {name}: {source.uri} is {path}"))
            source = replace(source, uri=path.absolute().as_uri())
            models[name] = replace(model, spec=replace(model.spec, source=source))
    for name, job in jobs.items():
        if job.spec.suspend:
            continue
        inputs, outputs = job.spec.inputs, job.spec.outputs
        if inputs.follow:
            streams[name] = Streams(
                inputs=_followed(name, inputs.uri) if not job.spec.end else None,
                outputs=outputs.uri if is_remote(outputs.uri) else None,
            )
        if is_remote(outputs.uri):
            await access.target(outputs.uri).close()  # what cannot be written is better known now
            folder = work / "outputs" / name
            results.append((folder, outputs.uri))
            outputs = replace(outputs, uri=folder.absolute().as_uri())
        if is_remote(inputs.uri):
            folder = work / "inputs" / name
            size = await _inputs(access, inputs, folder)
            note(redacted(f"InferenceJob {name}: {inputs.uri} has {format_bytes(size)}"))
            inputs = replace(inputs, uri=folder.absolute().as_uri())
        jobs[name] = replace(job, spec=replace(job.spec, inputs=inputs, outputs=outputs))
    moved = replace(manifests, models=models, jobs=jobs, streams=streams)
    return Downloaded(manifests=moved, results=tuple(results))


async def upload(downloaded: Downloaded, note: Note) -> None:
    """Upload the results that exist. Raises `TransferRefused`, `TransferBroken`."""
    for folder, uri in downloaded.results:
        source = _folder(folder)
        if not folder.is_dir() or not await source.entries():
            continue  # the run came to nothing, and has said so
        async with Access().target(uri) as target:
            copied = await copy(source, target)
        note(redacted(f"{uri} has {counted(copied.files, 'file')} of results"))


def feeds_of(orders: Iterable[JobOrder], note: Note) -> Feeds:
    """What jobs that follow addresses of other machines copy while they run."""
    feeds = Feeds()
    for order in orders:
        streams = order.streams
        if streams.inputs is not None:
            source, into = partial(Access().source, streams.inputs), partial(_folder, order.inputs)
            feeds.inputs.append(Feed(source=source, target=into, note=note))
        if streams.outputs is not None:
            made, target = partial(_made, order.outputs), partial(Access().target, streams.outputs)
            feeds.results.append(Feed(source=made, target=target, note=note, changed=True))
    return feeds


def _folder(path: Path) -> Folder:
    return Folder(str(path), path)


def _made(path: Path) -> Folder:
    path.mkdir(parents=True, exist_ok=True)  # the first result makes it, and that is later
    return _folder(path)


def _followed(job: str, uri: str) -> str | None:
    """The address that inputs come from, if that is another machine's. Raises `TransferRefused`."""
    if not is_remote(uri):
        return None
    if not uri.startswith("s3://"):
        raise TransferRefused(
            f"InferenceJob {job}: {redacted(uri)} is no place that files arrive in; inputs.follow "
            "takes a folder or a bucket (s3://)"
        )
    return uri


async def _inputs(access: Access, inputs: Inputs, folder: Path) -> int:
    """Have the files of an address in a folder, and no others; their bytes. Of a followed one the
    files that have gone there stay: a retry may take them again."""
    target = _folder(folder)
    async with access.source(inputs.uri) as source:
        copied = await copy(source, target)
        names = {entry.name for entry in await source.entries()}
    folder.mkdir(parents=True, exist_ok=True)
    for path in () if inputs.follow else folder.iterdir():
        if path.name not in names:
            path.unlink()
    return copied.bytes
