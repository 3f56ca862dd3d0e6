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
    work = hashlib.sha256(text).hexdigest()
    return Submission(work=work, plan=plan_of(request), terms=terms_of(request))


def plan_of(request: pb.SubmitJobRequest) -> Plan:
    stages = tuple(tuple(each.devices) for each in request.stages)
    return Plan(number=request.epoch, stages=stages)


def terms_of(request: pb.SubmitJobRequest) -> Terms:
    return Terms(**{name: getattr(request, name) for name in _TERMS})


def request_of(work: pb.SubmitJobRequest, submission: Submission) -> pb.SubmitJobRequest:
    request = pb.SubmitJobRequest()
    request.CopyFrom(work)
    request.epoch = submission.plan.number
    del request.stages[:]
    request.stages.extend(pb.StagePlacement(devices=each) for each in submission.plan.stages)
    for name in _TERMS:
        setattr(request, name, getattr(submission.terms, name))
    return request


def as_submitted(status: pb.JobStatus, submission: Submission) -> pb.JobStatus:
    """The status, with what the job was submitted with last."""
    status.plan = submission.plan.number
    for name in _TERMS:
        setattr(status.terms, name, getattr(submission.terms, name))
    status.terms.SetInParent()
    return status
