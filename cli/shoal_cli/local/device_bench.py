"""`shoal bench-device`: one model on one device of a budget, by the processes that a run starts.

The model is cut into one fragment with its blocks, and again for budgets in which only smaller
parts of its layers run. For each budget, a coordinator and one
agent run as for `shoal run MODEL --devices 1`, with an empty cache, and take four kinds of jobs:

1. one item: the fragment is fetched, prepared, opened, and runs for the first time;
2. as many items in a row as there are turns: throughput. Up to here memory is sampled;
3. in each turn one item, and one run of each peer, in the other order in every other turn;
4. one item after what is cached of the weights has left the page cache, a few times.
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

import numpy as np

from shoal_cli.local.cgroups import Enforce, RunGroups, groups_as_wanted
from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.device_figures import (
    BudgetFigures,
    DeviceFailed,
    DeviceFigures,
    ModelTooSlow,
    PeerFigures,
    Runs,
    Swapping,
    Times,
    Traced,
)
from shoal_cli.local.made_items import Array
from shoal_cli.local.observer import Observer
from shoal_cli.local.orders import JobOrder, bare_manifests, read_orders
from shoal_cli.local.peers import Peer, PeerFailed, PeerRequest, running_peer
from shoal_cli.local.planned_jobs import PlannedJob, folder_address
from shoal_cli.local.planning import plan_on_pool
from shoal_cli.local.pool import PoolRun, RunOptions
from shoal_cli.local.preparation import Prepared, prepare
from shoal_cli.local.resident import ResidencySampler, mapped_bytes
from shoal_cli.local.supervisor import Supervisor
from shoal_cli.local.workspace import Workspace
from shoal_planner.costs import Costs, Span
from shoal_protocol.channels import open_channel
from shoal_protocol.choices import Mode, Policy, Residency
from shoal_protocol.coordinator_client import ENDED, CoordinatorClient
from shoal_protocol.copying import copied
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.manifest import MODEL
from shoal_protocol.partition import Fragment
from shoal_protocol.units import format_bytes, format_number
from shoal_protocol.v1 import coordinator_pb2 as pb

COLD_TURNS: Final = 3
WAYS: Final = ("default", "mapped")
_WATCH_SECONDS: Final = 300.0
_WATCH_INTERVAL_SECONDS: Final = 0.02
_CUT_BYTES: Final = 64 << 20
"""Of the device that the model is cut for: into one fragment, where that runs in the budget."""
_SMALLEST_BYTES: Final = 1 << 20
"""Of any device."""


class Needs(NamedTuple):
    """The smallest budgets in which the model runs, while other items wait, and in which it is
    resident: what these take on their way is part of that one."""

    least_bytes: int
    resident_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOrder:
    """A model and one item for it. `budgets` chooses from what the model needs; `threads` and
    `task_seconds` as of `RunOptions`. With `peers`, ONNX Runtime runs the whole model besides."""

    model: Path
    item: Mapping[str, Array]
    budgets: Callable[[Needs], Sequence[int]]
    turns: int
    threads: int
    task_seconds: float
    enforce: Enforce = Enforce.AUTO
    peers: bool = True


async def bench_device(
    order: BenchOrder, workspace: Workspace, observer: Observer
) -> DeviceFigures:
    """Measure. Raises `NoPlan` for a budget in which the model cannot run, `DeviceFailed`,
    `ModelTooSlow`, and what cutting and starting raise."""
    if text := workspace.in_memory_note():
        observer.note(text)
    items = _Items(workspace.root / "items", order)
    observer.phase(f"checking and cutting {order.model.name}")
    usual = await _cut(_job(order, items, _CUT_BYTES).plan.cut, workspace)
    (fragment,) = usual.document.fragments
    coarse, jobs = _needs(usual), []
    least = await _least_bytes(order, items, workspace, coarse.least_bytes)
    needs = coarse._replace(least_bytes=least)
    for budget in order.budgets(needs):
        job, prepared = _job(order, items, budget), usual
        if least <= budget < coarse.least_bytes:
            prepared = await _cut(job.plan.cut, workspace)
        elif budget < least < coarse.least_bytes:  # refused, by what it needs in the best cut
            prepared = await _cut(_job(order, items, least).plan.cut, workspace)
        jobs.append(PlannedJob(order=job, prepared=prepared, plan=plan_on_pool(job.plan, prepared)))
    opened = groups_as_wanted(order.enforce, workspace.run)
    groups = opened if isinstance(opened, RunGroups) else None
    try:
        running = _peers(order, items, workspace, fragment, observer)
        async with running as (peers, problems):
            measured = [
                await _Device(order, workspace, observer, items, groups, peers, job).measure()
                for job in jobs
            ]
    finally:
        if groups is not None:
            groups.remove()
    return DeviceFigures(
        model=order.model.name,
        digest=prepared.document.model_digest,
        threads=order.threads,
        turns=order.turns,
        smallest_budget_bytes=needs.least_bytes,
        budgets=tuple(measured),
        peers=(*map(_peer_figures, peers, peers.values()), *problems),
    )


class _Items:
    """Folders of inputs: of one item, and of as many as there are turns."""

    def __init__(self, root: Path, order: BenchOrder) -> None:
        shutil.rmtree(root, ignore_errors=True)
        self.root = root
        self.one, self.many = root / "one", root / "many"
        self.one.mkdir(parents=True)
        self.many.mkdir()
        self.item = self.one / "item.npz"
        # NumPy's stubs take any keyword for the flag that allows pickles.
        np.savez(self.item, **dict(order.item))  # type: ignore[arg-type]
        for number in range(order.turns):
            os.link(self.item, self.many / f"{number:05}.npz")


def _job(order: BenchOrder, items: _Items, budget_bytes: int) -> JobOrder:
    manifests = bare_manifests(
        order.model,
        inputs=items.one,
        outputs=items.root / "out",
        budgets=[budget_bytes],
        fragments=1,
        residency=Residency.ADAPTIVE,
        policy=Policy.MABAC,
        mode=Mode.STREAMING,
    )
    (job,) = read_orders(manifests, {}).jobs
    return job


async def _cut(order: CutOrder, workspace: Workspace, *, fragments: bool = True) -> Prepared:
    made = await prepare(order, workspace.store, lambda done, total: None, fragments=fragments)
    # It is one fragment here: what it takes by itself is measured.
    return replace(made, advice="raise the budget, or let shoal run cut it finer")


async def _least_bytes(order: BenchOrder, items: _Items, workspace: Workspace, needed: int) -> int:
    """The smallest budget with layers in smaller parts than those with which it is `needed`. The
    smallest parts may need more: each is a node."""
    while needed > _SMALLEST_BYTES:
        cut = _job(order, items, needed - 1).plan.cut
        cut = replace(cut, name=f"{cut.name}-finer")
        less = _needs(await _cut(cut, workspace, fragments=False)).least_bytes
        if less >= needed:
            break
        needed = less
    return needed


def _needs(prepared: Prepared) -> Needs:
    costs, span = Costs(prepared.document), Span(0, 1)
    least = costs.least_in_turn(span, waiting=True)
    return Needs(least, costs.resident(span))


@contextlib.asynccontextmanager
async def _peers(
    order: BenchOrder, items: _Items, workspace: Workspace, fragment: Fragment, observer: Observer
) -> AsyncIterator[tuple[dict[str, Peer], list[PeerFigures]]]:
    """The peers that run, and those that do not, with why. What is mapped is the fragment: the
    whole model, with its weights in a file of their own. Raises `ModelTooSlow`."""
    longest = f"{format_number(order.task_seconds)} s"
    models = {
        "default": order.model,
        "mapped": FragmentStore(workspace.store).folder(fragment.digest) / MODEL,
    }
    peers: dict[str, Peer] = {}
    problems = []
    async with contextlib.AsyncExitStack() as running:
        for way in WAYS if order.peers else ():
            request = PeerRequest(
                model=models[way], item=items.item, way=way, threads=order.threads
            )
            observer.phase(f"running the whole model in ONNX Runtime ({way}), {longest} at most")
            try:
                async with asyncio.timeout(order.task_seconds):
                    peers[way] = await running.enter_async_context(running_peer(request))
            except TimeoutError:
                raise ModelTooSlow(
                    f"ONNX Runtime ({way}) has not run {order.model.name} once within {longest}; "
                    "allow more with --task-seconds, or give an item with which it ends (--inputs)"
                ) from None
            except PeerFailed as failure:
                problems.append(PeerFigures(way=way, problem=str(failure)))
        yield peers, problems


def _peer_figures(way: str, peer: Peer) -> PeerFigures:
    return copied(PeerFigures, peer.loaded, way=way, problem="", peak_bytes=peer.peak_bytes)


class _Device:
    """The device of one budget, from its start to its end."""

    def __init__(  # noqa: PLR0913, PLR0917 - what one measurement is made of
        self,
        order: BenchOrder,
        workspace: Workspace,
        observer: Observer,
        items: _Items,
        groups: RunGroups | None,
        peers: Mapping[str, Peer],
        job: PlannedJob,
    ) -> None:
        (device,) = job.order.plan.cut.devices
        self._order, self._observer, self._items = order, observer, items
        self._peers, self._job, self._budget = peers, job, device.budget_bytes
        self._what = f"a device of {format_bytes(device.budget_bytes)}"
        self._supervisor = Supervisor(lambda death: observer.note(f"{death.title} {death.cause}"))
        self._pool = PoolRun(
            pool=job.order.plan.pool,
            workspace=workspace,
            supervisor=self._supervisor,
            groups=groups,
            options=RunOptions(
                enforce=order.enforce, threads=order.threads, task_seconds=order.task_seconds
            ),
            prefix=f"{device.budget_bytes}.",  # so that no budget finds what another has left
        )
        self._groups = groups
        self._label = self._pool.label(device.name)
        self._cache = workspace.cache(self._label).resolve()
        self._client = CoordinatorClient(open_channel(self._pool.target), wait=True)
        self._sampler = ResidencySampler(lambda: self._supervisor.process_id(self._label))
        self._jobs = 0

    async def measure(self) -> BudgetFigures:
        self._observer.phase(f"starting {self._what}")
        shutil.rmtree(self._cache, ignore_errors=True)
        try:
            async with asyncio.TaskGroup() as group:
                failure = group.create_task(self._supervisor.wait_for_failure())
                await self._pool.start()
                await self._pool.wait_for_sessions(self._observer.note)
                runs = await self._run_jobs()
                failure.cancel()
            await self._supervisor.stop([self._label])  # the agent sends its last readings
            await self._pool.watch.last_poll()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            await self._supervisor.stop()
            await self._client.close()
            await self._pool.close()
            shutil.rmtree(self._cache, ignore_errors=True)
        (report,) = self._pool.device_reports()
        return copied(
            BudgetFigures,
            report,
            peak_bytes=report.peak_bytes_above_floor,
            swapping=self._swapping(),
            enforced=self._enforced(),
            runs=runs,
        )

    async def _run_jobs(self) -> Runs:
        floor = self._sampler.sample()
        if floor is None:
            raise DeviceFailed(f"{self._what} ended as soon as it had begun")
        with self._sampler.sampling():
            self._observer.phase(f"running the first items on {self._what}")
            begun = monotonic()
            await self._submit(self._items.one)
            items_begun = monotonic()
            many = await self._submit(self._items.many)
            items_ended = monotonic()
        process = self._supervisor.process_id(self._label)
        kept_bytes = 0 if process is None else mapped_bytes(process, self._cache)
        compute, latency, peers = await self._take_turns()
        cold = [_compute(await self._cold()) for _ in range(COLD_TURNS)]
        return Runs(
            first_seconds=items_begun - begun,
            kept_bytes=kept_bytes,
            items_per_second=many.items / many.seconds if many.seconds else 0.0,
            compute=compute,
            latency=latency,
            cold=Times(tuple(cold)),
            peers=peers,
            traced=Traced(
                samples=tuple(self._sampler.samples),
                begun=begun,
                items_begun=items_begun,
                items_ended=items_ended,
                floor=floor,
            ),
        )

    async def _take_turns(self) -> tuple[Times, Times, dict[str, Times]]:
        compute, latency = [], []
        seconds: dict[str, list[float]] = {way: [] for way in self._peers}
        for turn in range(self._order.turns):
            self._observer.measuring(self._what, turn, self._order.turns)
            ways = ["", *self._peers]
            for way in ways if turn % 2 else reversed(ways):
                if way:
                    seconds[way].append(await self._peers[way].run())
                    continue
                status = await self._submit(self._items.one)
                compute.append(_compute(status))
                latency.append(status.latency.maximum_seconds)
        peers = {way: Times(tuple(each)) for way, each in seconds.items()}
        return Times(tuple(compute)), Times(tuple(latency)), peers

    async def _cold(self) -> pb.JobStatus:
        """One item with the device's files out of the page cache, but for pages that it keeps."""
        for path in self._cache.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return await self._submit(self._items.one)

    async def _submit(self, inputs: Path) -> pb.JobStatus:
        """Run a job over a folder of items to its end. Raises `DeviceFailed`."""
        self._jobs += 1
        request = self._job.request()
        outputs = self._items.root / f"out-{self._budget}-{self._jobs}"
        request.name = f"bench-{self._jobs}"
        request.inputs_uri = folder_address(inputs)
        request.outputs_uri = folder_address(outputs)
        status = await self._client.submit(request)
        while status.state not in ENDED:
            async for status in self._client.watch(
                request.name, _WATCH_INTERVAL_SECONDS, seconds=_WATCH_SECONDS
            ):
                if status.state in ENDED:
                    break
        shutil.rmtree(outputs, ignore_errors=True)
        if status.state != pb.JobStatus.COMPLETE:
            reasons = [failure.reason for failure in status.failures[:1]] or [status.message]
            raise DeviceFailed(f"{self._what}: {reasons[0]}")
        return status

    def _swapping(self) -> Swapping:
        (fragment,) = self._job.prepared.document.fragments
        ((granted,),) = self._job.plan.grants()
        whole = Swapping(
            granted_bytes=granted,
            least_bytes=fragment.least_bytes,
            resident_bytes=fragment.resident_bytes,
            weight_bytes=fragment.weight_bytes,
            kept_bytes=fragment.weight_bytes,
        )
        blocks = FragmentStore(self._pool.workspace.store).manifest(fragment.digest).blocks
        if not blocks or granted >= fragment.resident_bytes:
            return whole
        # Only where agents run is there one to import from.
        from shoal_agent.memory.swapping import plan_swapping  # noqa: PLC0415

        plan = plan_swapping(blocks, granted)
        assert plan is not None, "the plan grants at least what it needs"
        kept = zip(blocks, plan.kept_bytes, strict=True)
        return replace(
            whole,
            blocks=len(blocks),
            kept_blocks=sum(bytes_kept == block.weight_bytes for block, bytes_kept in kept),
            kept_bytes=sum(plan.kept_bytes),
            prefetches=plan_swapping(blocks, granted, prefetch=True) is not None,
        )

    def _enforced(self) -> str:
        if self._groups is None or not self._pool.limits:
            return ""
        return f"cgroup v{self._groups.hierarchy.version}"


def _compute(status: pb.JobStatus) -> float:
    return status.stages[0].compute_seconds
