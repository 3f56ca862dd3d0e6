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
    home = environment.get(_VARIABLE) or home_folder(_VARIABLE) / ".cache"
    return Path(home) / "shoal"
