"""A job with the plan that it runs by: as a coordinator takes it, and as it is reported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal_cli.local.cut_orders import count_items
from shoal_cli.local.orders import JobOrder, PlanOrder
from shoal_cli.local.preparation import Prepared
from shoal_cli.local.report import (
    DeviceReport,
    FailedItem,
    FragmentHeld,
    JobReport,
    Latency,
    StageReport,
    TaskTime,
    TierHits,
)
from shoal_cli.local.run_record import cut_report
from shoal_cli.local.watch import DeviceTally
from shoal_planner.batches import batch_sentences
from shoal_planner.explanation import sentences
from shoal_planner.figures import PlanFigures, Rates, figures
from shoal_planner.outcome import Plan
from shoal_protocol.copying import copied
from shoal_protocol.partition import document_to_json, outgrown_of
from shoal_protocol.seen_sizes import read_sizes
from shoal_protocol.units import seconds
from shoal_protocol.v1 import coordinator_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A job that is ready to be submitted, with the plan that it runs by."""

    order: JobOrder
    prepared: Prepared
    plan: Plan

    def request(self) -> pb.SubmitJobRequest:
        """As the coordinator takes it."""
        spec = self.order.job.spec
        return pb.SubmitJobRequest(
            name=self.order.name,
            partition=document_to_json(self.prepared.document).encode(),
            stages=[
                pb.StagePlacement(
                    devices=devices,
                    granted_bytes=granted,
                    predicted_seconds=map(seconds, predicted),
                )
                for devices, granted, predicted in zip(
                    self.plan.homes(), self.plan.grants(), self.plan.predictions(), strict=True
                )
            ],
            epoch=1,
            inputs_uri=folder_address(self.order.inputs),
            outputs_uri=folder_address(self.order.outputs),
            mode=spec.mode.name,
            policy=spec.policy.name,
            priority=spec.priority,
            backoff_limit=spec.backoff_limit,
            active_deadline_seconds=float(spec.active_deadline_seconds or 0),
            parallelism=spec.parallelism or 0,
            lossy=self.order.lossy,
            follow=spec.inputs.follow,
            end=spec.end,
            batch=self.order.batch,
            final_cut=self.order.final_cut,
            explanation=[
                *sentences(self.plan),
                *batch_sentences(self.plan, self.prepared.document, self.order.batch),
            ],
        )

    def fragments_on(self, device: str) -> dict[str, FragmentHeld]:
        """The fragments by digest, as the device holds them if it does."""
        held: dict[str, FragmentHeld] = {}
        for fragment, homes, grants in zip(
            self.prepared.document.fragments, self.plan.homes(), self.plan.grants(), strict=True
        ):
            granted = dict(zip(homes, grants, strict=True)).get(device, fragment.resident_bytes)
            held[fragment.digest] = FragmentHeld(
                partition=self.order.plan.cut.name,
                index=fragment.index,
                digest=fragment.digest,
                granted_bytes=granted if granted < fragment.resident_bytes else None,
            )
        return held

    def report(
        self, status: pb.JobStatus, label: Callable[[str], str] = lambda device: device
    ) -> JobReport:
        """The job as a coordinator reports it; `label` is what to call a device."""
        return copied(
            JobReport,
            status,
            state=pb.JobStatus.State.Name(status.state).capitalize(),
            model=self.order.plan.cut.model,
            model_digest=self.prepared.document.model_digest,
            partition=self.order.plan.cut.name,
            latency=copied(Latency, status.latency),
            tier_hits=copied(TierHits, status.tier_hits),
            stages=tuple(
                copied(
                    StageReport,
                    stage,
                    devices=tuple(map(label, stage.devices)),
                    times=tuple(_task_time(time, label(time.device)) for time in stage.times),
                )
                for stage in status.stages
            ),
            failures=tuple(copied(FailedItem, each) for each in status.failures),
            outputs=str(self.order.outputs),
            verification=None,
            verification_error="",
            cut=cut_report(self.plan, self.prepared.document, label),
            plan=self._plan_report(status, label),
            outgrown=outgrown_of(status),
            seen=read_sizes(status.seen),
        )

    def _plan_report(self, status: pb.JobStatus, label: Callable[[str], str]) -> PlanFigures:
        """The plan as predicted, beside what the coordinator measured of it."""
        rates = Rates(
            items_per_second=status.items_per_second or None,
            latency_seconds=status.latency.p50_seconds or None,
        )
        measured = {each.index: each.compute_seconds for each in status.stages if each.finished}
        return figures(self.plan).renamed(label).with_measured(rates, measured)


def _task_time(time: pb.TaskTime, device: str) -> TaskTime:
    known = time.predicted_seconds if time.HasField("predicted_seconds") else None
    return copied(TaskTime, time, device=device, predicted_seconds=known)


def device_report(
    jobs: Sequence[PlannedJob],
    *,
    name: str,
    budget_bytes: int,
    tally: DeviceTally,
    has_exceeded: bool | None = None,
) -> DeviceReport:
    """A device of these jobs by what it has reported; nothing is known of limits and deaths."""
    fragments: dict[str, FragmentHeld] = {}
    for job in jobs:
        fragments = {**job.fragments_on(name), **fragments}
    held = [fragments[digest] for digest in tally.held if digest in fragments]
    return DeviceReport(
        name=name,
        budget_bytes=budget_bytes,
        floor_bytes=tally.floor_bytes,
        peak_bytes_above_floor=tally.peak_bytes,
        fragments=tuple(sorted(held, key=lambda each: (each.partition, each.index))),
        tier_hits=tally.tier_hits,
        has_exceeded=has_exceeded,
        **tally.counts,
    )


def with_items(order: PlanOrder, prepared: Prepared) -> PlanOrder:
    """An order that says how many items it is for, where that matters and can be known."""
    items = count_items(order.cut, prepared.document.inputs)
    return replace(order, cut=replace(order.cut, items=items))


def folder_address(folder: Path) -> str:
    """A folder as the coordinator is told of it, in UTF-8, which not every path is."""
    try:
        return str(folder).encode().decode()
    except UnicodeEncodeError:
        return folder.absolute().as_uri()
