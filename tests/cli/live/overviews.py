"""Overviews as a coordinator gives them, made by hand."""

from shoal_protocol.v1 import coordinator_pb2 as pb

MIB = 1 << 20


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def device(name: str, budget: int = 64 * MIB, **status: object) -> pb.DeviceOverview:
    known = pb.DeviceStatus(name=name, budget_bytes=budget, **status)  # type: ignore[arg-type]
    return pb.DeviceOverview(status=known, version="0.1.0", address="pi-4:7401")


def stage(
    index: int, *devices: str, compute: float = 0.0, ready: int = 0, **more: object
) -> pb.StageOverview:
    status = pb.StageStatus(index=index, ready=ready, devices=devices, compute_seconds=compute)
    values = {"resident_bytes": 40 * MIB, "least_bytes": 40 * MIB, **more}
    return pb.StageOverview(status=status, digest=digest(index), **values)  # type: ignore[arg-type]


def job(*stages: pb.StageOverview, name: str = "ocr", **status: object) -> pb.JobOverview:
    values = {"state": pb.JobStatus.RUNNING, "items": 100, "epoch": 1, **status}
    known = pb.JobStatus(name=name, **values)  # type: ignore[arg-type]
    return pb.JobOverview(status=known, stages=stages, window=8)


def overview(
    *parts: pb.DeviceOverview | pb.JobOverview, seconds: float = 1000.0, **more: object
) -> pb.Overview:
    return pb.Overview(
        time_seconds=seconds,
        devices=[part for part in parts if isinstance(part, pb.DeviceOverview)],
        jobs=[part for part in parts if isinstance(part, pb.JobOverview)],
        **more,  # type: ignore[arg-type]
    )


def task(
    stage: int, device: str, ready: float, given: float, ended: float, compute: float
) -> pb.TaskTiming:
    return pb.TaskTiming(
        stage=stage,
        device=device,
        ready_seconds=ready,
        given_seconds=given,
        ended_seconds=ended,
        compute_seconds=compute,
    )
