"""Measured speeds on disk, so that a machine is measured once.

A file holds a `Speed` and what it is a speed of: the processor, the runtime, and the share of the
processors. Of another one it says nothing.
"""

import json
import math
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

from shoal_protocol.durable_files import replace_file
from shoal_protocol.speeds import Speed, speed_of
from shoal_protocol.v1 import session_pb2 as pb

_VERSION: Final = 1
"""Of what is measured, and how."""
_DESCRIPTIONS: Final = ("model name", "Hardware", "CPU implementer", "CPU part", "cpu model")
"""Of a processor, in /proc/cpuinfo; which there are depends on the architecture."""


def subject(share: float, runtime: str) -> str:
    """What is measured here: the processor with this share of it, and a version of the runtime."""
    return f"{_VERSION}; {_processor()}; onnxruntime {runtime}; {share:g} processors"


def stored_speed(path: Path, of: str | None = None, most_seconds: float = math.inf) -> Speed | None:
    """The speed in a file; with `of` only if it is of that, and was stored within so many seconds.
    None: there is none."""
    try:
        values = json.loads(path.read_bytes())
        found = values.pop("of")
        if of is not None and (of != found or _age_seconds(path) > most_seconds):
            return None
        return speed_of(pb.Speed(**values))
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def store_speed(path: Path, speed: Speed, of: str) -> None:
    """Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, speed_json(speed, of).encode())


def speed_json(speed: Speed, of: str) -> str:
    """The text of such a file; `of` names what was measured."""
    return json.dumps({"of": of, **asdict(speed)}, indent=2) + "\n"


def _age_seconds(path: Path) -> float:
    return abs(time.time() - path.stat().st_mtime)


def _processor() -> str:
    found = dict.fromkeys([platform.machine()])
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in _DESCRIPTIONS:
            found[value.strip()] = None
    return ", ".join(found)
