"""Hard proof: within a memory cgroup of floor + budget, with nothing in the page cache beforehand.

Each way begins in a group of its own without a limit, measures its floor, and says it. Then the
limit is set, and it loads the model and runs. Who needs more than that is killed by the kernel, or
reads pages again and again; whoever keeps within it does neither.
"""

import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from measurement import Measurement, Report
from memory_subjects import names, opened
from memory_ways import MIB, Task

from shoal_cli.local.cgroups import DeviceGroup, RunGroups, Unavailable, open_groups, run_name

WAYS = {"granted": "ours", "mapped": "mapped", "default": "default"}
_SECONDS = 120.0
_SPARE_BYTES = 4 << 20
"""Page tables and the kernel's other memory of the process, which no floor has."""
_KILLED = -9


def limits(report: Report, options: Namespace) -> None:
    """Each model within the least that it can run in, and a little for what the kernel counts."""
    for name in names(report, options):
        groups = open_groups(run_name())
        if isinstance(groups, Unavailable):
            report.note(f"{name}: no hard proof: {groups.reason}")
            return
        try:
            with opened(report, name, options) as bench:
                least = bench.fragment.least_bytes
                tasks = [bench.granted(least, "limited")]
                for way in ("mapped", "default"):
                    tasks.append(replace(bench.task, way=way, what="limited", turns=bench.turns))
                for task in tasks:
                    _prove(report, name, task, least + _SPARE_BYTES, groups)
        finally:
            groups.remove()


def _prove(report: Report, name: str, task: Task, budget_bytes: int, groups: RunGroups) -> None:
    group = groups.create(f"{task.name}-{task.way}")
    title = f"{name} within floor + {budget_bytes / MIB:.0f} MiB, {WAYS[task.way]}"
    ended = _run(task, budget_bytes, group)
    if isinstance(ended, str):
        kills = group.pressure().out_of_memory_kills
        report.note(f"{title}: {ended}, {kills} out-of-memory kills")
        return
    begun, runs = ended
    report.add(Measurement(name=f"{title}: load and first run", value=begun[0], unit="s"))
    report.add(Measurement(name=f"{title}: an item", value=median(runs), unit="s"))


def _run(task: Task, budget_bytes: int, group: DeviceGroup) -> list[list[float]] | str:
    """What it measured, or how it ended."""
    script = Path(__file__).with_name("memory_ways.py")
    command = group.enter([sys.executable, str(script), json.dumps(asdict(task))])
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        floor = process.stdout.readline()
        if not floor.strip().isdigit():
            return "ended before it had begun"
        group.limit_memory(int(floor) + budget_bytes)
        try:
            answer, _ = process.communicate("go\n", timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"not done after {_SECONDS:.0f} s"
        if process.returncode:
            killed = process.returncode == _KILLED
            return "killed by the kernel" if killed else f"failed, status {process.returncode}"
        found: list[list[float]] = json.loads(answer.splitlines()[-1])
        return found
