"""`shoal plan`."""

import asyncio
from typing import Final

import typer

from shoal_cli.commands import options

EPILOG: Final = (
    "[bold]Example[/bold]\n\n"
    "shoal plan examples/ocr\n\n"
    "Placements and jobs are planned as `shoal run` would; nothing runs. Times are predictions."
)


def plan(
    files: options.PlanFiles,
    volume: options.Volumes = None,
    work: options.PlanWork = None,
) -> None:
    """Print which devices would serve which fragments, and why the alternatives lost."""
    from rich.console import Console

    from shoal_cli.commands.progress import choose_progress
    from shoal_cli.commands.tables import output, plan_table
    from shoal_cli.local import remote
    from shoal_cli.local.orders import read_orders
    from shoal_cli.local.runner import plan_on_pool, prepare_all
    from shoal_cli.local.workspace import default_work_folder, open_workspace

    volumes = options.parse_volumes(volume)
    folder = work or default_work_folder(files[0].resolve().stem or "stdin", files)
    downloaded = asyncio.run(remote.download(options.load_files(files), folder, options.note))
    orders = read_orders(downloaded.manifests, volumes)
    wanted = [(f"Placement {name}", order) for name, order in orders.placements]
    wanted += [(f"InferenceJob {order.name}", order.plan) for order in orders.jobs]
    if not wanted:
        raise typer.BadParameter("nothing to plan: there is no Placement and no InferenceJob")
    console = output()
    observer = choose_progress("auto", Console(stderr=True))
    with open_workspace(folder) as workspace:
        try:
            cuts = [order.cut for _, order in wanted]
            prepared = asyncio.run(prepare_all(cuts, workspace, observer))
        finally:
            observer.ended()
        for name, order in wanted:
            cut = prepared[order.cut.name]
            console.print(plan_table(name, plan_on_pool(order, cut), cut.document))
