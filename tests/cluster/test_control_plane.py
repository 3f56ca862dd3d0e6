"""The control plane that the tests run on is a real one, and leaves nothing behind."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from cluster_fixtures import or_skip
from shoal_cluster import CommandFailed, ControlPlane, places
from shoal_cluster.control_plane import Store
from shoal_cluster.removal import take_down

pytestmark = [pytest.mark.real, pytest.mark.cluster, pytest.mark.slow, pytest.mark.minutes]


ROOT = Path(__file__).resolve().parents[2]


def processes_of(folder: Path) -> list[str]:
    return [
        process.name
        for process in Path("/proc").iterdir()
        if process.name.isdecimal() and str(folder) in environment(process)
    ]


def environment(process: Path) -> str:
    try:
        return (process / "environ").read_text()
    except OSError:
        return ""


def test_the_api_server_answers(control_plane: ControlPlane) -> None:
    namespaces = control_plane.access.get("namespaces")
    assert "kube-system" in {item["metadata"]["name"] for item in namespaces["items"]}


def test_it_grants_only_what_is_granted(control_plane: ControlPlane) -> None:
    asked = ("auth", "can-i", "list", "secrets", "--as=system:serviceaccount:default:default")
    with pytest.raises(CommandFailed):
        control_plane.kubectl(*asked)


def test_controllers_make_what_follows_from_an_object(control_plane: ControlPlane) -> None:
    control_plane.kubectl("create", "deployment", "web", "--image=nowhere/web", "--replicas=2")

    def pods() -> list[str]:
        found = control_plane.access.get("pods", "--selector=app=web")["items"]
        return [pod["metadata"]["name"] for pod in found]

    control_plane.access.wait_until("two pods are made", lambda: len(pods()) == 2)
    control_plane.kubectl("delete", "deployment", "web")
    control_plane.access.wait_until("its pods are gone", lambda: not pods())
    assert not pods()


@pytest.mark.minutes
@pytest.mark.parametrize("store", ["etcd", "kine"])
def test_objects_outlive_every_part_of_it(store: Store) -> None:
    with or_skip(lambda: ControlPlane(store=store)) as plane:
        plane.kubectl("create", "configmap", "kept")
        for process in plane.processes:
            process.kill()
        for process in plane.processes:
            process.start()
        plane.wait_until_ready()
        assert plane.kubectl("get", "configmap", "kept")


@pytest.mark.minutes
def test_two_live_side_by_side_and_leave_nothing() -> None:
    with or_skip(ControlPlane) as first, or_skip(ControlPlane) as second:
        first.kubectl("create", "configmap", "only-here")
        with pytest.raises(CommandFailed, match="not found"):
            second.kubectl("get", "configmap", "only-here")
        assert processes_of(first.folder)
    for plane in (first, second):
        assert not processes_of(plane.folder)
        assert not plane.folder.exists()


def test_writes_are_counted_by_who_made_them() -> None:
    with or_skip(lambda: ControlPlane(audit=True)) as plane:
        for name in ("a", "b"):
            plane.kubectl("create", "configmap", name)
        plane.kubectl("delete", "configmap", "a")
        by_admin = Counter(
            (write.verb, write.resource, write.status)
            for write in plane.api_writes()
            if write.user == "admin"
        )
    assert by_admin == {("create", "configmaps", 201): 2, ("delete", "configmaps", 200): 1}


def test_a_frozen_api_server_answers_nothing_until_it_goes_on() -> None:
    with or_skip(ControlPlane) as plane:
        plane.api_server.pause()
        assert not plane.ready()
        plane.api_server.go_on()
        plane.wait_until_ready()


def test_a_slow_store_makes_every_write_slow() -> None:
    with or_skip(lambda: ControlPlane(slowable_store=True)) as plane:
        plane.delay_store(0.5)
        with pytest.raises(CommandFailed, match=r"(?i)timeout|deadline"):
            plane.kubectl("create", "configmap", "late", "--request-timeout=300ms")
        plane.delay_store(0)
        plane.kubectl("create", "configmap", "in-time")


def test_a_kept_one_outlives_its_maker(control_plane: ControlPlane) -> None:
    assert control_plane.ready()
    script = (
        "from shoal_cluster import ControlPlane; plane = ControlPlane(); plane.start();"
        "plane.home.keep(); print(plane.folder)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT / "hack" / "cluster")},
        capture_output=True,
        text=True,
        check=True,
    )
    folder = Path(done.stdout.strip())
    places.take_down_abandoned(take_down)
    assert processes_of(folder)
    for home in places.kept():
        if home.folder == folder:
            take_down(home)
        else:  # somebody's `make cluster`
            home.release()
    assert not processes_of(folder)
    assert not folder.exists()
