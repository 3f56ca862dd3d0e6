"""The one place where an exception becomes text: a title and what to do, on standard error.

Every class named here carries a message that is meant for the user. Anything else is a fault of the
program, and shows its traceback.
"""

import sys
from typing import Final

INTERRUPTED: Final = 130


def print_failure(error: Exception) -> int | None:
    """Print an error that the user can do something about; the exit status, None for any other."""
    # Imported where something has failed already: a command that works does not pay for it.
    from shoal_cli.local.runner import Interrupted
    from shoal_cli.local.steps import CANNOT_WRITE, StepCrashed
    from shoal_cli.transfer.joined import CoordinatorAway
    from shoal_cli.transfer.places import TransferBroken

    if isinstance(error, Interrupted):
        print("interrupted before anything ran; nothing is left behind", file=sys.stderr)
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
    lines = "".join(f"\n  {line}" for line in text.splitlines())
    print(f"shoal: {title}{lines}", file=sys.stderr)
    # 1: the same command may do better another time.
    again = isinstance(error, StepCrashed | TransferBroken | CoordinatorAway)
    return 1 if again else 2


def title_of(error: Exception) -> str | None:
    """What to call an error; None where it is not one of the user's."""
    from shoal_cli.drawing import svg
    from shoal_cli.local import (
        cut_search,
        device_figures,
        orders,
        planning,
        pool,
        report,
        runner,
        steps,
        supervisor,
        watch,
        workspace,
    )
    from shoal_cli.local.manifests import ManifestErrors
    from shoal_cli.transfer import places
    from shoal_cli.transfer.addresses import AddressRefused
    from shoal_compiler.errors import ModelRefused
    from shoal_protocol import channels
    from shoal_protocol.partition import DocumentRefused

    titles: dict[type[Exception], str] = {
        ManifestErrors: "manifest refused",
        AddressRefused: "address refused",
        channels.AddressRefused: "address refused",
        orders.OrderRefused: "this cannot be run here",
        ModelRefused: "model refused",
        DocumentRefused: "partition refused",
        cut_search.PreparationRefused: "model not prepared",
        steps.StepRefused: "model refused",
        places.TransferRefused: "cannot be carried",
        places.TransferBroken: "carrying broke off",
        steps.StepCrashed: "a step failed",
        report.ReportRefused: "report refused",
        svg.NothingDraws: "nothing can be drawn",
        planning.NoPlan: "does not fit",
        orders.JobRefused: "job refused",
        device_figures.NoItem: "no item to run",
        device_figures.DeviceFailed: "the device failed",
        runner.EnforcementImpossible: "budgets cannot be enforced",
        workspace.WorkspaceBusy: "work folder in use",
        pool.AgentsMissing: "agents missing",
        supervisor.ProcessHopeless: "a process keeps failing",
        watch.CoordinatorGone: "coordinator lost",
        **_of_coordinators(),
    }
    if isinstance(error, steps.StepRefused) and error.kind == "PreparationRefused":
        return titles[cut_search.PreparationRefused]
    return next((title for kind, title in titles.items() if isinstance(error, kind)), None)


def _of_coordinators() -> dict[type[Exception], str]:
    """The errors of commands about coordinators, and of one's own."""
    from shoal_cli.commands import targets
    from shoal_cli.commands.logs import NoLogs
    from shoal_cli.commands.standalone import DeviceUnknown
    from shoal_cli.live.cluster import ClusterRefused
    from shoal_cli.standalone import folders, submission
    from shoal_cli.transfer import joined

    return {
        joined.NotJoined: "coordinator not joined",
        joined.JoinRefused: "joining refused",
        joined.CoordinatorAway: "coordinator not reached",
        joined.CallRefused: "the coordinator refuses",
        folders.FolderInUse: "coordinator's folder in use",
        folders.FolderMissing: "no coordinator here",
        folders.AuthorityUnusable: "the authority cannot be used",
        DeviceUnknown: "no such device",
        submission.NoDevices: "no devices",
        targets.NoCoordinator: "no coordinator",
        targets.Unknown: "not known",
        NoLogs: "no logs",
        ClusterRefused: "the cluster refuses",
    }
