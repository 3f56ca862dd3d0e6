"""Submissions of one job beside one another: whether they are the same work, and what changes.

What a job is never changes while it runs. How it is done may: by a newer plan, and on other terms
(priority, parallelism, deadline).
"""

from typing import Final

from shoal_protocol.partition import DocumentRefused, document_from_json
from shoal_protocol.v1 import coordinator_pb2 as pb

_PLAN: Final = ("epoch", "stages")
_TERMS: Final = ("priority", "parallelism", "active_deadline_seconds")


def same_work(one: pb.SubmitJobRequest, other: pb.SubmitJobRequest) -> bool:
    """Whether two submissions differ at most in plan and terms. Of the partition its fragments
    count, and not the words: another version may have others for the same.
    """
    same_partition = one.partition == other.partition or (
        _fragments(one.partition) == _fragments(other.partition)
    )
    return same_partition and _rest(one) == _rest(other)


def amended(known: pb.SubmitJobRequest, newer: pb.SubmitJobRequest) -> pb.SubmitJobRequest:
    """What is known, with the terms of `newer`, and its plan if that is of a higher epoch."""
    both = pb.SubmitJobRequest()
    both.CopyFrom(known)
    both.priority = newer.priority
    both.parallelism = newer.parallelism
    both.active_deadline_seconds = newer.active_deadline_seconds
    if newer.epoch > known.epoch:
        both.epoch = newer.epoch
        del both.stages[:]
        both.stages.extend(newer.stages)
    return both


def as_submitted(status: pb.JobStatus, request: pb.SubmitJobRequest) -> pb.JobStatus:
    """The status, with what the job was submitted with last."""
    status.plan = request.epoch
    status.terms.CopyFrom(
        pb.Terms(
            priority=request.priority,
            parallelism=request.parallelism,
            active_deadline_seconds=request.active_deadline_seconds,
        )
    )
    return status


def _rest(request: pb.SubmitJobRequest) -> pb.SubmitJobRequest:
    rest = pb.SubmitJobRequest()
    rest.CopyFrom(request)
    for name in (*_PLAN, *_TERMS, "partition"):
        rest.ClearField(name)
    return rest


def _fragments(partition: bytes) -> object:
    try:
        document = document_from_json(partition)
    except DocumentRefused:
        return partition
    wires = {(edge.producer, edge.consumer, edge.tensors) for edge in document.edges}
    return document.model_digest, [each.digest for each in document.fragments], wires
