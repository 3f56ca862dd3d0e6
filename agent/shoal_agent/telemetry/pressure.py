"""How short memory is: pressure stall information of Linux, of machine and control group; and whom
the kernel ends when there is none.

The first version of control groups has none of its own, and a kernel may be without any.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

MACHINE: Final = Path("/proc/pressure/memory")
GROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUP: Final = Path("/proc/self/cgroup")


def files() -> tuple[Path, ...]:
    """Those that this process can read now."""
    found = [MACHINE, *_of_own_group("memory.pressure")]
    return tuple(each for each in found if _read(each) is not None)


def is_ended_with_its_children() -> bool:
    """Whether the kernel ends all processes of this one's group where one finds no memory, as
    kubelets ask it to."""
    return any((_read(each) or "").strip() == "1" for each in _of_own_group("memory.oom.group"))


def _of_own_group(name: str) -> list[Path]:
    lines = [line.split(":", 2) for line in (_read(OWN_GROUP) or "").splitlines()]
    return [GROUPS / path.lstrip("/") / name for number, _, path in lines if number == "0"]


def stalled_percent(paths: Iterable[Path]) -> float | None:
    """The share of the last ten seconds in which some task waited for memory, the largest that a
    file says; None: none says it.
    """
    readings = (_some_of(_read(path) or "") for path in paths)
    return max((each for each in readings if each is not None), default=None)


def _some_of(text: str) -> float | None:
    for line in text.splitlines():
        match line.split():
            case ["some", average, *_] if average.startswith("avg10="):
                number = average.removeprefix("avg10=")
                return float(number) if number.replace(".", "", 1).isdigit() else None
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
