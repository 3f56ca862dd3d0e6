"""The folders of a job, looked at before anything is cut or started."""

from typing import Final

from shoal_cli.local.orders import JobOrder, JobRefused
from shoal_coordinator.storage.file_names import encodable
from shoal_coordinator.storage.inputs import SUFFIXES, passed_over
from shoal_coordinator.storage.job_files import check_outputs
from shoal_coordinator.storage.results import OutputsRefused

_NAMED: Final = 5
"""Files that a note names."""


def check_folders(order: JobOrder) -> None:
    """Raise `JobRefused` for a job that cannot begin."""
    folder, problem = order.inputs, None
    if folder.is_file():
        problem = f"{folder} is a file; inputs are a folder of .npz and .npy files"
    elif not folder.is_dir():
        problem = f"there is no folder of inputs {folder}"
    elif not order.follows and not any(path.suffix in SUFFIXES for path in folder.iterdir()):
        problem = f"the folder of inputs {folder} has no .npz or .npy file"
    try:
        check_outputs(order.outputs, order.name)
    except OutputsRefused as error:
        problem = problem or str(error)
    if problem is not None:
        raise JobRefused(f"job {order.name}: {problem}")


def passed_over_note(order: JobOrder) -> str:
    """Which of its inputs a job does not take; empty: all are taken."""
    skipped = [] if order.follows else passed_over(order.inputs)
    if not skipped:
        return ""
    more = f" and {len(skipped) - _NAMED} more" if len(skipped) > _NAMED else ""
    return (
        f"{order.name}: no inputs, as they are no files or their names do not end in .npz or .npy: "
        f"{', '.join(map(encodable, skipped[:_NAMED]))}{more}"
    )
