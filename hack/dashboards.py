"""Writes the Grafana dashboards of the chart from the panels below; with --check, says what is
stale.

.venv/bin/python hack/dashboards.py [--check]

In a query `@` stands for the chosen namespaces and pools. A label that a series does not have
matches, so that the same boards serve a run on one machine.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphDrawStyle,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = "helm/shoal/dashboards"
SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
ALL: Final = VariableOption(text=["All"], value=["$__all"])
A, C, O = "shoal_agent", "shoal_coordinator", "shoal_operator"  # noqa: E741 - their initials
BYTES, SECONDS, SHARE = "bytes", "s", "percentunit"
PER_SECOND, SPEED = "ops", "Bps"


@dataclass(frozen=True)
class Panel:
    """A panel; `queries` by legend. `wide`: a graph over time, else one number."""

    title: str
    text: str
    unit: str
    queries: Mapping[str, str]
    wide: bool


@dataclass(frozen=True)
class Board:
    """A dashboard of 24 columns: numbers are 4 wide, graphs 12."""

    name: str
    title: str
    text: str
    panels: tuple[Panel, ...]
    pools: bool = True


def number(title: str, text: str, query: str, unit: str = "short") -> Panel:
    return Panel(title, text, unit, {"": query}, wide=False)


def graph(title: str, text: str, unit: str = "short", **queries: str) -> Panel:
    """A graph over time. A legend `by_LABEL` is that label's value."""
    legends = {re.sub(r"^by_(\w+)$", r"{{\1}}", key): query for key, query in queries.items()}
    return Panel(title, text, unit, legends, wide=True)


def quantiles(title: str, text: str, metric: str, unit: str = SECONDS) -> Panel:
    """Median and 99th percentile of a histogram."""
    return graph(title, text, unit, p50=quantile(0.5, metric), p99=quantile(0.99, metric))


def quantile(
    fraction: float, metric: str, change: str = "rate", time: str = "$__rate_interval"
) -> str:
    return f"histogram_quantile({fraction}, sum by (le) ({change}({metric}_bucket{{@}}[{time}])))"


def total(metric: str, labels: str = "", by: str = "") -> str:
    return f"{summed(by)}({selected(metric, labels)})"


def rate(metric: str, by: str = "", labels: str = "") -> str:
    return f"{summed(by)}(rate({selected(metric, labels)}[$__rate_interval]))"


def gained(metric: str, labels: str = "") -> str:
    """By how much a counter grew in the shown time."""
    return f"sum(increase({selected(metric, labels)}[$__range]))"


def of_all(query: str) -> str:
    """Whatever is chosen: the operator's series are not of one pool."""
    return query.replace("{@}", "")


def ratio(part: str, whole: str) -> str:
    return f"{part} / {whole}"


def summed(by: str) -> str:
    return f"sum by ({by}) " if by else "sum"


def selected(metric: str, labels: str) -> str:
    return f"{metric}{{@,{labels}}}" if labels else f"{metric}{{@}}"


MEMORY_RATIO: Final = f"{A}_memory_estimate_ratio"
RATE_RATIO: Final = f"{O}_plan_rate_ratio"
PEAK: Final = f"{A}_peak_bytes{{@}} / {A}_budget_bytes{{@}}"
EXPIRY: Final = "certificate_expiration_timestamp_seconds"
BUSY: Final = rate(f"{A}_task_compute_seconds_sum", "pool, device")

FLEET: Final = Board(
    "fleet",
    "Fleet",
    "Which devices there are, how they are, and what the links between them do.",
    (
        number("Devices ready", "They answer.", total(f"{C}_devices", 'state="Ready"')),
        number("Devices silent or lost", "They should answer.",
               total(f"{C}_devices", 'state=~"Silent|Lost"')),
        number("Budget", "Of all agents together.", total(f"{A}_budget_bytes"), BYTES),
        number("Agents without a session", "They run and reach no coordinator.",
               f"count({A}_session_connected{{@}} == 0) or vector(0)"),
        number("Volume free", "The fullest of the coordinators' volumes.",
               f"min({C}_volume_free_bytes{{@}} / {C}_volume_size_bytes{{@}})", SHARE),
        number("Next certificate ends in", "Of agents and coordinators; empty without TLS.",
               f"min({A}_{EXPIRY}{{@}} - time() or {C}_{EXPIRY}{{@}} - time())", SECONDS),
        graph("Devices by state", "As the coordinators know them.",
              by_state=total(f"{C}_devices", by="state")),
        graph("Agents by version", "More than one for long: an upgrade has stopped.",
              by_version=f"count by (version) ({A}_info{{@}})"),
        graph("Time in the runtime", "Share of the time that a device computes.", SHARE,
              by_device=BUSY),
        graph("Processor time of agents", "Processors that are busy, of each agent.",
              by_device=rate("process_cpu_seconds_total", "pool, device", 'component="agent"')),
        graph("Round trip to the coordinator", "The shortest of the last ones.", SECONDS,
              by_device=f"{A}_link_round_trip_seconds{{@}}"),
        graph("Speed of links", "Of the last large transfers; empty before there were any.",
              SPEED, by_device=f"{A}_link_bytes_per_second{{@}}"),
        graph("Activations", "From agent to agent, and through coordinators.", SPEED,
              direct=rate(f"{A}_sent_bytes_total"), relayed=rate(f"{C}_relayed_bytes_total")),
        graph("Fragments fetched", "From the coordinator or from peers.", SPEED,
              by_source=rate(f"{A}_fetched_bytes_total", "source")),
        graph("Disk of agents", "Free bytes beside the cache.", BYTES,
              by_device=f"{A}_disk_free_bytes{{@}}"),
        graph("Memory of coordinators", "Resident bytes of the process.", BYTES,
              by_pool='max by (pool) (process_resident_memory_bytes{@,component="coordinator"})'),
    ),
)  # fmt: skip
JOBS: Final = Board(
    "jobs",
    "Job pipeline",
    "Jobs, items and tasks: how many, how long, and why some fail.",
    (
        number("Jobs running", "On all chosen pools.", total(f"{C}_jobs")),
        number("Jobs failed", "In the shown time.",
               gained(f"{C}_jobs_ended_total", 'outcome="failed"')),
        number("Items per second", "With stored results.",
               rate(f"{C}_items_ended_total", labels='outcome="succeeded"'), PER_SECOND),
        number("Items failed", "In the shown time.",
               gained(f"{C}_items_ended_total", 'outcome="failed"')),
        number("Items on their way", "Admitted and not ended.", total(f"{C}_active_items")),
        number("Tasks given again", "In the shown time, after failures and losses.",
               gained(f"{C}_task_retries_total")),
        graph("Items that ended", "By how.", PER_SECOND,
              by_outcome=rate(f"{C}_items_ended_total", "outcome")),
        graph("Items that failed", "By why.", PER_SECOND,
              by_reason=rate(f"{C}_item_failures_total", "reason")),
        quantiles("Time of an item", "From its first task's start to its stored result.",
                  f"{C}_item_seconds"),
        quantiles("Wait for a device", "Of a task that has all its inputs.",
                  f"{C}_task_wait_seconds"),
        quantiles("Time of a job", "From its submission to its end.", f"{C}_job_seconds"),
        quantiles("Wait of a job", "From its submission to its first task.",
                  f"{C}_job_wait_seconds"),
        graph("Tasks waiting and running", "Many that wait: the pool is the bottleneck.",
              waiting=total(f"{C}_ready_tasks"), running=total(f"{C}_running_tasks")),
        graph("Tasks by tier", "What the device had to do first; resident is best.", PER_SECOND,
              by_tier=rate(f"{C}_tasks_total", "tier")),
        quantiles("Task in the runtime", "As the agents measure it.", f"{A}_task_compute_seconds"),
        quantiles("Task on its device", "From its arrival to its answer.", f"{A}_task_seconds"),
        graph("Tasks answered", "By outcome.", PER_SECOND,
              by_outcome=rate(f"{A}_tasks_total", "outcome")),
        graph("Bytes in the coordinator", "Inputs not delivered yet, and results that come in.",
              BYTES, inputs=total(f"{C}_input_bytes_in_flight"),
              results=total(f"{C}_result_bytes_in_flight")),
        quantiles("Step of the dispatcher", "Above a millisecond it limits the throughput.",
                  f"{C}_step_seconds"),
        graph("Full queues", "Transfers and streams that had to wait.", PER_SECOND,
              coordinator=rate(f"{C}_full_queues_total"), agents=rate(f"{A}_full_queues_total")),
    ),
)  # fmt: skip
MEMORY: Final = Board(
    "memory",
    "Device memory",
    "What agents use of their budgets, and for what.",
    (
        number("Largest share of a budget",
               "The highest measured on any device in the shown time: runs that were stopped, and "
               "loads, included.",
               f"max(max_over_time(({PEAK})[$__range:]))", SHARE),
        number("Share of a budget now", "On the fullest device.",
               f"max({A}_used_bytes{{@}} / {A}_budget_bytes{{@}})", SHARE),
        number("Runs over budget", "In the shown time.", gained(f"{A}_over_budget_runs_total")),
        number("Fragments resident", "On all devices.", total(f"{A}_resident_fragments")),
        number("Evictions", "In the shown time.", gained(f"{A}_evictions_total")),
        number("Withheld", "While memory is short on the machines.", total(f"{A}_withheld_bytes"),
               BYTES),
        graph("Used above the floor", "Resident bytes now.", BYTES,
              by_device=f"{A}_used_bytes{{@}}"),
        graph("Peak as a share of the budget", "Since the agent started; 1 is all of it.", SHARE,
              by_device=PEAK),
        graph("The ledger", "What the budgets are planned with.", BYTES,
              budget=total(f"{A}_budget_bytes"), fragments=total(f"{A}_fragments_bytes"),
              activations=total(f"{A}_reserved_bytes"), withheld=total(f"{A}_withheld_bytes")),
        graph("Grants of fragments in blocks", "What they have, want, and were lent.", BYTES,
              granted=total(f"{A}_fragment_granted_bytes"),
              wanted=total(f"{A}_fragment_wanted_bytes"),
              least=total(f"{A}_fragment_least_bytes"), lent=total(f"{A}_fragment_lent_bytes")),
        quantiles("Time to make a fragment resident", "Fetch, preparation and trial included.",
                  f"{A}_load_seconds"),
        graph("Loads and evictions", "By outcome.", PER_SECOND,
              by_outcome=rate(f"{A}_loads_total", "outcome"), evicted=rate(f"{A}_evictions_total")),
        graph("Grants changed", "How often memory moves between fragments.", PER_SECOND,
              changed=rate(f"{A}_grants_total")),
        graph("Activations on disk", "A full device slows down, and does not fail.", BYTES,
              by_device=f"{A}_spilled_bytes{{@}}"),
        graph("Cache as a share of its limit", "Fragments on disk.", SHARE,
              by_device=f"{A}_cached_bytes{{@}} / {A}_cache_limit_bytes{{@}}"),
        graph("Floor", "Resident bytes of the idle agent.", BYTES,
              by_device=f"{A}_floor_bytes{{@}}"),
    ),
)  # fmt: skip
PLANNER: Final = Board(
    "planner",
    "Planner accuracy",
    "What plans predicted against what was measured.",
    (
        number("Memory, median", "Measured memory of a fragment as a share of what it was planned "
               "with, in the shown time.", quantile(0.5, MEMORY_RATIO, "increase", "$__range"),
               SHARE),
        number("Memory, 99th percentile", "Above 100 %: estimates are too low.",
               quantile(0.99, MEMORY_RATIO, "increase", "$__range"), SHARE),
        number("Fragments measured", "In the shown time.", gained(f"{MEMORY_RATIO}_count")),
        number("Above what was planned", "Share of the measured fragments.",
               "1 - " + ratio(gained(f"{MEMORY_RATIO}_bucket", 'le="1.0"'),
                              gained(f"{MEMORY_RATIO}_count")), SHARE),
        number("Rate, median", "Measured items per second of Placements as a share of the "
               "prediction; of all pools of a cluster.",
               of_all(quantile(0.5, RATE_RATIO, "increase", "$__range")), SHARE),
        number("Balance", "Busiest device against the mean: 1 is a plan that uses all alike.",
               ratio(f"max({BUSY})", f"avg({BUSY})")),
        quantiles("Memory of fragments", "Measured as a share of planned; 1 is exact.",
                  MEMORY_RATIO, SHARE),
        graph("Rate of plans", "Measured as a share of predicted.", SHARE,
              p50=of_all(quantile(0.5, RATE_RATIO)), p99=of_all(quantile(0.99, RATE_RATIO))),
        graph("Time of tasks", "Measured as a share of predicted, by device.", SHARE,
              by_device=f"avg by (pool, device) "
                        f"({C}_task_measured_seconds{{@}} / {C}_task_predicted_seconds{{@}})"),
        graph("Busy devices", "Time in the runtime; a good plan keeps them alike.", SHARE,
              by_device=BUSY),
        graph("Loads that were refused", "A plan that fits has none.", PER_SECOND,
              by_outcome=rate(f"{A}_loads_total", "outcome", 'outcome!="loaded"')),
        graph("Tasks that found their fragment resident", "As a share of all.", SHARE,
              resident=ratio(rate(f"{C}_tasks_total", labels='tier="resident"'),
                             rate(f"{C}_tasks_total"))),
        graph("Granted of what is wanted", "Below 1, fragments in blocks stream weights.", SHARE,
              by_device=ratio(total(f"{A}_fragment_granted_bytes", by="pool, device"),
                              total(f"{A}_fragment_wanted_bytes", by="pool, device"))),
    ),
)  # fmt: skip
OPERATOR: Final = Board(
    "operator",
    "Operator",
    "How the operator follows the cluster.",
    (
        number("Leads", "1, or nobody plans.", total(f"{O}_leader")),
        number("Oldest watch", "Renewed every 55 seconds.", f"max({O}_watch_age_seconds{{@}})",
               SECONDS),
        number("Queue", "Objects that wait for a worker.", total(f"{O}_queue_depth")),
        number("Workers busy", "Reconciling an object.", total(f"{O}_workers_busy")),
        number("Event loop lag", "How late the loop was last.",
               f"max({O}_loop_lag_seconds{{@}})", SECONDS),
        number("Coordinators unreachable", "As the leader knows.",
               f'max({O}_coordinators{{@,state="unreachable"}})'),
        graph("Jobs by status", "All InferenceJobs.",
              by_status=f"max by (status) ({O}_jobs{{@}})"),
        graph("Jobs that ended", "Also those that never ran.", PER_SECOND,
              by_outcome=rate(f"{O}_jobs_ended_total", "outcome")),
        graph("Objects", "By kind.", by_kind=f"max by (kind) ({O}_objects{{@}})"),
        quantiles("Time to reconcile", "One object, with what was done.",
                  f"{O}_reconcile_seconds"),
        quantiles("Wait for a worker", "Of an object in the queue.", f"{O}_queue_wait_seconds"),
        graph("Reconciliations that failed", "They are tried again.", PER_SECOND,
              by_kind=rate(f"{O}_reconcile_failures_total", "kind")),
        graph("Requests to the API server", "By status; `error`: no answer.", PER_SECOND,
              by_code=rate(f"{O}_api_requests_total", "code")),
        graph("Changes seen", "In watches.", PER_SECOND,
              by_kind=rate(f"{O}_watch_events_total", "kind")),
        graph("Calls of coordinators", "By status.", PER_SECOND,
              by_code=rate(f"{O}_coordinator_calls_total", "code")),
        graph("Memory", "Resident bytes of the process.", BYTES, by_pod=(
            f"process_resident_memory_bytes{{@}} and on (namespace, pod) {O}_leader")),
        graph("Authority", "Until it expires.", SECONDS,
              left=f"min({O}_{EXPIRY}{{@}}) - time()"),
    ),
    pools=False,
)  # fmt: skip
BOARDS: Final = (FLEET, JOBS, MEMORY, PLANNER, OPERATOR)


def main() -> None:
    wanted = {f"{FOLDER}/{board.name}.json": as_json(board) for board in BOARDS}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / FOLDER).glob("*.json")}
    if "--check" not in sys.argv[1:]:
        for name in there - wanted.keys():
            (ROOT / name).unlink()
        for name, text in wanted.items():
            (ROOT / name).write_text(text)
        return
    stale = {name for name in there & wanted.keys() if (ROOT / name).read_text() != wanted[name]}
    stale |= there ^ wanted.keys()
    if stale:
        raise SystemExit(f"not current: {', '.join(sorted(stale))}; run `make generate`")


def as_json(board: Board) -> str:
    made = (
        dashboard.Dashboard(f"Shoal / {board.title}")
        .uid(f"shoal-{board.name}")
        .description(board.text)
        .tags(["shoal"])
        .refresh("30s")
        .time("now-1h", "now")
        .variables(list(variables(board)))
    )
    numbers = count(1)
    for panel in board.panels:
        made.with_panel(built(panel, board).id(next(numbers)))
    return JSONEncoder(indent=2, sort_keys=True).encode(made.build()) + "\n"


def variables(
    board: Board,
) -> tuple[dashboard.DatasourceVariable | dashboard.QueryVariable, ...]:
    """Data source, namespace, and the pools of these namespaces."""
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    if not board.pools:
        return source, choice("namespace", "shoal_operator_leader")
    series = "shoal_coordinator_jobs"
    return (
        source,
        choice("namespace", series),
        choice("pool", f'{series}{{namespace=~"$namespace"}}'),
    )


def choice(label: str, series: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(label)
        .label(label.capitalize())
        .datasource(SOURCE)
        .query(f"label_values({series}, {label})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(ALL)
    )


def built(panel: Panel, board: Board) -> stat.Panel | timeseries.Panel:
    made: stat.Panel | timeseries.Panel = as_graph() if panel.wide else as_number()
    made = made.title(panel.title).description(panel.text).unit(panel.unit).datasource(SOURCE)
    for letter, (legend, query) in zip("ABCDEF", panel.queries.items(), strict=False):
        made.with_target(
            prometheus.Dataquery().expr(chosen(query, board)).legend_format(legend).ref_id(letter)
        )
    return made


def chosen(query: str, board: Board) -> str:
    """The query with its selectors."""
    labels = ("namespace", "pool") if board.pools else ("namespace",)
    return query.replace("@", ",".join(f'{label}=~"${label}"' for label in labels))


def as_number() -> stat.Panel:
    reduced = common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
    return stat.Panel().height(4).span(4).reduce_options(reduced)


def as_graph() -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST)
    legend = legend.placement(LegendPlacement.BOTTOM).show_legend(True)
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    return (
        timeseries.Panel()
        .height(8)
        .span(12)
        .min(0)
        .draw_style(GraphDrawStyle.LINE)
        .line_width(1)
        .fill_opacity(10)
        .show_points(VisibilityMode.NEVER)
        .legend(legend)
        .tooltip(tooltip)
    )


if __name__ == "__main__":
    main()
