"""Failures in the protocol's terms: which exception becomes which code."""

from shoal_agent.cache.fetching import FragmentCorrupt, FragmentUnavailable
from shoal_agent.execution.values import Reason
from shoal_agent.memory.demands import NoRoom
from shoal_agent.runtime.failures import (
    NotOpen,
    NotResident,
    OutOfBudget,
    OverBudget,
    RuntimeFailed,
)
from shoal_agent.runtime.inputs import InputMismatch
from shoal_protocol.bulk.link import Undelivered
from shoal_protocol.durable_files import is_disk_full, is_transient
from shoal_protocol.frames import TransferError
from shoal_protocol.manifest import FragmentDamaged
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

EXPECTED = (
    NoRoom,
    NotResident,
    FragmentUnavailable,
    FragmentDamaged,
    Undelivered,
    InputMismatch,
    RuntimeFailed,
    OSError,
)
"""What can go wrong without a mistake in this program."""

_MESSAGE_CHARACTERS = 1000

_REASONS = {
    Reason.CANCELLED: pb.CANCELLED,
    Reason.DEADLINE: pb.DEADLINE,
    Reason.NOT_RESIDENT: pb.NOT_RESIDENT,
}


def failure(code: pb.FailureCode, message: str, *, need: int = 0, have: int = 0) -> pb.Failure:
    return pb.Failure(
        code=code, message=message[:_MESSAGE_CHARACTERS], need_bytes=need, have_bytes=have
    )


def refused_inputs(error: TransferError) -> pb.Failure:
    """The failure of a task whose inputs came with it, and were not taken."""
    if error.outcome == Acknowledgement.STALE:
        return failure(pb.CANCELLED, error.reason)
    return failure(pb.INVALID_INPUT, f"refused: {error.reason}")


def failure_of(error: BaseException) -> pb.Failure:  # noqa: C901, PLR0911, PLR0912 - one case per error
    """The failure that an error is; `error` is one of `EXPECTED`."""
    match error:
        case NoRoom(need_bytes=need, have_bytes=have):
            code = pb.BUDGET if isinstance(error, OverBudget) else pb.DISK_FULL
            return failure(code, str(error), need=need, have=have)
        case OutOfBudget():
            return failure(pb.BUDGET, f"the run needs more memory than the budget: {error}")
        case NotResident() | NotOpen():
            return failure(pb.NOT_RESIDENT, str(error))
        case FragmentCorrupt() | FragmentDamaged():
            return failure(pb.CORRUPT, str(error))
        case FragmentUnavailable():
            return failure(pb.UNAVAILABLE, str(error))
        case Undelivered(outcome=None):
            return failure(pb.UNREACHABLE, str(error))
        case Undelivered(outcome=Acknowledgement.BUSY):
            return failure(pb.DISK_FULL, f"the receiver had no room: {error}")
        case Undelivered(outcome=Acknowledgement.STALE):
            return failure(pb.CANCELLED, f"the activation was not taken: {error}")
        case Undelivered():
            return failure(pb.RUNTIME, f"the receiver refused the activation: {error}")
        case InputMismatch():
            return failure(pb.INVALID_INPUT, str(error))
        case OSError() if is_disk_full(error):
            return failure(pb.DISK_FULL, str(error))
        case OSError() if is_transient(error):
            return failure(pb.UNAVAILABLE, str(error))
        case _:
            return failure(pb.RUNTIME, str(error))


def refusal(reason: Reason, message: str) -> pb.Failure:
    """The failure of a task that the queue gave up."""
    return failure(_REASONS[reason], message)
