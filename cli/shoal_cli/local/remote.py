"""Addresses of other machines in local mode: inputs are downloaded, results uploaded.

The manifests are the cluster's, so they may name `s3://`, `https://` and `oci://`. Models are kept
in the user's cache folder (`transfer.models`), inputs and results in the work folder of the run:

```
WORK/inputs/JOB/      what the address held when the run began
WORK/outputs/JOB/     what the run has made, with its journal
```

After `download` the manifests name local files only; the rest of local mode knows no others.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from shoal_cli.local.manifests import Manifests
from shoal_cli.transfer.addresses import Access, is_remote
from shoal_cli.transfer.copying import copy
from shoal_cli.transfer.folders import Folder
from shoal_cli.transfer.models import Fetching, default_cache
from shoal_cli.transfer.places import PAUSE_SECONDS, TransferRefused, redacted
from shoal_protocol.units import counted, format_bytes

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloaded:
    """Manifests of local addresses. `results` are folders, and the addresses to copy them to."""

    manifests: Manifests
    results: tuple[tuple[Path, str], ...] = ()


async def download(
    manifests: Manifests, work: Path, note: Note, *, pause_seconds: float = PAUSE_SECONDS
) -> Downloaded:
    """Fetch what is far away. Raises `TransferRefused`, `TransferBroken`, `ModelRefused`."""
    access, results = Access(), []
    fetching = Fetching(access=access, cache=default_cache(), pause_seconds=pause_seconds)
    models, jobs = dict(manifests.models), dict(manifests.jobs)
    for name, model in models.items():
        source = model.spec.source
        if is_remote(source.uri):
            path = await fetching.model(source.uri, source.digest)
            note(redacted(f"Model {name}: {source.uri} is {path}"))
            source = replace(source, uri=path.absolute().as_uri())
            models[name] = replace(model, spec=replace(model.spec, source=source))
    for name, job in jobs.items():
        if job.spec.suspend:
            continue
        inputs, outputs = job.spec.inputs, job.spec.outputs
        if is_remote(outputs.uri):
            await access.target(outputs.uri).close()  # what cannot be written is better known now
            folder = work / "outputs" / name
            results.append((folder, outputs.uri))
            outputs = replace(outputs, uri=folder.absolute().as_uri())
        if is_remote(inputs.uri):
            if inputs.follow:
                raise TransferRefused(_not_followed(name, inputs.uri))
            folder = work / "inputs" / name
            size = await _inputs(access, inputs.uri, folder, pause_seconds)
            note(redacted(f"InferenceJob {name}: {inputs.uri} has {format_bytes(size)}"))
            inputs = replace(inputs, uri=folder.absolute().as_uri())
        jobs[name] = replace(job, spec=replace(job.spec, inputs=inputs, outputs=outputs))
    moved = replace(manifests, models=models, jobs=jobs)
    return Downloaded(manifests=moved, results=tuple(results))


async def upload(
    downloaded: Downloaded, note: Note, *, pause_seconds: float = PAUSE_SECONDS
) -> None:
    """Upload the results that exist. Raises `TransferRefused`, `TransferBroken`."""
    for folder, uri in downloaded.results:
        source = Folder(str(folder), folder)
        if not folder.is_dir() or not await source.entries():
            continue  # the run came to nothing, and has said so
        async with Access().target(uri) as target:
            copied = await copy(source, target, pause_seconds=pause_seconds)
        note(redacted(f"{uri} has {counted(copied.files, 'file')} of results"))


def _not_followed(job: str, uri: str) -> str:
    return (
        f"InferenceJob {job}: inputs.follow of {redacted(uri)} works on a cluster; here a folder "
        f"of this machine is followed: have `shoal copy --follow {redacted(uri)} FOLDER` bring the "
        "files there"
    )


async def _inputs(access: Access, uri: str, folder: Path, pause_seconds: float) -> int:
    """Have the files of an address in a folder, and no others; their bytes."""
    target = Folder(str(folder), folder)
    async with access.source(uri) as source:
        copied = await copy(source, target, pause_seconds=pause_seconds)
        names = {entry.name for entry in await source.entries()}
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
    return copied.bytes
