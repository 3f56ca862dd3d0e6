"""The metrics of several processes at one address."""

from contextlib import ExitStack
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.parser import text_string_to_metric_families as strictly_parsed
from prometheus_client.parser import text_string_to_metric_families

from monitoring import registries
from shoal_cli.local.metrics import serve
from shoal_cli.local.pool import Target
from shoal_protocol.exposition import ExpositionServer


def process(path: Path, tasks: int) -> ExpositionServer:
    registry = CollectorRegistry()
    counter = Counter("shoal_tasks", "Tasks run.", ["tier"], registry=registry)
    counter.labels(tier="resident").inc(tasks)
    return ExpositionServer(lambda: None, host=f"unix:{path}", registry=registry)


def test_each_series_says_of_which_process_it_is_and_a_dead_one_is_left_out(
    tmp_path: Path,
) -> None:
    targets = [
        Target(address=f"unix:{tmp_path}/{name}", labels={"pool": "shelf", "device": name})
        for name in ("one", "two", "killed")
    ]
    with (
        process(tmp_path / "one", 3),
        process(tmp_path / "two", 4),
        serve(("127.0.0.1", 0), lambda: targets) as server,
        urlopen(f"{server.url}/metrics", timeout=60) as answer,  # noqa: S310 - loopback
    ):
        families = list(text_string_to_metric_families(answer.read().decode()))
    (tasks,) = [family for family in families if family.name == "shoal_tasks"]
    assert tasks.documentation == "Tasks run."
    assert [(sample.labels, sample.value) for sample in tasks.samples] == [
        ({"tier": "resident", "pool": "shelf", "device": name}, value)
        for name, value in (("one", 3), ("two", 4))
    ]


def test_who_asks_for_openmetrics_gets_what_a_strict_parser_takes(tmp_path: Path) -> None:
    """All metrics that processes have, of each kind; two agents."""
    own = registries()
    names = {"c": own["coordinator"], "one": own["agent"], "two": registries()["agent"]}
    with ExitStack() as stack:
        for name, registry in names.items():
            host = f"unix:{tmp_path}/{name}"
            stack.enter_context(ExpositionServer(lambda: None, host=host, registry=registry))
        targets = [
            Target(address=f"unix:{tmp_path}/{name}", labels={"device": name}) for name in names
        ]
        server = stack.enter_context(serve(("127.0.0.1", 0), lambda: targets))
        asked = Request(f"{server.url}/metrics", headers={"Accept": CONTENT_TYPE_LATEST})  # noqa: S310 - loopback
        answer = stack.enter_context(urlopen(asked, timeout=60))  # noqa: S310 - the same
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        text = answer.read().decode()
    families = {each.name: each for each in strictly_parsed(text)}  # type: ignore[no-untyped-call]
    assert {each.labels["device"] for each in families["shoal_agent_sessions"].samples} == {
        "one",
        "two",
    }
    assert families["shoal_agent"].type == "info"
    assert families["shoal_coordinator_items_ended"].type == "counter"


def test_an_address_that_is_taken_is_an_error() -> None:
    with serve(("127.0.0.1", 0), list) as server, pytest.raises(OSError, match="in use"):
        serve(("127.0.0.1", server.port), list)
