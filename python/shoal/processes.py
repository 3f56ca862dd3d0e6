"""A pool's processes on this machine: the coordinator and the agents, started once.

They are those of `shoal run`, under the same supervisor: one that ends is started again, and all
end with this process, however it ends.
"""

import asyncio
import contextlib
import itertools
import logging
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from shoal.errors import PoolFailed
from shoal.loading import integer
from shoal.running import Running
from shoal_cli.local.cgroups import Enforce, RunGroups, Unavailable, open_groups, run_name
from shoal_cli.local.manifests import ManifestErrors
from shoal_cli.local.orders import bare_pool, planned_devices
from shoal_cli.local.pool import AgentsMissing, PoolRun, RunOptions
from shoal_cli.local.sizes import MOST_DEVICES, budget_problem, size_in
from shoal_cli.local.speeds import machine_speed
from shoal_cli.local.supervisor import Death, ProcessHopeless, Supervisor
from shoal_cli.local.workspace import (
    WorkFolderUnusable,
    Workspace,
    WorkspaceBusy,
    default_work_folder,
    open_workspace,
)
from shoal_protocol.channels import open_channel
from shoal_protocol.digests import Digest
from shoal_protocol.threads import in_thread

logger = logging.getLogger(__name__)

_numbers: Final = itertools.count()
"""Several pools of one process have different names."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a pool is made of. `budgets` are the devices', in bytes. `work` outlives it; None: a
    folder that is removed with it."""

    budgets: tuple[int, ...]
    enforce: Enforce
    work: Path | None


def settings(
    devices: int | None, budget: str | int | Sequence[str | int], enforce: str, work: Path | None
) -> Settings:
    """Check the arguments of `pool`. Raises `ValueError`."""
    number = integer(devices)
    if devices is not None and number is None:
        raise ValueError(f"devices={devices!r} is no number of devices")
    if work is not None and work.exists() and not work.is_dir():
        raise ValueError(f"work={str(work)!r} is no folder")
    alone = isinstance(budget, str) or integer(budget) is not None
    texts = [budget] if alone else budget
    if not isinstance(texts, Sequence):
        raise ValueError(f"budget={budget!r} is no size such as '64Mi', and no list of them")
    if not texts:
        raise ValueError("no budgets; give one for each device, or one for all")
    sizes = [_budget_bytes(text) for text in texts]
    count = (3 if len(sizes) == 1 else len(sizes)) if number is None else number
    if not 1 <= count <= MOST_DEVICES:
        raise ValueError(f"{count} devices; one machine pretends to be 1 to {MOST_DEVICES}")
    if len(sizes) not in (1, count):
        raise ValueError(f"{count} devices, but {len(texts)} budgets; give one for each, or one")
    sizes *= count // len(sizes)
    if enforce not in list(Enforce):
        raise ValueError(f"enforce={enforce!r} is none of {', '.join(Enforce)}")
    return Settings(tuple(sizes), Enforce(enforce), work)


def _budget_bytes(budget: object) -> int:
    """Raises `ValueError`."""
    number = None if isinstance(budget, bool) else integer(budget)
    if not isinstance(budget, str) and number is None:
        raise ValueError(f"budget={budget!r} is no size such as '64Mi'")
    text = budget if isinstance(budget, str) else str(number)
    size = size_in(text)
    if problem := budget_problem(text, size):
        raise ValueError(f"budget={budget!r}: {problem}")
    return size


@contextlib.asynccontextmanager
async def running(chosen: Settings) -> AsyncIterator[Running]:
    """A pool whose devices are ready; its processes are gone afterwards. Raises `PoolFailed`."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            pool = bare_pool(chosen.budgets)
            speed = await in_thread(machine_speed)  # before anything else runs
            place = stack.enter_context(workspace(chosen.work))
            if text := place.in_memory_note("work="):
                logger.warning("%s", text)
            groups = await asyncio.to_thread(_open_groups, chosen.enforce, place)
            if groups is not None:
                stack.callback(groups.remove)
            supervisor = Supervisor(_note_death)
            options = RunOptions(enforce=chosen.enforce)
            run = PoolRun(
                pool=pool,
                workspace=place,
                supervisor=supervisor,
                groups=groups,
                options=options,
            )
            stack.push_async_callback(run.close)
            stack.push_async_callback(supervisor.stop)
            agents = [run.label(device.name) for device in run.devices]
            stack.push_async_callback(supervisor.stop, agents)
            await _start(run, supervisor)
            _check_limits(run)
        except (ManifestErrors, WorkspaceBusy, AgentsMissing, ProcessHopeless, OSError) as error:
            raise PoolFailed(str(error)) from error

        async def failed() -> None:
            try:
                await supervisor.wait_for_failure()
            except ProcessHopeless as error:
                raise PoolFailed(str(error)) from error

        yield Running(
            devices=planned_devices(pool, speed),
            store=place.store,
            target=run.target,
            open_channel=partial(open_channel, run.target),
            deliver=_deliver_nothing,
            failed=failed,
        )


async def _deliver_nothing(digests: Sequence[Digest]) -> None:
    """The coordinator reads the store that models are cut into."""


async def _start(run: PoolRun, supervisor: Supervisor) -> None:
    """Until every agent has its session; raises what prevents it."""
    await run.start()
    ready = asyncio.create_task(run.wait_for_sessions(logger.warning))
    failed = asyncio.create_task(supervisor.wait_for_failure())
    try:
        done, _ = await asyncio.wait({ready, failed}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        ready.cancel()
        failed.cancel()
        await asyncio.gather(ready, failed, return_exceptions=True)


def _check_limits(run: PoolRun) -> None:
    missing = [device.name for device in run.devices if device.name not in run.limits]
    if run.options.enforce is Enforce.CGROUP and missing:
        raise PoolFailed(f"no limit could be set for {', '.join(missing)}", device=missing[0])


@contextlib.contextmanager
def workspace(work: Path | None) -> Iterator[Workspace]:
    """A folder for a pool; without `work`, one that is removed with it. Raises `WorkspaceBusy`,
    `PoolFailed` where it cannot be written, and `OSError`."""
    run = run_name(next(_numbers))
    root = work or default_work_folder("python", [Path(run)])
    try:
        with contextlib.ExitStack() as stack:
            try:
                opened = stack.enter_context(open_workspace(root, run))
            except WorkFolderUnusable as error:
                what = f"work={str(work)!r} cannot be used: {error.reason}"
                if work is None:
                    what = f"{error.path}: {error.reason}; name another folder with work="
                raise PoolFailed(what) from error
            yield opened
    finally:
        if work is None:
            shutil.rmtree(root, ignore_errors=True)


def _open_groups(enforce: Enforce, place: Workspace) -> RunGroups | None:
    """What holds the budgets; None where the machine has nothing, and that will do."""
    if enforce is Enforce.NONE:
        return None
    groups = open_groups(place.run)
    if not isinstance(groups, Unavailable):
        return groups
    if enforce is Enforce.CGROUP:
        raise PoolFailed(
            f"budgets cannot be enforced here: {groups.reason}; "
            "run as a user who may make cgroups, or with enforce='auto' to measure only"
        )
    return None


def _note_death(death: Death) -> None:
    logger.warning("%s %s; starting it again", death.title, death.cause)
