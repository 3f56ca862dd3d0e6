"""Names in certificates: those that have a role of their own, and what a device may be called."""

import re
from typing import Final

CLIENT: Final = "shoal"
"""Submits jobs from the command line."""
OPERATOR: Final = "shoal-operator"
"""Submits jobs for a cluster."""
WORKER: Final = "shoal-worker"
"""Uploads and downloads files."""
USER: Final = "shoal-user"
"""Submits jobs to a standalone coordinator, and uploads and downloads their files."""
VIEWER: Final = "shoal-viewer"
"""Sees what a coordinator does, and changes nothing."""
COORDINATOR: Final = "shoal-coordinator"
"""A standalone coordinator, at whatever address it is reached."""
ENROLMENT: Final = "shoal-enrolment"
"""The enrolment service, of a cluster or of a standalone coordinator."""
RESERVED: Final = frozenset({CLIENT, OPERATOR, WORKER, USER, VIEWER, COORDINATOR, ENROLMENT})
"""No device may have one of these names."""
LONGEST_NAME: Final = 63
"""A DNS label's."""

_COORDINATOR_HOST: Final = ".svc"
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


def why_no_device(name: str) -> str | None:
    """Why a name cannot be a device's; None: it can. Devices may choose their names, and a name is
    all that a coordinator knows of who calls.
    """
    if name in RESERVED:
        return f"the name {name} is kept for Shoal itself"
    if name.endswith(_COORDINATOR_HOST):
        return f"a name that ends in {_COORDINATOR_HOST} could be a coordinator's"
    if len(name) > LONGEST_NAME:
        return f"its name has {len(name)} characters, and a device's at most {LONGEST_NAME}"
    if not _LABEL.fullmatch(name):
        return "its name is no DNS label, such as pi-4, nor several with dots"
    return None
