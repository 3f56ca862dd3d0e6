"""A job's inputs and results together: which result file belongs to which input file, and on what
the results depend. The coordinator opens them to run a job, the command line to see that nothing is
left to do."""

import hashlib
import tempfile
from pathlib import Path

from shoal_coordinator.storage.catalogues import Catalogue, FixedFiles
from shoal_coordinator.storage.file_names import result_name
from shoal_coordinator.storage.identity import Origin, Origins
from shoal_coordinator.storage.inputs import InputFile, InputSet, InputsRefused, scan_inputs
from shoal_coordinator.storage.parts import ResultFile
from shoal_coordinator.storage.results import OutputsRefused, ResultStore
from shoal_protocol.partition import PartitionDocument


def open_results(
    outputs: Path, inputs: InputSet, document: PartitionDocument, *, job: str, lossy: bool
) -> ResultStore:
    """Take possession of a job's results. Raises `OutputsRefused`."""
    origins = Origins(
        model=document.model_digest,
        lossy=lossy,
        files=[Origin(file.name, file.fingerprint.hex()) for file in inputs.files],
    )
    catalogue = FixedFiles(map(result_file, inputs.files), origins)
    return _open(outputs, catalogue, inputs.digest, document, job, lossy=lossy)


def open_followed_results(
    source: Path,
    outputs: Path,
    files: Catalogue,
    document: PartitionDocument,
    *,
    job: str,
    lossy: bool,
) -> ResultStore:
    """Take possession of the results of a job whose inputs arrive in a folder. Raises
    `InputsRefused` and `OutputsRefused`."""
    if source.exists() and not source.is_dir():
        raise InputsRefused(source, "is a file; give the folder that files arrive in")
    if outputs.resolve() == source.resolve():
        raise OutputsRefused(outputs, "are the inputs as well; choose another folder")
    return _open(outputs, files, "followed", document, job, lossy=lossy)


def _open(
    outputs: Path,
    catalogue: Catalogue,
    inputs: str,
    document: PartitionDocument,
    job: str,
    *,
    lossy: bool,
) -> ResultStore:
    facts = (document.model_digest, inputs, str(lossy))
    return ResultStore(
        outputs,
        job=job,
        identity=hashlib.sha256("\0".join(facts).encode()).hexdigest(),
        catalogue=catalogue,
        names=[spec.name for spec in document.outputs],
    )


def finished_items(
    source: Path, outputs: Path, document: PartitionDocument, *, job: str, lossy: bool
) -> int | None:
    """How many items a job has, if every result of these very inputs and this model is there;
    None if something is left to do, or to refuse."""
    if not (outputs / ".shoal" / job).is_dir():
        return None
    try:
        inputs = scan_inputs(source, document.inputs, fixed=document.fixed)
        results = open_results(outputs, inputs, document, job=job, lossy=lossy)
    except (InputsRefused, OutputsRefused, OSError):
        return None
    try:
        return len(inputs) if results.is_complete() else None
    finally:
        results.close()


def result_file(file: InputFile) -> ResultFile:
    """What is made of an input file."""
    return ResultFile(
        name=result_name(file.name),
        first=file.first,
        items=file.items,
        stacked=file.contents.stacked is not None,
        joined=file.contents.joined,
    )


def check_outputs(outputs: Path, job: str) -> None:
    """Whether results of a job could be written now, found by trying; nothing is left behind.

    Raises `OutputsRefused`."""
    try:
        for folder in (outputs, outputs / ".shoal" / job):
            nearest = next(path for path in (folder, *folder.parents) if path.exists())
            with tempfile.TemporaryFile(dir=nearest):
                pass
    except OSError as e:
        raise OutputsRefused(outputs, f"cannot be written: {e.strerror or e}") from e
