"""How a call ends that is refused: with a status, and a text that says why."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn

import grpc

from shoal_coordinator.jobs.values import Refusal

_CODES: Final = {
    Refusal.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    Refusal.LACKING: grpc.StatusCode.FAILED_PRECONDITION,
    Refusal.KNOWN: grpc.StatusCode.ALREADY_EXISTS,
    Refusal.OTHER_WAY: grpc.StatusCode.ABORTED,
    Refusal.RUNS: grpc.StatusCode.FAILED_PRECONDITION,
    Refusal.COMPLETE: grpc.StatusCode.FAILED_PRECONDITION,
    Refusal.UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Refusal.FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.STOPPING: grpc.StatusCode.UNAVAILABLE,
}


class CallRefused(Exception):
    """A call that cannot begin, or cannot continue."""

    def __init__(
        self, reason: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
    ) -> None:
        super().__init__(reason)
        self.code = code


class JobRefused(CallRefused):
    """A call about a job."""

    def __init__(self, reason: str, refusal: Refusal = Refusal.MALFORMED) -> None:
        super().__init__(reason, _CODES[refusal])


@asynccontextmanager
async def aborting(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Abort a call that is refused."""
    try:
        yield
    except CallRefused as error:
        await abort(context, error.code, str(error))


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], code: grpc.StatusCode, reason: str
) -> NoReturn:
    await context.abort(code, reason)
    raise AssertionError("abort always raises")
