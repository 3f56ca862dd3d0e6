"""Failures in the protocol's terms: which exception becomes which code."""

from shoal_agent.cache.disk import CacheFull
from shoal_agent.cache.fetching import FragmentCorrupt, FragmentUnavailable
from shoal_agent.execution.queue import Reason
from shoal_agent.runtime.fragments import NotResident, OverBudget
from shoal_agent.runtime.onnx_runtime import InputMismatch, NotOpen, OutOfBudget, RuntimeFailed
from shoal_agent.transport.activations import SpillFull
from shoal_protocol.bulk.link import Undelivered
from shoal_protocol.durable_files import is_disk_full, is_transient
from shoal_protocol.frames import TransferError
from shoal_protocol.manifest import FragmentDamaged
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

EXPECTED = (
    OverBudget,
    NotResident,
    FragmentUnavailable,
    FragmentDamaged,
    CacheFull,
    SpillFull,
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
    """A failure with a message of bounded length."""
    return pb.Failure(
        code=code, message=message[:_MESSAGE_CHARACTERS], need_bytes=need, have_bytes=have
    )


def refused_inputs(error: TransferError) -> pb.Failure:
    """The failure of a task whose inputs came with it, and were not taken."""
    if error.outcome == Acknowledgement.STALE:
        return failure(pb.CANCELLED, error.reason)
    return failure(pb.INVALID_INPUT, f"refused: {error.reason}")


def failure_of(error: BaseException) -> pb.Failure:  # noqa: C901, PLR0911 - one case per error
    """The failure that an error is; `error` is one of `EXPECTED`."""
    match error:
        case OverBudget(need_bytes=need, have_bytes=have):
            return failure(pb.BUDGET, str(error), need=need, have=have)
        case OutOfBudget():
            return failure(pb.BUDGET, f"the run needs more memory than the budget: {error}")
        case NotResident() | NotOpen():
            return failure(pb.NOT_RESIDENT, str(error))
        case FragmentCorrupt() | FragmentDamaged():
            return failure(pb.CORRUPT, str(error))
        case FragmentUnavailable():
            return failure(pb.UNAVAILABLE, str(error))
        case (
            CacheFull(need_bytes=need, have_bytes=have)
            | SpillFull(need_bytes=need, have_bytes=have)
        ):
            return failure(pb.DISK_FULL, str(error), need=need, have=have)
        case Undelivered(outcome=None | Acknowledgement.BUSY):
            return failure(pb.UNREACHABLE, str(error))
        case Undelivered(outcome=Acknowledgement.STALE):
            return failure(pb.CANCELLED, f"the activation was not taken: {error}")
        case Undelivered():
            return failure(pb.RUNTIME, f"the receiver refused the activation: {error}")
        case InputMismatch():
            return failure(pb.INVALID_INPUT, str(error))
        case OSError():
            return failure(_code_of(error), str(error))
        case _:
            return failure(pb.RUNTIME, str(error))


def _code_of(error: OSError) -> pb.FailureCode:
    if is_disk_full(error):
        return pb.DISK_FULL
    return pb.UNAVAILABLE if is_transient(error) else pb.RUNTIME


def refusal(reason: Reason, message: str) -> pb.Failure:
    """The failure of a task that the queue gave up."""
    return failure(_REASONS[reason], message)
