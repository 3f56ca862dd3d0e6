"""What `shoal bench-device` prints."""

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from shoal_cli.commands.columns import plain_table
from shoal_cli.commands.device_pictures import PEER_NAMES
from shoal_cli.commands.tables import format_seconds, titled
from shoal_cli.local.device_figures import BudgetFigures, DeviceFigures, PeerFigures, Times
from shoal_protocol.units import counted, format_bytes, format_number, format_upwards


def device_tables(figures: DeviceFigures) -> RenderableType:
    """Memory, plan and time of each budget, then the peers."""
    title = f"{figures.model} on one device, {counted(figures.threads, 'thread')}"
    parts: list[RenderableType] = [Text(title, style="bold underline")]
    for table in (_memory(figures.budgets), _plan(figures), _time(figures)):
        parts += [Text(), table]
    if figures.peers:
        parts += [Text(), _peers(figures.peers)]
    return Group(*parts)


def _table(
    title: str,
    budgets: Sequence[BudgetFigures],
    *columns: tuple[str, Callable[[BudgetFigures], str | Text]],
) -> RenderableType:
    table = plain_table(*(Column(name, justify="right", no_wrap=True) for name, _ in columns))
    for each in budgets:
        table.add_row(*(show(each) for _, show in columns))
    return titled(title, table)


def _memory(budgets: Sequence[BudgetFigures]) -> RenderableType:
    def share(each: BudgetFigures) -> Text:
        style = "green" if each.within_budget else "bold red"
        return Text(f"{each.peak_bytes / each.budget_bytes:.0%}", style=style)

    return _table(
        "Memory",
        budgets,
        ("budget", lambda each: format_bytes(each.budget_bytes)),
        ("floor", lambda each: format_bytes(each.floor_bytes)),
        ("peak above it", lambda each: format_bytes(each.peak_bytes)),
        ("of budget", share),
        ("weights kept", lambda each: format_bytes(each.runs.kept_bytes)),
        ("held by", lambda each: each.enforced or "measured only"),
        ("kills", lambda each: str(each.out_of_memory_kills)),
    )


def _plan(figures: DeviceFigures) -> RenderableType:
    least = figures.smallest_budget_bytes

    def blocks(each: BudgetFigures, count: int, whole: str = "-") -> str:
        return str(count) if each.swapping.blocks else whole

    return _table(
        f"Plan; the smallest budget that the model runs in is {format_upwards(least)}",
        figures.budgets,
        ("budget", lambda each: format_bytes(each.budget_bytes)),
        ("granted", lambda each: format_bytes(each.swapping.granted_bytes)),
        ("blocks", lambda each: blocks(each, each.swapping.blocks, "whole")),
        ("kept", lambda each: blocks(each, each.swapping.kept_blocks)),
        ("dropped", lambda each: blocks(each, each.swapping.dropped_blocks)),
        ("read again", lambda each: format_bytes(each.swapping.dropped_bytes)),
        (
            "cold weights",
            lambda each: "prefetched" if each.swapping.prefetches else "read when used",
        ),
    )


def _time(figures: DeviceFigures) -> RenderableType:
    def against(way: str) -> tuple[str, Callable[[BudgetFigures], str]]:
        heading = f"of {PEER_NAMES[way].removeprefix('ONNX Runtime, ')}"
        return heading, lambda each: f"{each.runs.compute.over(each.runs.peers[way]):.2f}x"

    return _table(
        "Time",
        figures.budgets,
        ("budget", lambda each: format_bytes(each.budget_bytes)),
        ("first item", lambda each: format_seconds(each.runs.first_seconds)),
        ("cold", lambda each: format_seconds(each.runs.cold.median)),
        ("warm", lambda each: format_seconds(each.runs.compute.median)),
        ("quartiles", lambda each: _quartiles(each.runs.compute)),
        *(against(peer.way) for peer in figures.peers if not peer.problem),
        ("whole way", lambda each: format_seconds(each.runs.latency.median)),
        ("items/s", lambda each: format_number(each.runs.items_per_second)),
    )


def _peers(peers: tuple[PeerFigures, ...]) -> RenderableType:
    numbers = ("peak above its floor", "load", "first run")
    table = plain_table("", *(Column(each, justify="right") for each in numbers))
    cells: tuple[Callable[[PeerFigures], str], ...] = (
        lambda peer: format_bytes(peer.peak_bytes),
        lambda peer: format_seconds(peer.load_seconds),
        lambda peer: format_seconds(peer.first_seconds),
    )
    for peer in peers:
        if peer.problem:
            table.add_row(PEER_NAMES[peer.way], f"not run: {peer.problem}")
        else:
            table.add_row(PEER_NAMES[peer.way], *(cell(peer) for cell in cells))
    return titled("The whole model", table)


def _quartiles(times: Times) -> str:
    return " - ".join(format_seconds(each) for each in times.quartiles)
