"""Times as the API server writes them (RFC 3339), and the seconds between them. Pure.

`datetime` knows what time it is, so pure modules do without it; protobuf has the same conversion.
"""

from google.protobuf.timestamp_pb2 import Timestamp


def instant(text: str) -> float:
    """Seconds since 1970 of a time such as 2026-01-31T12:00:00Z; `ValueError` for another text."""
    time = Timestamp()
    time.FromJsonString(text)
    return time.seconds + time.nanos / 1e9


def as_time(seconds: float) -> str:
    """The time so many seconds after 1970, to the second, in UTC."""
    return Timestamp(seconds=int(seconds)).ToJsonString()


def seconds_since(then: str, now: str) -> float:
    """How long ago `then` was; 0 where clocks disagree and it is still to come."""
    return max(0.0, instant(now) - instant(then))


def earlier(now: str, seconds: float) -> str:
    """The time so many seconds before `now`."""
    return as_time(max(0.0, instant(now) - seconds))
