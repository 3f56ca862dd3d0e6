"""The one place where an exception becomes text: a title and what to do, on standard error.

Every class named here carries a message that is meant for the user. Anything else is a fault of the
program, and shows its traceback.
"""

import sys
from typing import Final

INTERRUPTED: Final = 130


def print_failure(error: Exception) -> int | None:
    """Print an error that the user can do something about; the exit status, None for any other."""
    from shoal_operator.shell.local.runner import Interrupted

    if isinstance(error, Interrupted):
        print("interrupted before anything ran; nothing is left behind", file=sys.stderr)
        return INTERRUPTED
    title = title_of(error)
    if title is None:
        return None
    print(f"shoal: {title}\n{_indented(str(error))}", file=sys.stderr)
    return 2


def title_of(error: Exception) -> str | None:
    """What to call an error; None where it is not one of the user's."""
    # Imported where something has failed already: a command that works does not pay for it.
    from shoal_operator.api.partition import DocumentRefused
    from shoal_operator.modelling.errors import ModelRefused
    from shoal_operator.shell.addresses import AddressRefused
    from shoal_operator.shell.local import (
        orders,
        pool,
        preparation,
        runner,
        steps,
        supervisor,
        watch,
        workspace,
    )
    from shoal_operator.shell.manifests import ManifestErrors
    from shoal_protocol import channels

    titles: dict[type[Exception], str] = {
        ManifestErrors: "manifest refused",
        AddressRefused: "address refused",
        channels.AddressRefused: "address refused",
        orders.OrderRefused: "this cannot be run here",
        ModelRefused: "model refused",
        DocumentRefused: "partition refused",
        preparation.PreparationRefused: "cannot be cut as asked",
        steps.StepRefused: "model refused",
        steps.StepCrashed: "a step failed",
        runner.NoPlan: "does not fit",
        runner.NoInputs: "job refused",
        watch.JobRefused: "job refused",
        runner.EnforcementImpossible: "budgets cannot be enforced",
        workspace.WorkspaceBusy: "work folder in use",
        pool.AgentsMissing: "agents missing",
        supervisor.ProcessHopeless: "a process keeps failing",
        watch.CoordinatorGone: "coordinator lost",
    }
    return next((title for kind, title in titles.items() if isinstance(error, kind)), None)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
