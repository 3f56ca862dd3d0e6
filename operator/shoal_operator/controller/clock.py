"""The current time, which pure functions take as data."""

from datetime import UTC, datetime


def now() -> datetime:
    """The time in UTC."""
    return datetime.now(UTC)


def now_text() -> str:
    """As the API server writes it, to the second."""
    return now().strftime("%Y-%m-%dT%H:%M:%SZ")


def now_micro_text() -> str:
    """As the API server writes a `MicroTime`."""
    return now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
