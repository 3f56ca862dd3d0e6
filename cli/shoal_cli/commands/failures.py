"""The one place where an exception becomes text: a title and what to do, on standard error.

Every class named here carries a message that is meant for the user. Anything else is a fault of the
program, and shows its traceback.
"""

import sys
from collections.abc import Mapping
from typing import Final

from shoal_protocol.visible import visible

INTERRUPTED: Final = 130
NO_ROOM: Final = 4
"""With this status the same command does better when something has left a coordinator's volume."""
TITLES: Final[Mapping[str, str]] = {
    "shoal_cli.local.manifests.ManifestErrors": "manifest refused",
    "shoal_cli.transfer.addresses.AddressRefused": "address refused",
    "shoal_protocol.channels.AddressRefused": "address refused",
    "shoal_cli.local.orders.OrderRefused": "this cannot be run here",
    "shoal_cli.local.speeds.SpeedRefused": "this cannot be run here",
    "shoal_protocol.state_folders.HomeMissing": "this cannot be run here",
    "shoal_compiler.errors.ModelRefused": "model refused",
    "shoal_protocol.partition.DocumentRefused": "partition refused",
    "shoal_cli.local.cut_search.PreparationRefused": "model not prepared",
    "shoal_cli.local.steps.StepRefused": "model refused",
    "shoal_cli.transfer.places.ModelMissing": "model refused",
    "shoal_cli.transfer.places.TransferRefused": "cannot be transferred",
    "shoal_cli.transfer.places.NoRoomThere": "no room there",
    "shoal_cli.transfer.places.TransferBroken": "the transfer broke off",
    "shoal_cli.local.steps.StepCrashed": "a step failed",
    "shoal_cli.local.report.ReportRefused": "report refused",
    "shoal_cli.drawing.svg.NothingDraws": "nothing can be drawn",
    "shoal_cli.local.planning.NoPlan": "does not fit",
    "shoal_cli.local.orders.JobRefused": "job refused",
    "shoal_cli.local.device_figures.NoItem": "no item to run",
    "shoal_cli.local.device_figures.DeviceFailed": "the device failed",
    "shoal_cli.local.device_figures.ModelTooSlow": "the model takes too long",
    "shoal_cli.local.cgroups.EnforcementImpossible": "budgets cannot be enforced",
    "shoal_cli.local.workspace.WorkspaceBusy": "work folder in use",
    "shoal_cli.local.workspace.WorkFolderUnusable": "the work folder cannot be used",
    "shoal_cli.local.pool.AgentsMissing": "agents missing",
    "shoal_cli.local.supervisor.ProcessHopeless": "a process keeps failing",
    "shoal_cli.local.watch.CoordinatorGone": "coordinator lost",
    "shoal_cli.transfer.joined.NotJoined": "coordinator not joined",
    "shoal_cli.transfer.joined.JoinRefused": "joining refused",
    "shoal_cli.transfer.joined.CoordinatorAway": "coordinator not reached",
    "shoal_cli.transfer.joined.CallRefused": "the coordinator refuses",
    "shoal_cli.standalone.folders.FolderInUse": "coordinator's folder in use",
    "shoal_cli.standalone.folders.FolderMissing": "no coordinator here",
    "shoal_cli.standalone.folders.AuthorityUnusable": "the authority cannot be used",
    "shoal_cli.commands.standalone.DeviceUnknown": "no such device",
    "shoal_cli.standalone.remote_devices.NoDevices": "no devices",
    "shoal_cli.commands.targets.NoCoordinator": "no coordinator",
    "shoal_cli.commands.targets.Unknown": "not known",
    "shoal_cli.commands.jobs.JobUnclear": "which job",
    "shoal_cli.commands.logs.NoLogs": "no logs",
    "shoal_cli.live.cluster.ClusterRefused": "the cluster refuses",
}
"""By class. Classes are named, not imported: each is of a part that most commands never load."""
PASSING: Final = frozenset(
    {"StepCrashed", "TransferBroken", "CoordinatorAway", "DeviceFailed", "ModelTooSlow"}
)
"""With these the same command may do better another time, or with more time: status 1."""


def print_failure(error: Exception) -> int | None:
    """Print an error that the user can do something about; the exit status, None for any other."""
    # Imported where something has failed already: a command that works does not pay for it.
    from shoal_cli.local.runner import Interrupted
    from shoal_cli.local.steps import CANNOT_WRITE

    if isinstance(error, Interrupted):
        text = "interrupted before anything ran; no process is left, and what was prepared is kept"
        print(f"{text} for the next run, unless --no-keep was given", file=sys.stderr)
        return INTERRUPTED
    title, text = title_of(error), str(error)
    if isinstance(error, OSError) and title is None:
        if error.filename is not None:
            title = "a file or folder cannot be used"
            text = f"{error.filename}: {error.strerror}"
        elif error.errno in CANNOT_WRITE:
            title = "nothing more can be written"
            text = f"{error.strerror}: where the output goes, or on a disk"
        elif type(error) is OSError and error.errno is None:  # it says itself what is wrong
            title = "this cannot be run here"
    if title is None:
        return None
    lines = "".join(f"\n  {line}" for line in visible(text).splitlines())
    print(f"shoal: {title}{lines}", file=sys.stderr)
    if type(error).__name__ == "NoRoomThere":
        return NO_ROOM
    return 1 if type(error).__name__ in PASSING else 2


def title_of(error: Exception) -> str | None:
    """What to call an error; None where it is not one of the user's."""
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
    if getattr(error, "kind", "") == "PreparationRefused":  # of the step that prepares a model
        names.insert(0, "shoal_cli.local.cut_search.PreparationRefused")
    return next((TITLES[name] for name in names if name in TITLES), None)
