"""What the machine around the agent is and does: processors, memory, temperature, battery.

Read from /proc, /sys and the control groups. What a machine does not have, or does not let this
process see, is None: never zero. An idle agent does little but report these readings: so the files
are found once, and a reading costs an open file each and nothing else.
"""

import os
import platform
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_protocol.v1.session_pb2 import Telemetry

_STAT: Final = Path("/proc/stat")
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/proc/self/cgroup")
_SYS: Final = Path("/sys")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_MEMINFO_LINES: Final = re.compile(rb"^(MemTotal|MemAvailable): +(\d+) kB$", re.MULTILINE)
_HITS: Final = re.compile(rb"^(?:max |high )?(\d+)$", re.MULTILINE)
_READ_BYTES: Final = 1 << 14
_UNLIMITED_FROM: Final = 1 << 60
"""The first version of control groups writes "no limit" as a number near 2^63."""


class Machine:
    """Reads the machine; stores what turns counters into rates."""

    def __init__(self) -> None:
        self._last_cpu: tuple[float, float] | None = None
        self._cpu_groups = list(_group_folders("cpu"))
        self._memory_groups = list(_memory_groups())
        self._zones = sorted(_SYS.glob("class/thermal/thermal_zone*/temp"))
        self._batteries = [
            supply / "capacity"
            for supply in _SYS.glob("class/power_supply/*")
            if (_read(supply / "type") or b"").strip() == b"Battery"
        ]
        self.architecture = platform.machine()
        self.share = self._share()
        self.processors = max(1, round(self.share + 0.499))
        self.physical_bytes = _meminfo().get("MemTotal", 0)
        self.memory_bytes = self._memory_bytes()

    def read(self) -> Telemetry:
        """What is known now of the machine; what is not stays absent."""
        return Telemetry(
            cpu_fraction=self._cpu_fraction(),
            memory_available_bytes=self._memory_available_bytes(),
            temperature_celsius=self._temperature_celsius(),
            battery_fraction=self._battery_fraction(),
        )

    def memory_limit_bytes(self) -> int | None:
        """The least that a control group around this process allows; None: no limit is seen."""
        limits = (group.limit_bytes() for group in self._memory_groups)
        return min((limit for limit in limits if limit is not None), default=None)

    def memory_charged_bytes(self) -> int | None:
        """What is charged to the innermost control group, cached files included."""
        return next((_integer(group.usage) for group in self._memory_groups), None)

    def available_fraction(self) -> float | None:
        """Of the machine's memory, whatever groups allow; None: an old kernel does not say."""
        memory = _meminfo()
        available, total = memory.get("MemAvailable"), memory.get("MemTotal")
        return available / total if available is not None and total else None

    def memory_limit_hits(self) -> int:
        """How often the innermost control group was at its limit; 0 where it does not say."""
        return next((group.limit_hits() for group in self._memory_groups), 0)

    def _share(self) -> float:
        """Processors that this process may use: affinity, and the quota of its control group."""
        count = float(len(os.sched_getaffinity(0)))
        for folder in self._cpu_groups:
            quota = _cpu_quota(folder)
            if quota is not None:
                count = min(count, quota)
        return count

    def _memory_bytes(self) -> int:
        limit = self.memory_limit_bytes()
        return self.physical_bytes if limit is None else min(self.physical_bytes, limit)

    def _memory_available_bytes(self) -> int | None:
        available = _meminfo().get("MemAvailable")
        for group in self._memory_groups:
            limit = group.limit_bytes()
            usage = None if limit is None else group.used_bytes()
            if limit is not None and usage is not None:
                left = max(0, limit - usage)
                available = left if available is None else min(available, left)
        return available

    def _cpu_fraction(self) -> float | None:
        """Share of the machine's processors in use since the last call; None on the first."""
        text = _read(_STAT)
        if text is None:
            return None
        # user nice system idle iowait irq softirq steal; guest times are part of user
        ticks = [float(field) for field in text.split(b"\n", 1)[0].split()[1:9]]
        busy, total = sum(ticks) - sum(ticks[3:5]), sum(ticks)
        last, self._last_cpu = self._last_cpu, (busy, total)
        if last is None or total <= last[1]:
            return None
        return min(1.0, max(0.0, (busy - last[0]) / (total - last[1])))

    def _temperature_celsius(self) -> float | None:
        readings = [value / 1000 for zone in self._zones if (value := _integer(zone)) is not None]
        # Some sensors report absolute zero or worse while they have nothing to say.
        return max((value for value in readings if -50 < value < 200), default=None)

    def _battery_fraction(self) -> float | None:
        """Charge of the fullest battery."""
        levels = (level for each in self._batteries if (level := _integer(each)) is not None)
        return max((level / 100 for level in levels), default=None)


@dataclass(frozen=True, slots=True)
class _MemoryGroup:
    """The files of a control group that say what memory it allows, and what of it is used. Beyond
    `slow_from` the kernel lets its processes hardly run, and takes from them what it can."""

    limit: Path
    slow_from: Path
    usage: Path
    details: Path
    inactive: re.Pattern[bytes]
    hits: Path

    def limit_bytes(self) -> int | None:
        found = (_integer(self.limit), _integer(self.slow_from))
        limits = (each for each in found if each is not None and each < _UNLIMITED_FROM)
        return min(limits, default=None)

    def limit_hits(self) -> int:
        """How often it was at its limit: all of the file, or two of its lines."""
        return sum(map(int, _HITS.findall(_read(self.hits) or b"")))

    def used_bytes(self) -> int | None:
        """What is used and cannot simply be dropped."""
        usage = _integer(self.usage)
        dropped = self.inactive.search(_read(self.details) or b"")
        if usage is None or dropped is None:
            return usage
        return max(0, usage - int(dropped[1]))


def steady_nanoseconds() -> int:
    """The steady clock that deadlines are reckoned on."""
    return time.monotonic_ns()


def _group_folders(controller: str) -> Iterator[Path]:
    """This process's control group and its parents, of either version, where they are visible."""
    for line in (_read(_CGROUP) or b"").decode(errors="replace").splitlines():
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
    match (_read(folder / "cpu.max") or b"").split():
        case [quota, period] if quota.isdigit():
            return int(quota) / int(period)
    quota_us, period_us = (
        _integer(folder / "cpu.cfs_quota_us"),
        _integer(folder / "cpu.cfs_period_us"),
    )
    if quota_us is None or period_us is None or quota_us <= 0:
        return None
    return quota_us / period_us


def _memory_groups() -> Iterator[_MemoryGroup]:
    """Those around this process, of either version."""
    for folder in _group_folders("memory"):
        for limit, usage, inactive, hits in (
            ("memory.max", "memory.current", rb"^inactive_file (\d+)$", "memory.events"),
            (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                rb"^total_inactive_file (\d+)$",
                "memory.failcnt",
            ),
        ):
            if (folder / limit).exists():
                yield _MemoryGroup(
                    folder / limit,
                    folder / "memory.high",
                    folder / usage,
                    folder / "memory.stat",
                    re.compile(inactive, re.MULTILINE),
                    folder / hits,
                )


def _meminfo() -> dict[str, int]:
    found = _MEMINFO_LINES.findall(_read(_MEMINFO) or b"")
    return {name.decode(): int(value) << 10 for name, value in found}


def _integer(path: Path) -> int | None:
    text = (_read(path) or b"").strip()
    return int(text) if text.removeprefix(b"-").isdigit() else None


def _read(path: Path) -> bytes | None:
    """A small file of the kernel, at once."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, _READ_BYTES)
    except OSError:
        return None
    finally:
        os.close(descriptor)
