"""Writes docs/metrics.md from the metrics that the processes declare; with --check, says whether it
is stale.

.venv/bin/python hack/metrics.py [--check]
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shoal_agent.telemetry.counters import Counters
from shoal_agent.telemetry.metrics import GAUGES, AgentCollector, registry_of
from shoal_coordinator.server.metrics import CoordinatorMetrics
from shoal_operator.controller.telemetry import OperatorMetrics

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/metrics.md"
SUFFIXES = {"counter": "_total", "info": "_info"}
HEAD = ("| name | type | labels | meaning |", "|---|---|---|---|")
INTRODUCTION = """\
<!-- Written by `make generate` from what the processes declare; do not edit by hand. -->

# Metrics

Each process serves `/metrics` for Prometheus, `/healthz` and `/readyz`.

| where | how |
|---|---|
| on a cluster | the operator has port 8080, coordinators and agents have 9400; with the chart's \
`podMonitor.enabled` a Prometheus operator finds them |
| `shoal run` | `--metrics-address HOST:PORT` serves the metrics of all processes at one address \
while the run lasts |
| elsewhere | the same option of `shoal coordinator` and `shoal agent` |

On a cluster and with `shoal run` each series of a pool has the labels `pool` and `component`
(`coordinator` or `agent`), and an agent's has `device`. Where you scrape a coordinator or an agent
by yourself, give the target these labels: alerts and dashboards group by them.

The chart has alerts (`prometheusRule.enabled`), each with a [runbook](runbooks/ShoalJobFailed.md)
that its annotation `runbook_url` names, and five [Grafana dashboards](dashboards.md)
(`dashboards.enabled`): Fleet, Job pipeline, Device memory, Planner accuracy, Operator.

A histogram NAME is three series: `NAME_bucket` with the label `le`, `NAME_sum` and `NAME_count`. No
label has the name of a job or an item, so the number of series does not grow with them. The
`process_` metrics are those of the Prometheus client library.

## Traces

`--otlp http://HOST:4318`, of `shoal run` and of `shoal coordinator`, exports a trace of each item
to an OpenTelemetry collector: the item from its first task to its stored result, and in it each
task from its instruction to its answer, with the device, the tier, the wait and the time in the
runtime as attributes. It is off by default and needs the extra `shoal[otlp]`. What the collector
does not take in time is dropped; no item waits for it.
"""


def main() -> None:
    wanted = page()
    if "--check" not in sys.argv[1:]:
        (ROOT / PAGE).write_text(wanted)
    elif (ROOT / PAGE).read_text() != wanted:
        raise SystemExit(f"not current: {PAGE}; run `make generate`")


def page() -> str:
    info = {"version": "", "architecture": ""}
    agent = AgentCollector(info, Counters(), lambda: dict.fromkeys(GAUGES, 0.0))
    processes: dict[str, Iterable[Collector]] = {
        "Coordinator": collectors(CoordinatorMetrics().registry),
        "Agent": collectors(registry_of(agent)),
        "Operator": collectors(OperatorMetrics().registry),
    }
    parts = [INTRODUCTION]
    for process, declared in processes.items():
        rows = sorted(row for collector in declared for row in table_rows(collector))
        parts.append("\n".join([f"## {process}", "", *HEAD, *rows, ""]))
    return "\n".join(parts)


def collectors(registry: CollectorRegistry) -> list[Collector]:
    """What was registered. The library has no public way to ask, and a metric with labels has no
    samples before it is used."""
    return list(registry._collector_to_names)


def table_rows(collector: Collector) -> Iterator[str]:
    for family in collector.collect():
        name = family.name + SUFFIXES.get(family.type, "")
        labels = ", ".join(f"`{label}`" for label in label_names(collector, family))
        yield f"| `{name}` | {family.type} | {labels} | {family.documentation} |"


def label_names(collector: Collector, family: Metric) -> list[str]:
    """A metric that is used directly knows its labels itself; else its family or its samples do."""
    declared = [name for owner in (collector, family) for name in getattr(owner, "_labelnames", ())]
    sampled = [name for sample in family.samples for name in sample.labels if name != "le"]
    return list(dict.fromkeys([*declared, *sampled]))


if __name__ == "__main__":
    main()
