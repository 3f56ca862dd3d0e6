"""What an InferenceJob refers to: the names of its Placement, Partition, Model and DevicePool.
Pure.

A job that names a Model gets a Partition of its own, and one without a Placement gets a Placement
of its own; both are called as the job is.
"""

from shoal_api.kinds import InferenceJob, Partition, Placement


def placement_of(job: InferenceJob) -> str:
    """The name of the job's Placement."""
    reference = job.spec.placement_ref
    return job.metadata.name if reference is None else reference.name


def partition_of(job: InferenceJob, placement: Placement | None) -> str | None:
    """The name of the job's Partition; None while that is not known."""
    if job.spec.placement_ref is not None:
        return None if placement is None else placement.spec.partition_ref.name
    return job.metadata.name if job.spec.partition_ref is None else job.spec.partition_ref.name


def model_of(job: InferenceJob, partition: Partition | None) -> str | None:
    """The name of the job's Model; None while that is not known."""
    if job.spec.model_ref is not None:
        return job.spec.model_ref.name
    return None if partition is None else partition.spec.model_ref.name


def pool_of(job: InferenceJob, placement: Placement | None) -> str | None:
    """The name of the job's DevicePool; None while that is not known."""
    if job.spec.pool_ref is not None:
        return job.spec.pool_ref.name
    return None if placement is None else placement.spec.pool_ref.name
