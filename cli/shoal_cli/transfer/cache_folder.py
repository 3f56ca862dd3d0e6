"""Where this machine's user keeps what can be had again: models, runs, measurements."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shoal_protocol.state_folders import home_folder

_VARIABLE: Final = "XDG_CACHE_HOME"


def default_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Shoal's own below the user's cache folder, unless somebody says otherwise. Raises
    `HomeMissing`."""
    chosen = environment.get(_VARIABLE, "")
    # Relative ones are ignored, as the specification of these variables has it.
    base = Path(chosen) if chosen.startswith("/") else home_folder(_VARIABLE) / ".cache"
    return base / "shoal"
