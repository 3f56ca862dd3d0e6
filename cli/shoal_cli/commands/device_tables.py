"""What `shoal bench-device` prints."""

from collections.abc import Callable
from functools import partial

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from shoal_cli.commands.columns import plain_table
from shoal_cli.commands.device_pictures import PEER_NAMES
from shoal_cli.commands.tables import format_seconds, titled
from shoal_cli.local.device_figures import BudgetFigures, DeviceFigures, PeerFigures, Times
from shoal_protocol.units import counted, format_bytes, format_number, format_upwards


def device_tables(figures: DeviceFigures) -> RenderableType:
    """Memory, plan and time of each budget, then the peers."""
    title = f"{figures.model} on one device, {counted(figures.threads, 'thread')}"
    tables = (_memory, _plan, partial(_time, figures))
    parts: list[RenderableType] = [Text(title, style="bold underline")]
    for make in tables:
        parts += [Text(), make(figures.budgets)]
    if figures.peers:
        parts += [Text(), _peers(figures.peers)]
    return Group(*parts)


def _table(title: str, *columns: str) -> tuple[Table, RenderableType]:
    table = plain_table(*(Column(each, justify="right", no_wrap=True) for each in columns))
    return table, titled(title, table)


def _memory(budgets: tuple[BudgetFigures, ...]) -> RenderableType:
    names = ("budget", "floor", "peak above it", "of budget", "weights kept", "held by", "kills")
    table, shown = _table("Memory", *names)
    for each in budgets:
        share = each.peak_bytes / each.budget_bytes
        table.add_row(
            format_bytes(each.budget_bytes),
            format_bytes(each.floor_bytes),
            format_bytes(each.peak_bytes),
            Text(f"{share:.0%}", style="green" if each.within_budget else "bold red"),
            format_bytes(each.runs.kept_bytes),
            each.enforced or "measured only",
            str(each.out_of_memory_kills),
        )
    return shown


def _plan(budgets: tuple[BudgetFigures, ...]) -> RenderableType:
    least = budgets[0].swapping.least_bytes
    title = f"Plan; the smallest budget that the model runs in is {format_upwards(least)}"
    names = ("budget", "granted", "blocks", "kept", "dropped", "read again", "cold weights")
    table, shown = _table(title, *names)
    for each in budgets:
        swapping = each.swapping
        in_blocks = bool(swapping.blocks)
        table.add_row(
            format_bytes(each.budget_bytes),
            format_bytes(swapping.granted_bytes),
            str(swapping.blocks) if in_blocks else "whole",
            str(swapping.kept_blocks) if in_blocks else "-",
            str(swapping.dropped_blocks) if in_blocks else "-",
            format_bytes(swapping.dropped_bytes),
            "prefetched" if swapping.prefetches else "read when used",
        )
    return shown


def _time(figures: DeviceFigures, budgets: tuple[BudgetFigures, ...]) -> RenderableType:
    ways = [peer.way for peer in figures.peers if not peer.problem]
    names = ("budget", "first item", "cold", "warm", "quartiles")
    against = tuple(f"of {PEER_NAMES[way].removeprefix('ONNX Runtime, ')}" for way in ways)
    table, shown = _table("Time", *names, *against, "whole way", "items/s")
    for each in budgets:
        runs = each.runs
        table.add_row(
            format_bytes(each.budget_bytes),
            format_seconds(runs.first_seconds),
            format_seconds(runs.cold.median),
            format_seconds(runs.compute.median),
            _quartiles(runs.compute),
            *(f"{runs.compute.over(runs.peers[way]):.2f}x" for way in ways),
            format_seconds(runs.latency.median),
            format_number(runs.items_per_second),
        )
    return shown


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
