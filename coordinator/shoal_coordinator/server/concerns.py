"""What an event or an instruction is about: whom an exception in its processing concerns."""

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins


def job_of(cause: ev.Event | ins.Instruction) -> str | None:
    """The job that an event or an instruction names."""
    job: ev.JobSpec | str | None = getattr(cause, "job", None)
    return job.name if isinstance(job, ev.JobSpec) else job


def device_of(cause: ev.Event | ins.Instruction) -> str | None:
    """The device whose session an event comes from, or an instruction about no job goes to."""
    device: str | None = getattr(cause, "device", None)
    return device if job_of(cause) is None else None
