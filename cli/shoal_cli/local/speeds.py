"""What this machine was measured to do, once, for all devices that it pretends to be.

One thread is measured, before anything else runs, in a process of its own. What a device of local
mode does follows from its share of the processors. SHOAL_SPEED names a file to be used instead; an
empty one says that nothing is known.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Final

from shoal_cli.local.supervisor import child_environment
from shoal_cli.transfer.cache_folder import default_cache
from shoal_protocol.durable_files import replace_file
from shoal_protocol.interpreter import module_command
from shoal_protocol.speed_files import stored_speed, subject
from shoal_protocol.speeds import UNKNOWN_SPEED, Speed
from shoal_protocol.state_folders import HomeMissing

_SECONDS: Final = 15.0
_VARIABLE: Final = "SHOAL_SPEED"
_NOWHERE: Final = Path(os.devnull)


class SpeedRefused(OSError):
    """SHOAL_SPEED names what is no file of speeds."""


def speed_path(environment: Mapping[str, str] = os.environ) -> Path:
    """The file that agents read; an empty one for a user who has no place for it."""
    if given := environment.get(_VARIABLE):
        return Path(given)
    try:
        return default_cache(environment) / "speed.json"
    except HomeMissing:
        return _NOWHERE


def machine_speed(
    environment: Mapping[str, str] = os.environ,
    waiting: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Speed:
    """Measured now if it never was, in a second or two, `waiting` around it; unknown where that
    fails: then plans are made with what is assumed of a usual machine. Raises `SpeedRefused`."""
    path = speed_path(environment)
    if environment.get(_VARIABLE):
        return _given_speed(path)
    if path == _NOWHERE:
        return UNKNOWN_SPEED
    of = subject(1.0, metadata.version("onnxruntime"))
    speed = stored_speed(path, of)
    if speed is None:
        with waiting(), contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            _measure(path)
        speed = stored_speed(path, of)
    return speed or UNKNOWN_SPEED


def _given_speed(path: Path) -> Speed:
    speed = stored_speed(path)
    if speed is not None:
        return speed
    try:
        empty = not path.read_bytes()
    except OSError as error:
        raise SpeedRefused(f"{_VARIABLE}: {path}: {error.strerror}") from error
    if not empty:
        raise SpeedRefused(f"{_VARIABLE}: {path} has no speeds, as ~/.cache/shoal/speed.json has")
    return UNKNOWN_SPEED


def _measure(path: Path) -> None:
    command = [*module_command("shoal_agent.calibration"), str(path.parent)]
    ended = subprocess.run(  # noqa: S603 - this interpreter, and nothing that a user gave
        command, env=child_environment(), timeout=_SECONDS, capture_output=True, check=True
    )
    json.loads(ended.stdout)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, ended.stdout)
