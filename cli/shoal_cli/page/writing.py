"""Writes a page. The JavaScript in it comes with vl-convert-python, the optional extra `page`."""

import os
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

from shoal_cli.drawing.svg import check_drawing
from shoal_cli.local.report import RunReport
from shoal_cli.page.document import document
from shoal_cli.transfer.cache_folder import default_cache
from shoal_protocol.durable_files import replace_file, write_named

_OFFERED: Final = "window.vegaEmbed = vegaEmbed;"
"""What of the bundle the page's own script uses."""


@cache
def library() -> str:
    """The JavaScript that draws. To bundle it takes seconds, so it is kept below the user's cache
    folder."""
    with suppress(OSError):
        return _kept().read_text(encoding="utf-8")
    from vl_convert import javascript_bundle  # noqa: PLC0415 - large, and optional

    made = javascript_bundle(_OFFERED)
    with suppress(OSError):
        kept = _kept()
        kept.parent.mkdir(parents=True, exist_ok=True)
        own = kept.with_suffix(f".{os.getpid()}")  # another process may keep it now, too
        replace_file(own, made.encode())
        own.replace(kept)
    return made


def _kept() -> Path:
    return default_cache() / f"page-{version('vl-convert-python')}.js"


def write_page(report: RunReport, path: Path) -> int:
    """Write the page of a report; its bytes. Of a file a reader sees the old one or the new one."""
    check_drawing()
    page = document(report, library()).encode(errors="backslashreplace")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_named(path, page)
    return len(page)
