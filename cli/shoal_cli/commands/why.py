"""`shoal why`."""

import asyncio
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

import typer

from shoal_cli.commands import targets

if TYPE_CHECKING:
    from shoal_cli.live.reasons import Why

EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "Of the active run here:  shoal why ocr\n\n"
    "Of an InferenceJob of the cluster:  shoal why ocr --namespace reading"
)


def why(
    job: targets.Job,
    target: targets.Target,
    output: targets.Output = "text",
) -> None:
    """Say why a job does not start, is as slow as it is, or has failed.

    First the reason that matters most. Then what else is not well, for each stage without a device
    what each device lacks (need and have), why the plan is as it is, and where the time of the
    slowest items went.
    """
    from shoal_cli.commands.live_tables import explanation
    from shoal_cli.commands.tables import output as standard_output

    reasons = asyncio.run(_reasons(target, job))
    if output == "json":
        typer.echo(json.dumps(asdict(reasons)))
    else:
        standard_output().print(explanation(reasons))


async def _reasons(target: targets.Target, name: str) -> "Why":
    from shoal_cli.live.cluster import ClusterRefused, find_job
    from shoal_cli.live.reasons import on_cluster
    from shoal_cli.transfer.joined import CoordinatorAway

    if (kubectl := target.kubectl) is None:
        return await _ask(target, name)
    job = find_job(kubectl, name)
    asked = None
    if (pool := target.pool or job.pool) is not None:
        try:
            asked = await _ask(replace(target, pool=pool), name)
        except targets.Unknown:
            pass  # it was not submitted yet, or has ended: the job itself says that
        except (ClusterRefused, CoordinatorAway) as error:
            problems = (*job.problems, f"its coordinator was not asked: {error}")
            job = replace(job, problems=problems)
    return on_cluster(name, job, asked)


async def _ask(target: targets.Target, name: str) -> "Why":
    """What the coordinator says. Raises `Unknown` where it does not have the job."""
    from shoal_cli.live.reasons import why
    from shoal_cli.live.view import view_of

    async with targets.watching(target) as (_, client):
        there = await targets.name_there(client, target, name)
        view = view_of(await targets.overview(client, there))
    return why(view.jobs[0], view)
