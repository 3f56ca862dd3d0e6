"""The dashboards of the chart: what each panel asks, the most urgent first.

A number that an alert watches has the alert's bound as its red.
"""

from typing import Final

from panels import (
    ANY_IS_BAD,
    ANY_IS_NOTED,
    BAD,
    BYTES,
    GOOD,
    SECONDS,
    SHARE,
    SPEED,
    Board,
    falling,
    gained,
    graph,
    mean,
    number,
    of_all,
    quantile,
    quantiles,
    rate,
    ratio,
    rising,
    selected,
    total,
)

A, C, O = "shoal_agent", "shoal_coordinator", "shoal_operator"  # noqa: E741 - their initials
ITEM_RATE, TASK_RATE, JOB_RATE, EVENT_RATE = (
    "suffix:items/s",
    "suffix:tasks/s",
    "suffix:jobs/s",
    "suffix:/s",
)
DAY_SECONDS: Final = 86_400.0

MEMORY_RATIO: Final = f"{A}_memory_estimate_ratio"
RATE_RATIO: Final = f"{O}_plan_rate_ratio"
PEAK: Final = f"{A}_peak_bytes{{@}} / {A}_budget_bytes{{@}}"
USED: Final = f"{A}_used_bytes{{@}} / {A}_budget_bytes{{@}}"
EXPIRY: Final = "certificate_expiration_timestamp_seconds"
BUSY: Final = rate(f"{A}_task_compute_seconds_sum", "pool, device")
FIRING: Final = 'ALERTS{@,alertname=~"Shoal.+",alertstate="firing"}'


def of_leader(summed: str, metric: str, labels: str = "") -> str:
    """What the operator that leads knows; others have no objects."""
    of_each = selected(f"{O}_{metric}", labels)
    return f"{summed} ({of_each} and on (namespace, pod) {O}_leader{{@}} == 1)"


FLEET: Final = Board(
    "fleet",
    "Fleet",
    "Which devices there are, how they are, and what the links between them do.",
    (
        number("Alerts firing", "Of the chart's rules, where this Prometheus evaluates them.",
               f"count({FIRING}) or vector(0)", levels=ANY_IS_BAD),
        number("Devices ready", "They answer.", total(f"{C}_devices", 'state="Ready"'),
               levels=((None, BAD), (0.5, GOOD))),
        number("Silent or lost", "Devices that should answer.",
               total(f"{C}_devices", 'state=~"Silent|Lost"'), levels=ANY_IS_BAD),
        number("Without session", "Agents that run and reach no coordinator.",
               f"count({A}_session_connected{{@}} == 0) or vector(0)", levels=ANY_IS_BAD),
        number("Volume free", "The fullest of the coordinators' volumes. Fragments that no job "
               "uses count as free.",
               f"min(({C}_volume_free_bytes{{@}} + {C}_volume_removable_bytes{{@}}) "
               f"/ {C}_volume_size_bytes{{@}})", SHARE,
               falling(watch=0.2, bad=0.1)),
        number("Certificate expires", "The next one, of agents and coordinators.",
               f"min({A}_{EXPIRY}{{@}} - time() or {C}_{EXPIRY}{{@}} - time())", SECONDS,
               # An agent's bounds; a coordinator's has an alert.
               falling(watch=6 * 3600, bad=4 * 3600), "no TLS"),
        graph("Devices by state", "As the coordinators know them.",
              by_state=total(f"{C}_devices", by="state")).but(stacked=True),
        graph("Alerts that fire", "Each has a runbook of its name.",
              by_alertname=f"count by (alertname) ({FIRING})"
              ).but(stacked=True, empty="No alert fires"),
        graph("Devices that compute", "Share of the time in ONNX Runtime.", SHARE,
              by_device=BUSY),
        graph("Processors in use", "By each agent, for whatever it does.",
              by_device=rate("process_cpu_seconds_total", "pool, device", 'component="agent"')),
        graph("Round trip to the coordinator", "The shortest of the last ones.", SECONDS,
              by_device=f"{A}_link_round_trip_seconds{{@}}"),
        graph("Speed of links", "Of the last large transfers.", SPEED,
              by_device=f"{A}_link_bytes_per_second{{@}}").but(empty="No large transfer yet"),
        graph("Activations and results", "What agents send, and how much of it coordinators had "
              "to relay to another device.", SPEED,
              sent=rate(f"{A}_sent_bytes_total"), relayed=rate(f"{C}_relayed_bytes_total")),
        graph("Fragments fetched", "From the coordinator or from peers.", SPEED,
              by_source=rate(f"{A}_fetched_bytes_total", "source")).but(stacked=True),
        graph("Free disk of agents", "Where their caches are.", BYTES,
              by_device=f"{A}_disk_free_bytes{{@}}"),
        graph("Volumes of coordinators", "What may be there, what is, and what of that goes where "
              "room is needed.", BYTES,
              size=f"sum({C}_volume_size_bytes{{@}})", used=f"sum({C}_volume_used_bytes{{@}})",
              removable=f"sum({C}_volume_removable_bytes{{@}})"),
        graph("Memory of coordinators", "Resident bytes of the process.", BYTES,
              by_pool='max by (pool) (process_resident_memory_bytes{@,component="coordinator"})'),
        graph("Agents by version", "More than one for long: an upgrade has stopped.",
              by_version=f"count by (version) ({A}_info{{@}})").but(stacked=True),
    ),
)  # fmt: skip
JOBS: Final = Board(
    "jobs",
    "Job pipeline",
    "Jobs, items and tasks: how many, how long, and why some fail.",
    (
        number("Jobs running", "On all chosen pools.", total(f"{C}_jobs")),
        number("Jobs failed", "In the shown time.",
               gained(f"{C}_jobs_ended_total", 'outcome="failed"'), levels=ANY_IS_BAD),
        number("Items failed", "In the shown time.",
               gained(f"{C}_items_ended_total", 'outcome="failed"'), levels=ANY_IS_BAD),
        number("Items per second", "With stored results.",
               rate(f"{C}_items_ended_total", labels='outcome="succeeded"'), "short"),
        number("Items in progress", "Admitted and not ended.", total(f"{C}_active_items")),
        number("Tasks retried", "In the shown time, after failures and losses of devices.",
               gained(f"{C}_task_retries_total"), levels=ANY_IS_NOTED),
        graph("Items that ended", "By outcome.", ITEM_RATE,
              by_outcome=rate(f"{C}_items_ended_total", "outcome")).but(stacked=True),
        graph("Items that failed", "By reason.", ITEM_RATE,
              by_reason=rate(f"{C}_item_failures_total", "reason") + " > 0"
              ).but(stacked=True, failures=True, empty="No item failed"),
        quantiles("Latency of items", "From its first task's start to its stored result.",
                  f"{C}_item_seconds"),
        quantiles("Wait for a device", "Of a task that has all its inputs.",
                  f"{C}_task_wait_seconds"),
        graph("Tasks waiting and running", "Many that wait: the pool is the bottleneck.",
              waiting=total(f"{C}_ready_tasks"), running=total(f"{C}_running_tasks")),
        graph("Tasks by tier", "What the device had to do first: nothing (resident), load from "
              "its disk (cached), load while it held nothing (idle), evict another fragment.",
              TASK_RATE, by_tier=rate(f"{C}_tasks_total", "tier")).but(stacked=True),
        quantiles("Task in the runtime", "As the agents measure it.", f"{A}_task_compute_seconds"),
        quantiles("Task on its device", "From its arrival to its answer.", f"{A}_task_seconds"),
        graph("Duration of jobs", "Mean from submission to end, of those that ended in the half "
              "hour before.", SECONDS, mean=mean(f"{C}_job_seconds", "30m")
              ).but(empty="No job ended in half an hour"),
        graph("Wait of jobs", "Mean from submission to the first task, of those that began in the "
              "half hour before.", SECONDS, mean=mean(f"{C}_job_wait_seconds", "30m")
              ).but(empty="No job began in half an hour"),
        graph("Tasks answered", "By outcome.", TASK_RATE,
              by_outcome=rate(f"{A}_tasks_total", "outcome")).but(stacked=True),
        graph("Bytes in the coordinator", "Inputs not delivered yet, and results that come in.",
              BYTES, inputs=total(f"{C}_input_bytes_in_flight"),
              results=total(f"{C}_result_bytes_in_flight")),
        quantiles("Step of the dispatcher", "Above a millisecond it limits the throughput.",
                  f"{C}_step_seconds").but(limit=0.001),
        graph("Full queues", "Transfers and streams that had to wait.", EVENT_RATE,
              coordinator=rate(f"{C}_full_queues_total"), agents=rate(f"{A}_full_queues_total")),
    ),
)  # fmt: skip
MEMORY: Final = Board(
    "memory",
    "Device memory",
    "What agents use of their budgets, and for what.",
    (
        number("Highest peak", "The largest share of a budget that any device was measured at in "
               "the shown time: runs that were stopped, and loads, included.",
               f"max(max_over_time(({PEAK})[$__range:]))", SHARE, rising(watch=0.95, bad=1.0)),
        number("Runs over budget", "In the shown time.", gained(f"{A}_over_budget_runs_total"),
               levels=ANY_IS_BAD),
        number("Fullest device now", "Its use as a share of its budget.", f"max({USED})", SHARE,
               rising(watch=0.95, bad=1.0)),
        number("Withheld", "From fragments, while memory is short on the machines.",
               total(f"{A}_withheld_bytes"), BYTES, ANY_IS_NOTED),
        number("Fragments resident", "On all devices.", total(f"{A}_resident_fragments")),
        number("Evictions", "In the shown time.", gained(f"{A}_evictions_total")),
        graph("Peak", "Share of the budget, since the agent started.", SHARE,
              by_device=PEAK).but(limit=1.0),
        graph("In use", "Share of the budget, as resident now.", SHARE,
              by_device=USED).but(limit=1.0),
        graph("What budgets are planned for", "Of all devices together; what is left is free.",
              BYTES, fragments=total(f"{A}_fragments_bytes"),
              activations=total(f"{A}_reserved_bytes"), withheld=total(f"{A}_withheld_bytes"),
              agents=total(f"{A}_grown_bytes"),
              free=f"{total(f'{A}_budget_bytes')} - {total(f'{A}_fragments_bytes')} - "
                   f"{total(f'{A}_reserved_bytes')} - {total(f'{A}_withheld_bytes')} - "
                   f"{total(f'{A}_grown_bytes')}"
              ).but(stacked=True),
        graph("Memory granted to fragments", "As a share of what they were loaded for: below 100 "
              "% they gave some to others, and read weights again more often than planned.", SHARE,
              by_device=ratio(total(f"{A}_fragment_granted_bytes", by="pool, device"),
                              total(f"{A}_fragment_wanted_bytes", by="pool, device"))
              ).but(empty="No fragment can run in blocks"),
        quantiles("Time to make a fragment resident", "Fetch, preparation and trial included.",
                  f"{A}_load_seconds").but(empty="No fragment was loaded"),
        graph("Loads and evictions", "Loads by outcome.", EVENT_RATE,
              by_outcome=rate(f"{A}_loads_total", "outcome"), evicted=rate(f"{A}_evictions_total")),
        graph("Activations on disk", "A full device slows down, and does not fail.", BYTES,
              by_device=f"{A}_spilled_bytes{{@}}"),
        graph("Grants changed", "How often memory moves between fragments.", EVENT_RATE,
              changed=rate(f"{A}_grants_total")),
        graph("Cache", "Fragments on disk, as a share of the cache's limit.", SHARE,
              by_device=f"{A}_cached_bytes{{@}} / {A}_cache_limit_bytes{{@}}"),
        graph("Floor", "Resident bytes of the idle agent, beside its budget.", BYTES,
              by_device=f"{A}_floor_bytes{{@}}"),
    ),
)  # fmt: skip
PLANNER: Final = Board(
    "planner",
    "Planner accuracy",
    "What plans predicted against what was measured.",
    (
        number("Above the plan", "Share of the fragments that took more memory than planned, in "
               "the shown time.",
               "1 - " + ratio(gained(f"{MEMORY_RATIO}_bucket", 'le="1.0"'),
                              gained(f"{MEMORY_RATIO}_count")) + " >= 0", SHARE,
               rising(watch=0.001, bad=0.05), "none measured"),
        number("Memory, p99", "Measured as a share of planned: above 100 %, estimates are too low.",
               quantile(0.99, MEMORY_RATIO, "increase", "$__range"), SHARE,
               rising(watch=1.0, bad=1.25), "none measured"),
        number("Memory, median", "Measured as a share of planned: far below 100 %, devices could "
               "hold more.", quantile(0.5, MEMORY_RATIO, "increase", "$__range"), SHARE,
               empty="none measured"),
        number("Fragments measured", "In the shown time.", gained(f"{MEMORY_RATIO}_count")),
        number("Rate, median", "Measured items per second of Placements as a share of the "
               "prediction; of all pools of a cluster.",
               of_all(quantile(0.5, RATE_RATIO, "increase", "$__range")), SHARE,
               empty="none measured"),
        number("Balance", "Busiest device against the mean: 1 is a plan that uses all alike.",
               ratio(f"max({BUSY})", f"avg({BUSY})") + " >= 0", "short", empty="no work"),
        quantiles("Memory of fragments", "Measured as a share of planned, of those loaded in the "
                  "half hour before.", MEMORY_RATIO, SHARE, "30m"
                  ).but(limit=1.0, empty="No fragment was measured"),
        graph("Rate of plans", "Measured as a share of predicted, of jobs that ended in the half "
              "hour before.", SHARE, p50=of_all(quantile(0.5, RATE_RATIO, time="30m")),
              p99=of_all(quantile(0.99, RATE_RATIO, time="30m"))
              ).but(limit=1.0, empty="No Placement was measured"),
        graph("Time of tasks", "Measured as a multiple of predicted. Far above 1: something else "
              "keeps the device busy.", "suffix:x",
              by_device=f"avg by (pool, device) "
                        f"({C}_task_measured_seconds{{@}} / {C}_task_predicted_seconds{{@}})"
              ).but(limit=1.0, logarithmic=True),
        graph("Tasks that found their fragment resident", "As a share of all.", SHARE,
              resident=ratio(rate(f"{C}_tasks_total", labels='tier="resident"'),
                             rate(f"{C}_tasks_total"))),
        graph("Loads that were refused", "A plan that fits has none.", EVENT_RATE,
              by_outcome=rate(f"{A}_loads_total", "outcome", 'outcome!="loaded"')
              ).but(stacked=True, failures=True, empty="None was refused"),
    ),
)  # fmt: skip
OPERATOR: Final = Board(
    "operator",
    "Operator",
    "How the operator follows the cluster.",
    (
        number("Leaders", "One; without any, nobody plans.", total(f"{O}_leader"),
               levels=((None, BAD), (0.5, GOOD), (1.5, BAD))),
        number("Pools unreachable", "Whose coordinators do not answer the leader.",
               of_leader("max", "coordinators", 'state="unreachable"'), levels=ANY_IS_BAD),
        number("Oldest watch", "Renewed every 55 seconds.", f"max({O}_watch_age_seconds{{@}})",
               SECONDS, rising(watch=120, bad=300)),
        number("Queue", "Objects that wait for a worker.", total(f"{O}_queue_depth")),
        number("Event loop lag", "How late the loop was last.",
               f"max({O}_loop_lag_seconds{{@}})", SECONDS, rising(watch=0.5, bad=5)),
        number("Authority expires", "The operator's own, which signs all certificates.",
               f"min({O}_{EXPIRY}{{@}}) - time()", SECONDS,
               falling(watch=60 * DAY_SECONDS, bad=30 * DAY_SECONDS)),
        graph("Jobs that are not complete", "InferenceJobs by status.",
              by_status=of_leader("max by (status)", "jobs", 'status!="Complete"')
              ).but(stacked=True),
        graph("Jobs that ended", "By outcome, also those that never ran.", JOB_RATE,
              by_outcome=rate(f"{O}_jobs_ended_total", "outcome")).but(stacked=True),
        graph("Reconciliations that failed", "They are tried again.", EVENT_RATE,
              by_kind=rate(f"{O}_reconcile_failures_total", "kind")
              ).but(stacked=True, failures=True, empty="None failed"),
        quantiles("Time to reconcile", "One object, with what was done.",
                  f"{O}_reconcile_seconds"),
        quantiles("Wait for a worker", "Of an object in the queue.", f"{O}_queue_wait_seconds"),
        graph("Workers busy", "Reconciling an object.", busy=total(f"{O}_workers_busy")),
        graph("Requests to the API server", "By status; `error`: no answer.", EVENT_RATE,
              by_code=rate(f"{O}_api_requests_total", "code")).but(stacked=True),
        graph("Calls of coordinators", "By status.", EVENT_RATE,
              by_code=rate(f"{O}_coordinator_calls_total", "code")).but(stacked=True),
        graph("Events of watches", "By kind.", EVENT_RATE,
              by_kind=rate(f"{O}_watch_events_total", "kind")).but(stacked=True),
        graph("Objects", "By kind.", by_kind=of_leader("max by (kind)", "objects")),
        graph("Memory", "Resident bytes of the process.", BYTES, by_pod=(
            f"process_resident_memory_bytes{{@}} and on (namespace, pod) {O}_leader")),
    ),
    pools=False,
)  # fmt: skip
BOARDS: Final = (FLEET, JOBS, MEMORY, PLANNER, OPERATOR)
