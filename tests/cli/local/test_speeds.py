"""What this machine was measured to do, and what its devices in local mode do then."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal_cli.local.orders import bare_pool, planned_devices
from shoal_cli.local.speeds import SpeedRefused, machine_speed, speed_path
from shoal_planner.devices import PAGE_BYTES_PER_SECOND
from shoal_protocol.speed_files import store_speed
from shoal_protocol.speeds import UNKNOWN_SPEED, Speed

MIB = 1 << 20
SOME = Speed(
    processors=0.9,
    convolution_flops_per_second=6e9,
    product_flops_per_second=6e9,
    page_bytes_per_second=2e9,
    disk_bytes_per_second=9e7,
)


@pytest.mark.real
def test_a_machine_is_measured_once(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    waited: list[str] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        waited.append("measuring")
        yield

    speed = machine_speed(environment, waiting)
    assert speed.product_flops_per_second is not None
    assert [each.name for each in (tmp_path / "shoal").iterdir()] == ["speed.json"]
    assert machine_speed(environment, waiting) == speed
    assert waited == ["measuring"], "a sign of life, while it lasts"


def test_a_machine_that_cannot_be_measured_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "shoal").touch()
    assert machine_speed({"XDG_CACHE_HOME": str(tmp_path)}) == Speed()


def test_a_file_that_is_named_is_used_as_it_is(tmp_path: Path) -> None:
    environment = {"SHOAL_SPEED": str(tmp_path / "given.json")}
    speed_path(environment).touch()
    assert machine_speed(environment) == Speed(), "an empty one says that nothing is known"
    store_speed(speed_path(environment), SOME, "another machine")
    assert machine_speed(environment) == SOME


def test_what_is_named_and_has_no_speeds_is_refused(tmp_path: Path) -> None:
    environment = {"SHOAL_SPEED": str(tmp_path / "given.json")}
    with pytest.raises(SpeedRefused, match=r"SHOAL_SPEED: .*given\.json: No such file"):
        machine_speed(environment)
    speed_path(environment).write_text("{}")
    with pytest.raises(SpeedRefused, match=r"given\.json has no speeds"):
        machine_speed(environment)


def test_devices_have_a_thread_each_and_share_the_disk() -> None:
    alone, *_ = planned_devices(bare_pool([24 * MIB]), SOME)
    third, *_ = planned_devices(bare_pool([24 * MIB] * 3), SOME)
    assert alone.flops_per_second == third.flops_per_second == 3_000_000_000
    assert third.page_bytes_per_second < alone.page_bytes_per_second < PAGE_BYTES_PER_SECOND


def test_nothing_is_known_or_written_for_a_user_without_a_home_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    assert speed_path({}) == Path(os.devnull)
    assert machine_speed({}) == UNKNOWN_SPEED
