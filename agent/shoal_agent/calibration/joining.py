"""What an agent reports of its device when it joins: measured now, or by an earlier start."""

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import onnxruntime

from shoal_agent.calibration.probes import measure
from shoal_agent.settings import Settings
from shoal_agent.telemetry.logs import log
from shoal_protocol.speed_files import store_speed, stored_speed, subject
from shoal_protocol.speeds import UNKNOWN_SPEED, Link, Speed
from shoal_protocol.units import format_number

_FILE: Final = "speed.json"
_AGE_SECONDS: Final = 24 * 3600.0
"""A machine may have been busy when it was measured."""

Measuring = Callable[[int, Path, int], Speed]
Call = Callable[[Measuring, int, Path, int], Awaitable[Speed]]
"""Runs a function in the thread that ONNX Runtime has."""


async def calibrate(settings: Settings, call: Call, threads: int, processors: float) -> Speed:
    """What the device does. It may have so many `processors`, as far as its own limits show.

    A file that was given is of this machine, and all that its agents differ in is their share.
    """
    share = min(float(threads), processors)
    if settings.speed is not None:
        return replace(stored_speed(settings.speed) or UNKNOWN_SPEED, processors=share)
    path, of = settings.cache / _FILE, subject(share, onnxruntime.__version__)
    if (speed := stored_speed(path, of, _AGE_SECONDS)) is None:
        speed = await call(measure, threads, settings.cache, settings.budget)
        log.info("measured %s", in_words(speed))
        with contextlib.suppress(OSError):  # it is measured again at the next start
            store_speed(path, speed, of)
    return speed


def in_words(speed: Speed) -> str:
    """What was measured, for people: `product flops 39.5 G/s, disk bytes 0.35 G/s`."""
    rates = asdict(speed).items()
    return ", ".join(
        f"{name.removesuffix('_per_second').replace('_', ' ')} {format_number(value / 1e9)} G/s"
        for name, value in rates
        if name.endswith("_per_second") and value is not None
    )


def gauges(speed: Speed, link: Link) -> dict[str, float]:
    """What is known, for metrics."""
    rates = {**asdict(speed), "link_bytes_per_second": link.bytes_per_second}
    rates["link_round_trip_seconds"] = link.round_trip_seconds
    rates["transfer_seconds_per_byte"] = link.transfer_seconds_per_byte
    rates["handling_seconds"] = link.handling_seconds
    return {name: value for name, value in rates.items() if value is not None}
