"""Which coordinator a command is about, by what it was given and by what there is."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from shoal_cli.commands.app import run_app
from shoal_cli.commands.targets import NoCoordinator, Target, local_pool
from shoal_cli.live.cluster import Kubectl
from shoal_cli.local import workspace
from shoal_cli.local.cgroups import run_name
from shoal_cli.local.workspace import RunningPool, Workspace, open_workspace, running_pools

NOTHING = Target()


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No run of anybody else, and nothing joined. (A socket's path is short.)"""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setattr(workspace, "OF_OTHER_SESSIONS", ())
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        monkeypatch.delenv("SHOAL_COORDINATOR", raising=False)
        yield


def started(opened: Workspace, pool: str) -> RunningPool:
    """As the coordinator of a pool leaves it: a socket, one for bulk beside it, and an agent's."""
    target = opened.coordinator(pool)
    socket = Path(target.removeprefix("unix:"))
    for name in (socket.name, f"{socket.name}.bulk", f"{pool}.0"):
        (opened.sockets / name).touch()
    return RunningPool(pool, opened.root.resolve(), target)


def test_a_run_is_found_by_its_sockets_until_it_ends(tmp_path: Path) -> None:
    assert local_pool(None) is None
    with open_workspace(tmp_path / "work") as opened:
        pool = started(opened, "shelf")
        assert running_pools() == [pool]
        assert local_pool(None) == local_pool(tmp_path / "work") == pool
    opened.sockets.with_name(f"{opened.sockets.name}-1").symlink_to("has just ended")
    assert running_pools() == []
    with pytest.raises(NoCoordinator, match="no active run has the work folder"):
        local_pool(tmp_path / "work")


def test_a_run_of_another_session_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service has no `XDG_RUNTIME_DIR`, and who asks after it has logged in."""
    with open_workspace(tmp_path / "work") as opened:
        pool = started(opened, "shelf")
        with tempfile.TemporaryDirectory() as other:
            monkeypatch.setenv("XDG_RUNTIME_DIR", other)
            monkeypatch.setattr(tempfile, "tempdir", other)
            assert running_pools() == []
            monkeypatch.setattr(workspace, "OF_OTHER_SESSIONS", (opened.sockets.parent,))
            assert running_pools() == [pool]


def test_of_several_runs_one_is_named(tmp_path: Path) -> None:
    with (
        open_workspace(tmp_path / "one", run_name(1)) as one,
        open_workspace(tmp_path / "two", run_name(2)) as two,
    ):
        first, second = started(one, "shelf"), started(two, "shelf")
        with pytest.raises(NoCoordinator) as caught:
            local_pool(None)
        assert str(caught.value) == (
            "several pools run on this machine; name one:\n"
            f"shelf: --coordinator {first.target} (in {tmp_path}/one)\n"
            f"shelf: --coordinator {second.target} (in {tmp_path}/two)"
        )
        assert local_pool(tmp_path / "two") == second


def test_without_any_coordinator_all_ways_to_one_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_app(["top"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("shoal: no coordinator\n  no `shoal run` and no pool of a program ")
    assert "--coordinator HOST:PORT" in said
    assert "--pool NAME" in said


def test_the_environment_names_a_coordinator_unless_the_command_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_COORDINATOR", f"unix:{tmp_path}/none")
    assert run_app(["top"]) == 1
    assert f"coordinator not reached\n  unix:{tmp_path}/none: " in capsys.readouterr().err
    assert run_app(["top", "--work", str(tmp_path)]) == 2
    assert "no active run has the work folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"pool": "shelf"}, ()),
        ({"namespace": "reading", "context": "home"}, ("--namespace=reading", "--context=home")),
        ({"kubeconfig": Path("k")}, ("--kubeconfig=k",)),
    ],
)
def test_each_option_of_kubectl_is_enough_to_mean_a_cluster(
    given: dict[str, object], options: tuple[str, ...]
) -> None:
    assert Target(**given).kubectl == Kubectl(options)  # type: ignore[arg-type]


def test_the_plugin_means_a_cluster_and_the_command_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert NOTHING.kubectl is None
    monkeypatch.setattr("sys.argv", ["/usr/bin/kubectl-shoal", "top"])
    assert NOTHING.kubectl == Kubectl(())
    assert Target(coordinator="unix:/s").kubectl is None


def test_two_coordinators_at_once_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="not several"):
        _ = Target(coordinator="unix:/s", pool="shelf").kubectl
