"""A cluster whose state goes back to that of a backup, while operators run."""

import shutil
from pathlib import Path

import pytest

from controller.test_leading import observed
from operator_processes import Operators, model, wait_until
from shoal_cluster import ControlPlane

pytestmark = [pytest.mark.cluster, pytest.mark.real, pytest.mark.slow, pytest.mark.own_plane]


def exchanged(plane: ControlPlane, taken: Path, brought: Path | None = None) -> None:
    """Take a backup of the store, or bring one back, while neither it nor the API server runs."""
    store = plane.folder / "etcd"
    plane.store.stop()
    shutil.copytree(store, taken)
    if brought is not None:
        shutil.rmtree(store)
        shutil.copytree(brought, store)
    plane.store.start()
    plane.restart_api_server()


def lease_version(plane: ControlPlane) -> int:
    lease = plane.access.get("lease", "shoal-operator", "--namespace=shoal-system")
    return int(lease["metadata"]["resourceVersion"])


def test_an_operator_ends_where_a_backup_is_restored_and_the_next_one_sees_what_there_is(
    plane: ControlPlane, namespace: str, running: Operators, tmp_path: Path
) -> None:
    """Its own memory, and its watches, are of versions that are long to come."""
    first = running.start()
    first.wait_until_leading()
    plane.access.apply(model("m"), namespace=namespace)
    wait_until("it works", lambda: observed(plane, namespace, "m") == 1)
    exchanged(plane, tmp_path / "backup")
    wait_until("it is ready again", first.ready, seconds=90)
    saved = lease_version(plane)
    plane.access.apply(model("m", source={"uri": "pvc://models/2.onnx"}), namespace=namespace)
    wait_until("it works again", lambda: observed(plane, namespace, "m") == 2)
    # By its lease it sees that the past has come back: it has to have written that again.
    wait_until("it leads on", lambda: lease_version(plane) > saved)
    exchanged(plane, tmp_path / "lost", tmp_path / "backup")
    assert observed(plane, namespace, "m") == 1
    wait_until("it ends", lambda: not first.runs())
    assert "HistoryRewound: the API server went back from version" in first.log.read_text()
    plane.access.apply(model("m", source={"uri": "pvc://models/3.onnx"}), namespace=namespace)
    second = running.start()
    wait_until("the next one works", lambda: observed(plane, namespace, "m") == 2)
    wait_until("and is ready", second.ready)
