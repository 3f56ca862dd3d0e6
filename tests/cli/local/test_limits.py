"""The memory limits of agents, over their restarts."""

from pathlib import Path

import pytest

from shoal_cli.local.cgroups import DeviceGroup
from shoal_cli.local.pool import DeviceLimits

MIB = 1 << 20


@pytest.fixture
def group(tmp_path: Path) -> DeviceGroup:
    (tmp_path / "memory.current").write_text(f"{50 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {50 * MIB}\nfile 0\nkernel 0\nfile_mapped 0\n")
    return DeviceGroup(version=2, memory=tmp_path, cpu=None)


def limit_mib(group: DeviceGroup) -> float:
    return int((group.memory / "memory.max").read_text()) / MIB


def test_the_limit_follows_the_floor_of_an_agent_that_is_started_again(group: DeviceGroup) -> None:
    notes: list[str] = []
    limits = DeviceLimits(lambda name, text: notes.append(f"{name}: {text}"))
    limits.set("pi-4", group, budget_bytes=24 * MIB, floor_bytes=64 * MIB)
    assert limit_mib(group) == 77
    limits.follow("pi-4", 64 * MIB)
    limits.follow("pi-4", 0)
    limits.follow("another", 70 * MIB)
    assert limit_mib(group) == 77
    limits.follow("pi-4", 66 * MIB)
    assert limit_mib(group) == 79
    limits.follow("pi-4", 63 * MIB)
    assert (limit_mib(group), limits.sizes) == (76, {"pi-4": 76 * MIB})
    assert notes == []


def test_a_limit_that_cannot_be_set_is_said_and_the_one_before_counts(group: DeviceGroup) -> None:
    notes: list[str] = []
    limits = DeviceLimits(lambda name, text: notes.append(f"{name}: {text}"))
    limits.set("pi-4", group, budget_bytes=24 * MIB, floor_bytes=64 * MIB)
    (group.memory / "memory.max").unlink()
    (group.memory / "memory.max").mkdir()
    limits.follow("pi-4", 66 * MIB)
    assert notes == ["pi-4: no limit of 79 MiB: Is a directory"]
    assert limits.sizes == {"pi-4": 77 * MIB}
