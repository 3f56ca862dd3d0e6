"""`shoal report`."""

from pathlib import Path
from typing import Final

from shoal_cli.commands import options, written

EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "The page of a run whose report was kept:  shoal report report.json\n\n"
    "That of the last run in a work folder:  shoal report ~/.cache/shoal/runs/ocr-1f2e3d4c5b6a\n\n"
    "[bold]Exit status[/bold]\n\n"
    "0: the page is written. 2: there is no report, or no page can be written here."
)


def report(run: written.Run, html: written.Html = None) -> None:
    """Write one HTML page of a run that is over: what each device did, its memory against its
    budget, the cut, transfers, what was planned and what was measured, failures.

    The page needs neither network nor other files. It lies beside the report, unless --html says
    where.
    """
    from shoal_cli.local.report import read_report
    from shoal_cli.page.writing import write_page
    from shoal_protocol.units import format_bytes

    path = _report_of(run)
    page = html or path.with_suffix(".html")
    written.check("--html", page)
    size = write_page(read_report(path), page)
    options.note(f"{page}: {format_bytes(size)}")


def _report_of(run: Path) -> Path:
    """The report that a path means, which is there."""
    from shoal_cli.local.report import REPORT_NAME, ReportRefused

    path = run / REPORT_NAME if run.is_dir() else run
    if path.is_file():
        return path
    if run.is_dir():
        raise ReportRefused(f"{run} has no {REPORT_NAME}: no run has ended there")
    raise ReportRefused(f"there is no {run}; name a report (`shoal run --report`) or a work folder")
