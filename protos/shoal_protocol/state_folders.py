"""Where a user's processes keep what must survive them, where nobody says otherwise."""

import os
from pathlib import Path


class HomeMissing(OSError):
    """This user has no home folder, as a user that a container's machine does not know."""

    def __init__(self, variable: str) -> None:
        super().__init__(f"this user has no home folder: set HOME, or {variable}, to a folder")


def home_folder(variable: str) -> Path:
    """The user's; `variable` names a folder in its place. Raises `HomeMissing`."""
    try:
        home = Path.home()
    except RuntimeError:
        raise HomeMissing(variable) from None
    # Docker gives this one to users that the image does not know.
    if home == Path("/") and not os.access(home, os.W_OK):
        raise HomeMissing(variable)
    return home


def state_folder() -> Path:
    """`$XDG_STATE_HOME/shoal`, by default in `~/.local/state`. Raises `HomeMissing`."""
    variable = "XDG_STATE_HOME"
    chosen = os.environ.get(variable, "")
    # Relative ones are ignored, as the specification of these variables has it.
    base = Path(chosen) if chosen.startswith("/") else home_folder(variable) / ".local/state"
    return base / "shoal"
