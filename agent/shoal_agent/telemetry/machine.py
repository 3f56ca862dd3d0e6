"""What the machine around the agent is and does: processors, memory, temperature, battery.

Read from /proc, /sys and the control groups. What a machine does not have, or does not let this
process see, is None: never zero.
"""

import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shoal_protocol.v1.session_pb2 import Telemetry

_PROC: Final = Path("/proc")
_SYS: Final = Path("/sys")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_UNLIMITED_FROM: Final = 1 << 60
"""The first version of control groups writes "no limit" as a number near 2^63."""


class Machine:
    """Reads the machine; stores what turns counters into rates."""

    def __init__(self) -> None:
        self._last_cpu: tuple[float, float] | None = None
        self._cpu_groups = list(_group_folders("cpu"))
        self._memory_groups = list(_group_folders("memory"))
        self.architecture = platform.machine()
        self.processors = self._processors()
        self.memory_bytes = self._memory_bytes()

    def read(self) -> Telemetry:
        """What is known now of the machine; what is not stays absent."""
        return Telemetry(
            cpu_fraction=self._cpu_fraction(),
            memory_available_bytes=self._memory_available_bytes(),
            temperature_celsius=_temperature_celsius(),
            battery_fraction=_battery_fraction(),
        )

    def memory_limit_bytes(self) -> int | None:
        """The least that a control group around this process allows; None: no limit is seen."""
        limits = (_memory_limit_and_usage(folder)[0] for folder in self._memory_groups)
        return min((limit for limit in limits if limit is not None), default=None)

    def _processors(self) -> int:
        """Processors that this process may use: affinity, and the quota of its control group."""
        count = float(len(os.sched_getaffinity(0)))
        for folder in self._cpu_groups:
            quota = _cpu_quota(folder)
            if quota is not None:
                count = min(count, quota)
        return max(1, round(count + 0.499))

    def _memory_bytes(self) -> int:
        total = _meminfo().get("MemTotal", 0)
        for folder in self._memory_groups:
            limit, _ = _memory_limit_and_usage(folder)
            if limit is not None:
                total = min(total, limit)
        return total

    def _memory_available_bytes(self) -> int | None:
        available = _meminfo().get("MemAvailable")
        for folder in self._memory_groups:
            limit, usage = _memory_limit_and_usage(folder)
            if limit is not None and usage is not None:
                left = max(0, limit - usage)
                available = left if available is None else min(available, left)
        return available

    def _cpu_fraction(self) -> float | None:
        """Share of the machine's processors in use since the last call; None on the first."""
        text = _read(_PROC / "stat")
        if text is None:
            return None
        # user nice system idle iowait irq softirq steal; guest times are part of user
        ticks = [float(field) for field in text.split("\n", 1)[0].split()[1:9]]
        busy, total = sum(ticks) - sum(ticks[3:5]), sum(ticks)
        last, self._last_cpu = self._last_cpu, (busy, total)
        if last is None or total <= last[1]:
            return None
        return min(1.0, max(0.0, (busy - last[0]) / (total - last[1])))


def steady_nanoseconds() -> int:
    """The steady clock that deadlines are reckoned on."""
    return time.monotonic_ns()


def _group_folders(controller: str) -> Iterator[Path]:
    """This process's control group and its parents, of either version, where they are visible."""
    for line in (_read(_PROC / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controllers if controllers else _CGROUPS
        folder = root / path.lstrip("/")
        for candidate in (folder, *folder.parents):
            if candidate.is_dir() and candidate.is_relative_to(root):
                yield candidate


def _cpu_quota(folder: Path) -> float | None:
    """Processors that a control group's quota amounts to."""
    match (_read(folder / "cpu.max") or "").split():
        case [quota, period] if quota.isdigit():
            return int(quota) / int(period)
    quota_us, period_us = (
        _integer(folder / "cpu.cfs_quota_us"),
        _integer(folder / "cpu.cfs_period_us"),
    )
    if quota_us is None or period_us is None or quota_us <= 0:
        return None
    return quota_us / period_us


def _memory_limit_and_usage(folder: Path) -> tuple[int | None, int | None]:
    """Limit of a control group, and what of it is used and cannot simply be dropped."""
    for limit_name, usage_name, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _integer(folder / limit_name), _integer(folder / usage_name)
        if limit is None or limit >= _UNLIMITED_FROM:
            continue
        for line in (_read(folder / "memory.stat") or "").splitlines():
            name, _, value = line.partition(" ")
            if name == inactive and usage is not None:
                usage = max(0, usage - int(value))
        return limit, usage
    return None, None


def _meminfo() -> dict[str, int]:
    found: dict[str, int] = {}
    for line in (_read(_PROC / "meminfo") or "").splitlines():
        match line.replace(":", " ").split():
            case [name, value, "kB"]:
                found[name] = int(value) << 10
    return found


def _temperature_celsius() -> float | None:
    zones = _SYS.glob("class/thermal/thermal_zone*/temp")
    readings = [value / 1000 for zone in zones if (value := _integer(zone)) is not None]
    # Some sensors report absolute zero or worse while they have nothing to say.
    return max((value for value in readings if -50 < value < 200), default=None)


def _battery_fraction() -> float | None:
    """Charge of the fullest battery."""
    levels = [
        level / 100
        for supply in _SYS.glob("class/power_supply/*")
        if (_read(supply / "type") or "").strip() == "Battery"
        and (level := _integer(supply / "capacity")) is not None
    ]
    return max(levels, default=None)


def _integer(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
