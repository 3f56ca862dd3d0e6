"""Where a user's processes keep what must survive them, where nobody says otherwise."""

import os
from pathlib import Path


def state_folder() -> Path:
    """`$XDG_STATE_HOME/shoal`, by default in `~/.local/state`. Raises `RuntimeError` for a user
    without a home folder."""
    chosen = os.environ.get("XDG_STATE_HOME", "")
    # Relative ones are ignored, as the specification of these variables has it.
    base = Path(chosen) if chosen.startswith("/") else Path.home() / ".local/state"
    return base / "shoal"
