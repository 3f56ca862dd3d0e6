"""Which job, or which device, an event or an instruction concerns."""

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins


def job_of(cause: ev.Event | ins.Instruction) -> str | None:
    """The job that an event or an instruction names."""
    match cause:
        case ev.JobSubmitted(job=spec):
            return spec.name
        case (
            ev.JobCancelled(job=job)
            | ev.ItemStored(job=job)
            | ev.InputUnreadable(job=job)
            | ins.Execute(job=job)
            | ins.Release(job=job)
            | ins.Forward(job=job)
            | ins.FinishItem(job=job)
            | ins.FailItem(job=job)
            | ins.FinishJob(job=job)
        ):
            return job
        case _:
            return None


def device_of(cause: ev.Event | ins.Instruction) -> str | None:
    """The device whose session an event comes from, or an instruction about no job goes to."""
    match cause:
        case (
            ev.DeviceJoined(device=device)
            | ev.DeviceLost(device=device)
            | ev.DeviceDraining(device=device)
            | ev.DeviceTelemetry(device=device)
            | ev.ProbeAnswered(device=device)
            | ev.FragmentEvicted(device=device)
            | ins.Load(device=device)
            | ins.Unload(device=device)
            | ins.Prefetch(device=device)
            | ins.Cancel(device=device)
            | ins.PeerLost(device=device)
            | ins.Probe(device=device)
            | ins.Disconnect(device=device)
        ):
            return device
        case _:
            return None
