"""Writes a page. The JavaScript in it comes with vl-convert-python, the optional extra `page`."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from shoal_cli.local.report import RunReport
from shoal_cli.page.document import document
from shoal_protocol.durable_files import replace_file

_OFFERED: Final = "window.vegaEmbed = vegaEmbed;"
"""What of the bundle the page's own script uses."""


class NothingDraws(Exception):
    """What draws is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "pages need vl-convert-python, which is not installed: pip install 'shoal[page]'"
        )


def check_drawing() -> None:
    """Raise `NothingDraws` where no page can be written."""
    if find_spec("vl_convert") is None:
        raise NothingDraws


@cache
def library() -> str:
    """The JavaScript that draws. To bundle it takes seconds."""
    from vl_convert import javascript_bundle  # noqa: PLC0415 - large, and optional

    return javascript_bundle(_OFFERED)


def write_page(report: RunReport, path: Path) -> int:
    """Write the page of a report; its bytes. A reader sees the old file or the new one."""
    check_drawing()
    page = document(report, library()).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, page)
    return len(page)
