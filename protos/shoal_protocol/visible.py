"""Text of others on its way to a terminal or a log.

Names of tensors, nodes and files, and what a server or a device says, are whatever their authors
wrote. A terminal takes some characters for commands: to change its title, to write to the
clipboard, to draw over what stands there, or to show letters in another order. They are shown as
Python writes them: `\\x1b`. In a log a line break would begin a record that nobody has written.
"""

import logging
import re
from typing import Final

_COMMANDS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""All controls but tab and line break, and the bytes of a path that are not UTF-8."""


def visible(text: str) -> str:
    """A text that a terminal only shows."""
    return _COMMANDS.sub(_written, text)


def visible_line(text: str) -> str:
    """The same in one line, as the name of a file may hold line breaks."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


class OneLine(logging.Formatter):
    """One line for each record; only a traceback has more."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = visible_line(record.message)
        return super().formatMessage(record)


def _written(command: re.Match[str]) -> str:
    return command[0].encode("unicode_escape").decode()
