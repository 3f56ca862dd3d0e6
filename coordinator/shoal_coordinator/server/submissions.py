"""Submissions as messages, and as the jobs' machine knows them.

What a job is never changes while it runs. How it is done may: by a newer plan, and on other terms
(priority, parallelism, deadline).
"""

import hashlib
import json
from typing import Final

from shoal_coordinator.jobs.values import Plan, Submission, Terms
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.v1 import coordinator_pb2 as pb

_PLAN: Final = ("epoch", "stages")
_TERMS: Final = ("priority", "parallelism", "active_deadline_seconds")


def submission_of(request: pb.SubmitJobRequest, document: PartitionDocument) -> Submission:
    """A checked request. Of the partition its fragments and edges count, and not the words: another
    version may have others for the same work.
    """
    rest = pb.SubmitJobRequest()
    rest.CopyFrom(request)
    for name in (*_PLAN, *_TERMS, "partition"):
        rest.ClearField(name)
    edges = sorted((edge.producer, edge.consumer, *edge.tensors) for edge in document.edges)
    content = [document.model_digest, [each.digest for each in document.fragments], edges]
    text = json.dumps(content).encode() + rest.SerializeToString(deterministic=True)
    return Submission(
        work=hashlib.sha256(text).hexdigest(),
        plan=Plan(
            number=request.epoch, stages=tuple(tuple(each.devices) for each in request.stages)
        ),
        terms=Terms(
            priority=request.priority,
            parallelism=request.parallelism,
            active_deadline_seconds=request.active_deadline_seconds,
        ),
    )


def request_of(work: pb.SubmitJobRequest, submission: Submission) -> pb.SubmitJobRequest:
    """The request of some work, with the plan and the terms of `submission`."""
    request = pb.SubmitJobRequest()
    request.CopyFrom(work)
    request.epoch = submission.plan.number
    del request.stages[:]
    request.stages.extend(pb.StagePlacement(devices=each) for each in submission.plan.stages)
    for name in _TERMS:
        setattr(request, name, getattr(submission.terms, name))
    return request


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
