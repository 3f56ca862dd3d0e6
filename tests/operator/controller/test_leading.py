"""Several operators, one leads; and what happens when the API server is away or silent."""

import signal
from pathlib import Path

import pytest

from operator_processes import CRDS, Operators, model, wait_until
from shoal_cluster import ControlPlane
from stalling_proxy import StallingProxy

pytestmark = [pytest.mark.cluster, pytest.mark.real, pytest.mark.slow]


def observed(plane: ControlPlane, namespace: str, name: str) -> int:
    found = plane.access.get("model", name, f"--namespace={namespace}")
    return int(found.get("status", {}).get("observedGeneration", 0))


def test_of_two_operators_one_leads_and_a_clean_end_hands_over_at_once(
    plane: ControlPlane, namespace: str, running: Operators
) -> None:
    first = running.start()
    first.wait_until_leading()
    second = running.start()
    wait_until("the second is ready to take over", second.ready)
    assert not second.leads()
    assert second.metric("shoal_operator_watch_events_total") == 0
    assert first.stop() == 0
    second.wait_until_leading()
    plane.access.apply(model("m"), namespace=namespace)
    wait_until("the second works", lambda: observed(plane, namespace, "m") == 1)


def test_a_leader_that_is_killed_is_followed_when_its_lease_has_run_out(
    plane: ControlPlane, namespace: str, running: Operators
) -> None:
    first = running.start()
    first.wait_until_leading()
    second = running.start()
    wait_until("the second waits", second.ready)
    first.kill()
    plane.access.apply(model("m"), namespace=namespace)
    wait_until("the second works", lambda: observed(plane, namespace, "m") == 1)
    lease = plane.access.get("lease", "shoal-operator", "--namespace=shoal-system")
    assert lease["spec"]["holderIdentity"] == second.name


def test_a_leader_that_was_stopped_for_long_writes_nothing_when_it_wakes_up(
    plane: ControlPlane, namespace: str, running: Operators
) -> None:
    first = running.start()
    first.wait_until_leading()
    second = running.start()
    wait_until("the second waits", second.ready)
    first.send(signal.SIGSTOP)
    second.wait_until_leading()
    patches = {"verb": "patch"}
    plane.access.apply(model("m"), namespace=namespace)
    wait_until("the second works", lambda: observed(plane, namespace, "m") == 1)
    first.send(signal.SIGCONT)
    wait_until("the first knows that it lost", lambda: not first.leads())
    before = first.metric("shoal_operator_api_requests_total", **patches)
    plane.access.apply(model("m", source={"uri": "pvc://models/2.onnx"}), namespace=namespace)
    wait_until("the second works", lambda: observed(plane, namespace, "m") == 2)
    assert first.metric("shoal_operator_api_requests_total", **patches) == before
    assert not first.ready()


def test_an_api_server_that_restarts_is_waited_for(
    plane: ControlPlane, namespace: str, running: Operators
) -> None:
    operator = running.start()
    operator.wait_until_leading()
    plane.access.apply(model("before"), namespace=namespace)
    wait_until("it works", lambda: observed(plane, namespace, "before") == 1)
    plane.restart_api_server()
    plane.access.apply(model("after"), namespace=namespace)
    wait_until("it works again", lambda: observed(plane, namespace, "after") == 1, seconds=90)
    wait_until("it is ready again", operator.ready, seconds=90)
    assert operator.runs()


def test_what_was_deleted_while_no_operator_ran_is_forgotten_and_what_came_is_seen(
    plane: ControlPlane, namespace: str, running: Operators
) -> None:
    first = running.start()
    first.wait_until_leading()
    plane.access.apply(model("old"), namespace=namespace)
    wait_until("it works", lambda: observed(plane, namespace, "old") == 1)
    first.kill()
    plane.kubectl("delete", "model", "old", f"--namespace={namespace}")
    plane.access.apply(model("new"), namespace=namespace)
    second = running.start()
    wait_until("the new one is seen", lambda: observed(plane, namespace, "new") == 1)
    found = plane.access.get("models", "--all-namespaces")["items"]
    wait_until(
        "it knows what there is",
        lambda: second.metric("shoal_operator_objects", kind="Model") == len(found),
    )


def test_the_probe_names_the_kinds_that_the_api_server_does_not_know(
    plane: ControlPlane, running: Operators
) -> None:
    crd = "placements.shoal.dev"
    plane.kubectl("delete", "crd", crd)
    try:
        operator = running.start()
        said = "the API server does not know Placement: install the CRDs of Shoal"
        wait_until("it says what is missing", lambda: said in operator.ask("/readyz")[1])
    finally:
        plane.kubectl("apply", "--server-side", f"--filename={CRDS}")
    operator.wait_until_leading()


def test_silent_watches_fail_the_probe_and_recover(
    plane: ControlPlane, namespace: str, account: Path, running: Operators, tmp_path: Path
) -> None:
    """A proxy holds back all bytes: connections stay, nobody says that anything is wrong."""
    host, port = plane.url.removeprefix("https://").split(":")
    with StallingProxy((host, int(port))) as proxy:
        through = tmp_path / "kubeconfig"
        text = account.read_text()
        through.write_text(text.replace(plane.url, f"https://127.0.0.1:{proxy.port}"))
        operator = running.start(kubeconfig=through, watch_seconds=4)
        operator.wait_until_leading()
        proxy.stall()
        wait_until("the probe fails", lambda: not operator.ready(), seconds=90)
        wait_until(
            "the watches are known to be old",
            lambda: "watch of" in operator.ask("/readyz")[1],
            seconds=120,
        )
        assert operator.ask("/healthz")[0] == 200
        plane.access.apply(model("meanwhile"), namespace=namespace)
        proxy.flow()
        wait_until("it works", lambda: observed(plane, namespace, "meanwhile") == 1, seconds=90)
        wait_until("it is ready again", operator.ready, seconds=90)
        assert operator.runs()
