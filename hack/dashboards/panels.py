"""What a dashboard is made of, and the JSON that Grafana reads.

In a query `@` stands for the chosen namespaces and pools. A label that a series does not have
matches, so that the same boards serve a run on one machine.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, Self, TypeAlias

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    GraphDrawStyle,
    GraphTresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    ScaleDistribution,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DashboardSpecialValueMapOptions,
    DataSourceRef,
    DynamicConfigValue,
    FieldColorModeId,
    SpecialValueMap,
    SpecialValueMatch,
    Threshold,
    ThresholdsMode,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
ALL: Final = VariableOption(text=["All"], value=["$__all"])
BYTES, SECONDS, SHARE, SPEED = "bytes", "s", "percentunit", "Bps"
COUNT: Final = "locale"  # whole numbers in full: 1,787, not 1.79 K
Levels: TypeAlias = tuple[tuple[float | None, str], ...]
"""A colour from each value upwards; `None`: from below."""

PLAIN: Final[Levels] = ((None, "text"),)
GOOD, WATCH, BAD = "green", "orange", "red"
MEANINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "{{state}}": {"Ready": GOOD, "Draining": "blue", "Silent": WATCH, "Lost": BAD},
    "{{outcome}}": {
        **dict.fromkeys(("succeeded", "complete", "executed", "loaded"), GOOD),
        **dict.fromkeys(("cancelled", "refused"), WATCH),
        "failed": BAD,
    },
    "{{status}}": {
        **{"Pending": WATCH, "Planned": "yellow", "Running": GOOD, "Completing": "blue"},
        **{"Suspended": "purple", "Failed": BAD},
    },
    "{{tier}}": {"resident": GOOD, "cached": "blue", "idle": "purple", "evict": WATCH},
    "activations": {"activations": "blue"},
    "withheld": {"withheld": WATCH},
    "free": {"free": "#555555"},
}
"""Colours by legend and name, where the name says what is good; others follow the palette."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """One number, as it is now. `empty` is shown in place of "No data"."""

    title: str
    text: str
    query: str
    unit: str
    levels: Levels
    empty: str | None


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Lines over time; `queries` by legend. `stacked`: they are parts of a whole. `failures`: all
    of them are bad. `limit` is drawn as a line. `logarithmic`: half is as far from 1 as twice."""

    title: str
    text: str
    unit: str
    queries: Mapping[str, str]
    stacked: bool = False
    failures: bool = False
    limit: float | None = None
    logarithmic: bool = False
    empty: str | None = None

    def but(self, **changes: bool | float | str) -> Self:
        """The same, drawn differently."""
        return replace(self, **changes)  # type: ignore[arg-type]  # each is a field's


Panel: TypeAlias = Number | Graph


@dataclass(frozen=True)
class Board:
    """A dashboard of 24 columns: numbers are 4 wide, graphs 12."""

    name: str
    title: str
    text: str
    panels: tuple[Panel, ...]
    pools: bool = True


# ---- panels --------------------------------------------------------------------------------------


def number(
    title: str,
    text: str,
    query: str,
    unit: str = COUNT,
    levels: Levels = PLAIN,
    empty: str | None = None,
) -> Number:
    return Number(title=title, text=text, query=query, unit=unit, levels=levels, empty=empty)


def graph(title: str, text: str, unit: str = "short", **queries: str) -> Graph:
    """A graph over time. A legend `by_LABEL` is that label's value."""
    legends = {re.sub(r"^by_(\w+)$", r"{{\1}}", key): query for key, query in queries.items()}
    return Graph(title=title, text=text, unit=unit, queries=legends)


def quantiles(
    title: str, text: str, metric: str, unit: str = SECONDS, time: str = "$__rate_interval"
) -> Graph:
    """Median and 99th percentile of a histogram."""
    p50, p99 = (quantile(fraction, metric, time=time) for fraction in (0.5, 0.99))
    return graph(title, text, unit, p50=p50, p99=p99)


def rising(watch: float, bad: float) -> Levels:
    """The higher the worse."""
    return (None, GOOD), (watch, WATCH), (bad, BAD)


def falling(watch: float, bad: float) -> Levels:
    """The lower the worse."""
    return (None, BAD), (bad, WATCH), (watch, GOOD)


# `increase` extrapolates: one event is now and then 0.98.
ANY_IS_BAD: Final[Levels] = ((None, GOOD), (0.5, BAD))
ANY_IS_NOTED: Final[Levels] = ((None, GOOD), (0.5, WATCH))


# ---- queries -------------------------------------------------------------------------------------


def quantile(
    fraction: float, metric: str, change: str = "rate", time: str = "$__rate_interval"
) -> str:
    """Nothing, not NaN, where nothing was observed."""
    counts = f"sum by (le) ({change}({metric}_bucket{{@}}[{time}]))"
    return f"histogram_quantile({fraction}, {counts}) >= 0"


def mean(metric: str, time: str) -> str:
    """Of a histogram's few observations, whose quantiles would be the bounds of its buckets."""
    gains = (f"sum(increase({metric}_{part}{{@}}[{time}]))" for part in ("sum", "count"))
    return f"{ratio(*gains)} >= 0"


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


# ---- JSON ----------------------------------------------------------------------------------------


def as_json(board: Board) -> str:
    others = dashboard.DashboardLink("Shoal").type(DashboardLinkType.DASHBOARDS).tags(["shoal"])
    made = (
        dashboard.Dashboard(f"Shoal / {board.title}")
        .uid(f"shoal-{board.name}")
        .description(board.text)
        .tags(["shoal"])
        .link(others.include_vars(True).keep_time(True))
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
    made: stat.Panel | timeseries.Panel
    match panel:
        case Number():
            queries, instant = {"": panel.query}, True
            made = as_number(panel)
        case Graph():
            queries, instant = dict(panel.queries), False
            made = as_graph(panel)
    made = made.title(panel.title).description(panel.text).unit(panel.unit).datasource(SOURCE)
    for letter, (legend, query) in zip("ABCDEF", queries.items(), strict=False):
        target = prometheus.Dataquery().expr(chosen(query, board)).ref_id(letter)
        target = target.instant() if instant else target.range()
        made.with_target(target.legend_format(legend or panel.title))
    return made


def chosen(query: str, board: Board) -> str:
    """The query with its selectors."""
    labels = ("namespace", "pool") if board.pools else ("namespace",)
    return query.replace("@", ",".join(f'{label}=~"${label}"' for label in labels))


def as_number(panel: Number) -> stat.Panel:
    """The value at the end of the shown time: what has vanished since is not shown."""
    reduced = common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
    made = stat.Panel().height(4).span(4).reduce_options(reduced).thresholds(steps(panel.levels))
    made = made.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
    made = made.graph_mode(BigValueGraphMode.NONE)
    if panel.empty is not None:  # with a colour: what is absent has that of the lowest level
        nothing = DashboardSpecialValueMapOptions(
            match=SpecialValueMatch.NULL, result=ValueMappingResult(text=panel.empty, color="text")
        )
        made.mappings([SpecialValueMap(nothing)])
    return made.decimals(0) if panel.unit == COUNT else made


def as_graph(panel: Graph) -> timeseries.Panel:
    names = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST)
    names = names.placement(LegendPlacement.BOTTOM).show_legend(True)
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    palette = dashboard.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC)
    if panel.failures:
        palette = palette.mode(FieldColorModeId.SHADES).fixed_color(BAD)
    made = (
        timeseries.Panel()
        .height(8)
        .span(12)
        .draw_style(GraphDrawStyle.LINE)
        .line_width(0 if panel.stacked else 1)  # else parts of size 0 outline the whole
        .fill_opacity(70 if panel.stacked else 0)
        .show_points(VisibilityMode.NEVER)
        .color_scheme(palette)
        .legend(names)
        .tooltip(tooltip)
    )
    if panel.stacked:
        made.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    if panel.logarithmic:
        scale = common.ScaleDistributionConfig().type(ScaleDistribution.LOG)
        made.scale_distribution(scale.log(2))
    else:
        made.min(0)
    if panel.limit is not None:
        style = common.GraphThresholdsStyleConfig().mode(GraphTresholdsStyleMode.DASHED)
        made.thresholds(steps(((None, "transparent"), (panel.limit, BAD)))).thresholds_style(style)
        made.axis_soft_max(panel.limit)
    if panel.empty is not None:
        made.no_value(panel.empty)
    for legend in panel.queries:
        for name, colour in MEANINGS.get(legend, {}).items():
            made.override_by_name(name, [coloured(colour)])
    return made


def steps(levels: Levels) -> dashboard.ThresholdsConfig:
    found = [Threshold(value=value, color=colour) for value, colour in levels]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(found)


def coloured(colour: str) -> DynamicConfigValue:
    value = {"mode": FieldColorModeId.FIXED.value, "fixedColor": colour}
    return DynamicConfigValue("color", value)
