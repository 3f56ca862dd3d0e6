"""What `shoal plan` shows of a plan, or of why there is none: tables, JSON, a picture."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import typer
from rich.console import Group
from rich.text import Text

from shoal_cli.commands.plan_options import Format
from shoal_cli.commands.plan_pictures import Links, charts, link_words
from shoal_cli.commands.tables import explained_table, output
from shoal_cli.drawing.svg import draw
from shoal_cli.local.orders import PlanOrder
from shoal_cli.local.preparation import Prepared
from shoal_planner.budgets import explain_budgets, with_other_budgets
from shoal_planner.devices import PoolDevice
from shoal_planner.explanation import Table, explain, explain_refusal
from shoal_planner.figures import InfeasibleFigures, PlanFigures, figures, infeasible_figures
from shoal_planner.layers import plans as layer_plans
from shoal_planner.layers.graph import LayerGraph, Pool
from shoal_planner.outcome import Infeasible, Plan
from shoal_planner.speeds import devices_table, link_tables
from shoal_protocol.choices import Objective
from shoal_protocol.durable_files import write_named
from shoal_protocol.units import NANOSECONDS_PER_SECOND
from shoal_protocol.visible import visible

T = TypeVar("T")

VERSION: Final = 1
"""Of the JSON: grows when a field goes or changes its meaning."""
_OF_FRAGMENTS: Final = ("index", "flops", "weight_bytes", "least_bytes", "resident_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, or why there is none, under the name of what was planned. `facts` are what else the
    JSON says."""

    name: str
    plan: PlanFigures | None
    refusal: InfeasibleFigures | None
    tables: tuple[Table, ...]
    facts: Mapping[str, object] = field(default_factory=dict)
    links: Links
    devices: tuple[str, ...]

    @property
    def idle(self) -> tuple[str, ...]:
        """Devices that the plan does without."""
        stages = () if self.plan is None else self.plan.stages
        used = {each.device for stage in stages for each in stage.devices}
        return tuple(name for name in self.devices if name not in used)

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "plan": None if self.plan is None else asdict(self.plan),
            "refusal": None if self.refusal is None else asdict(self.refusal),
            **self.facts,
        }


def of_order(name: str, order: PlanOrder, prepared: Prepared, answer: Plan | Infeasible) -> Planned:
    """What was found for a Placement, a job or a bare model."""
    pool, document = order.cut.devices, prepared.document
    others = with_other_budgets(document, pool, order.cut.goal)
    tables = explain(answer, document) if isinstance(answer, Plan) else explain_refusal(answer)
    return Planned(
        name=name,
        plan=figures(answer) if isinstance(answer, Plan) else None,
        refusal=None
        if isinstance(answer, Plan)
        else infeasible_figures(answer, answer.message(order.cut.name, prepared.advice)),
        tables=(devices_table(pool), *link_tables(pool), *tables, explain_budgets(others)),
        facts={
            "devices": [asdict(device) for device in pool],
            "fragments": [
                {name: getattr(each, name) for name in _OF_FRAGMENTS} for each in document.fragments
            ],
            "budgets": asdict(others),
        },
        links=_own_links(pool),
        devices=tuple(device.name for device in pool),
    )


def of_layers(name: str, graph: LayerGraph, pool: Pool, answer: layer_plans.LayerPlan) -> Planned:
    """What was found for a profile."""

    def between(one: str, other: str) -> str:
        link = pool.between(one, other)
        return link_words(link.bytes_per_second, link.latency_seconds)

    names = tuple(layer.name for layer in graph.layers)
    return Planned(
        name=name,
        plan=layer_plans.figures(answer),
        refusal=None,
        tables=layer_plans.explain(answer, names),
        facts={"layers": names},
        links=Links(between=between),
        devices=tuple(device.name for device in pool.devices),
    )


def plan_layers(profile: Path, devices: str | None, objective: Objective, items: int) -> Planned:
    """The plan, its explanation, and what lost against it."""
    from shoal_planner.layers.documents import read_pool, read_profile
    from shoal_planner.layers.planning import plan
    from shoal_planner.layers.plans import Unplaceable

    if devices is None:
        raise typer.BadParameter("--profile needs --devices FILE: the devices and their links")
    graph = _read("--profile", profile, read_profile)
    pool = _read("--devices", Path(devices), read_pool)
    try:
        answer = plan(graph, pool, objective, items)
    except ValueError as unknown:
        raise typer.BadParameter(f"{profile} on {devices}: {unknown}") from None
    if isinstance(answer, Unplaceable):
        raise typer.BadParameter(answer.message(profile.name))
    return of_layers(f"{profile.name} on {devices}, {objective}", graph, pool, answer)


def _read(option: str, file: Path, parse: Callable[[str], T]) -> T:
    try:
        return parse(file.read_text(encoding="utf-8"))
    except OSError as failed:
        raise typer.BadParameter(f"{option} {file}: {failed.strerror}") from None
    except UnicodeDecodeError:
        what = "is no text, but docs/profiles.md says what is read here"
        raise typer.BadParameter(f"{option} {file}: {what}") from None
    except ValueError as wrong:
        raise typer.BadParameter(f"{option} {file}: {wrong}") from None


def _own_links(pool: Sequence[PoolDevice]) -> Links:
    """Each device has a link of its own: between two, the slower one limits, and both delay. Where
    the link between two is known, that is what counts."""
    peers = {(device.name, each.name): each for device in pool for each in device.peers}
    links = {
        each.name: (
            each.link_bytes_per_second,
            each.latency_nanoseconds / NANOSECONDS_PER_SECOND,
        )
        for each in pool
    }

    def between(one: str, other: str) -> str:
        if (peer := peers.get((one, other))) is not None:
            return link_words(
                peer.bytes_per_second, 2 * peer.latency_nanoseconds / NANOSECONDS_PER_SECOND
            )
        (rate, delay), (other_rate, other_delay) = links[one], links[other]
        known = [each for each in (rate, other_rate) if each is not None]
        return link_words(min(known, default=None), delay + other_delay)

    return Links(own={name: link_words(*link) for name, link in links.items()}, between=between)


def show(planned: Sequence[Planned], form: Format, picture: Path | None) -> None:
    """Print what was planned, and draw it."""
    if picture is not None:
        drawn = [
            each
            for found in planned
            if found.plan is not None
            for each in charts(visible(found.name), found.plan, found.links, found.idle)
        ]
        title = visible(f"Plan of {', '.join(each.name for each in planned)}")
        drawing = draw(title, "As predicted: nothing has run.", drawn)
        write_named(picture, drawing.encode())
    if form is Format.JSON:
        plans = [each.to_json() for each in planned]
        typer.echo(json.dumps({"version": VERSION, "plans": plans}, indent=2, allow_nan=False))
        return
    console = output()
    for each in planned:
        heading = Text(each.name, style="bold underline")
        console.print(Group(heading, *map(explained_table, each.tables)))
    if picture is not None:
        console.print(f"\npicture: {picture}", soft_wrap=True, highlight=False)
