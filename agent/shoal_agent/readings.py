"""What the agent's parts show at this moment, as the values of its metrics' gauges. Called from the
thread of the metrics' server, so it only reads."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from shoal_agent.cache.disk import FragmentCache
from shoal_agent.memory.residency import Ledger, short
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.session.control import Session
from shoal_agent.settings import Settings
from shoal_protocol.certificate_times import expiration_seconds

Gauges: TypeAlias = Mapping[str, float | None]
"""By name, those of `telemetry.metrics.GAUGES`; None, or absent: not known."""


def gauges(
    settings: Settings,
    meter: MemoryMeter,
    cache: FragmentCache,
    ledger: Ledger,
    session: Session | None,
) -> Gauges:
    cached, credentials = cache.cached(), settings.credentials
    settled = meter.floor_bytes > 0  # until then all that is resident would count as use
    return {
        "budget_bytes": ledger.budget,
        "floor_bytes": meter.floor_bytes if settled else None,
        "used_bytes": meter.used_bytes() if settled else None,
        "peak_bytes": meter.peak_bytes() if settled else None,
        "fragments_bytes": ledger.fragments,
        "reserved_bytes": ledger.reserved,
        "grown_bytes": ledger.grown,
        "withheld_bytes": ledger.withheld,
        "resident_fragments": len(ledger.resident),
        "cached_fragments": len(cached),
        "cached_bytes": sum(cached.values()),
        "cache_limit_bytes": cache.limit_bytes,
        "disk_free_bytes": _free_bytes(settings.cache),
        "spilled_bytes": 0 if session is None else session.tasks.spilled_bytes,
        "queued_tasks": 0 if session is None else session.tasks.queued,
        "session_connected": session is not None,
        "certificate_expiration_timestamp_seconds": (
            None if credentials is None else expiration_seconds(credentials.certificate)
        ),
    }


def shares(ledger: Ledger) -> dict[str, dict[str, int]]:
    """Each of `telemetry.metrics.SHARES`, by fragment that can run in blocks."""
    return {
        short(digest): {
            "granted_bytes": share.granted,
            "least_bytes": share.least,
            "wanted_bytes": share.wanted,
            "lent_bytes": share.lent,
        }
        for digest, share in ledger.shares.items()
    }


def _free_bytes(folder: Path) -> int | None:
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return None
