"""Times as the API server writes them (RFC 3339), and the seconds between them. Pure.

`datetime` knows what time it is, so pure modules do without it. The standard library has no other
way back from seconds to a date: that is Howard Hinnant's `civil_from_days`.
"""

import calendar
import re
from typing import Final

_TIME: Final = re.compile(
    r"(?P<year>\d{4})-(?P<month>\d{2})-(?P<day>\d{2})T(?P<hour>\d{2}):(?P<minute>\d{2}):"
    r"(?P<second>\d{2})(?P<fraction>\.\d{1,9})?(?:Z|(?P<sign>[+-])(?P<oh>\d{2}):(?P<om>\d{2}))"
)
_DAY: Final = 86_400


def instant(text: str) -> float:
    """Seconds since 1970 of a time such as 2026-01-31T12:00:00Z; `ValueError` for another text."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no time such as 2026-01-31T12:00:00Z")
    date = (int(match[part]) for part in ("year", "month", "day", "hour", "minute", "second"))
    offset = 0
    if match["sign"]:
        offset = int(match["oh"]) * 3600 + int(match["om"]) * 60
        offset = -offset if match["sign"] == "-" else offset
    return calendar.timegm(tuple(date)) - offset + float(match["fraction"] or 0)


def as_time(seconds: float) -> str:
    """The time so many seconds after 1970, to the second, in UTC."""
    days, rest = divmod(int(seconds), _DAY)
    year, month, day = _civil(days)
    hour, minute, second = rest // 3600, rest // 60 % 60, rest % 60
    return f"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z"


def seconds_since(then: str, now: str) -> float:
    """How long ago `then` was; 0 where clocks disagree and it is still to come."""
    return max(0.0, instant(now) - instant(then))


def earlier(now: str, seconds: float) -> str:
    """The time so many seconds before `now`."""
    return as_time(max(0.0, instant(now) - seconds))


def _civil(days: int) -> tuple[int, int, int]:
    era, of_era = divmod(days + 719_468, 146_097)
    year_of_era = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted = (5 * of_year + 2) // 153
    day = of_year - (153 * shifted + 2) // 5 + 1
    month = shifted + (3 if shifted < 10 else -9)
    return year_of_era + era * 400 + (month <= 2), month, day
