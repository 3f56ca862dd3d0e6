"""One line per transition on stderr, as text or as JSON."""

import json
import logging
import sys
from typing import Final

from shoal_protocol.visible import OneLine

log: Final = logging.getLogger("shoal.agent")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(device: str, level: str, format_: str) -> None:
    """Log to stderr from now on."""
    handler = logging.StreamHandler(sys.stderr)
    if format_ == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(OneLine(f"%(asctime)s %(levelname)s {device}: %(message)s"))
    log.addHandler(handler)
    log.setLevel(level.upper())
    log.propagate = False
