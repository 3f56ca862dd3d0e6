"""The one place where an exception becomes text: a title and what to do, on standard error.

Every class named here carries a message that is meant for the user. Anything else is a fault of the
program, and shows its traceback.
"""

import sys
from typing import Final

INTERRUPTED: Final = 130


def print_failure(error: Exception) -> int | None:
    """Print an error that the user can do something about; the exit status, None for any other."""
    from shoal_cli.local.runner import Interrupted

    if isinstance(error, Interrupted):
        print("interrupted before anything ran; nothing is left behind", file=sys.stderr)
        return INTERRUPTED
    title, text = title_of(error), str(error)
    if title is None and isinstance(error, OSError):
        title, text = _of_the_system(error)
    if title is None:
        return None
    print(f"shoal: {title}\n{_indented(text)}", file=sys.stderr)
    return 1 if _may_pass(error) else 2


def _may_pass(error: Exception) -> bool:
    """Whether the same command may do better another time: nothing that was given is wrong."""
    from shoal_cli.local.steps import StepCrashed
    from shoal_cli.transfer.places import TransferBroken

    return isinstance(error, StepCrashed | TransferBroken)


def title_of(error: Exception) -> str | None:
    """What to call an error; None where it is not one of the user's."""
    # Imported where something has failed already: a command that works does not pay for it.
    from shoal_cli.local import (
        orders,
        pool,
        preparation,
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
        preparation.PreparationRefused: "cannot be cut as asked",
        steps.StepRefused: "model refused",
        places.TransferRefused: "cannot be carried",
        places.TransferBroken: "carrying broke off",
        steps.StepCrashed: "a step failed",
        runner.NoPlan: "does not fit",
        orders.JobRefused: "job refused",
        runner.EnforcementImpossible: "budgets cannot be enforced",
        workspace.WorkspaceBusy: "work folder in use",
        pool.AgentsMissing: "agents missing",
        supervisor.ProcessHopeless: "a process keeps failing",
        watch.CoordinatorGone: "coordinator lost",
    }
    if isinstance(error, steps.StepRefused) and error.kind == "PreparationRefused":
        return titles[preparation.PreparationRefused]
    return next((title for kind, title in titles.items() if isinstance(error, kind)), None)


def _of_the_system(error: OSError) -> tuple[str | None, str]:
    """A file that cannot be had, or an error that says itself what is wrong; no other is meant for
    the user: a broken connection, say, is a fault of ours.
    """
    if error.filename is not None:
        return "a file or folder cannot be used", f"{error.filename}: {error.strerror}"
    own = type(error) is OSError and error.errno is None
    return ("this cannot be run here" if own else None), str(error)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
