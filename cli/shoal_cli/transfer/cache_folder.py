"""Where this machine's user keeps what can be had again: models, runs, measurements."""

import os
from collections.abc import Mapping
from pathlib import Path


def default_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Shoal's own below the user's cache folder, unless somebody says otherwise."""
    home = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "shoal"
