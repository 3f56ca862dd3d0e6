"""A report as the text of an HTML file: style, script and data are inside, nothing is fetched.

What stands in the report is text, wherever it came from: it is escaped in HTML, and data for the
script is JSON in which no tag can begin.
"""

import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files

from shoal_cli.drawing.chart import Chart
from shoal_cli.local.report import RunReport
from shoal_cli.page.charts import charts
from shoal_cli.page.series import MOST_DEVICES
from shoal_cli.page.tables import Figure, Table, figures, tables, title, troubles
from shoal_protocol.visible import visible


def document(report: RunReport, library: str) -> str:
    """The whole page; `library` is the JavaScript that draws (vegaEmbed)."""
    drawn = charts(report)
    specs = json.dumps({chart.name: chart.spec for chart in drawn}, separators=(",", ":"))
    names = title(report.jobs)
    parts = (
        *_head(report, names),
        *_troubles(troubles(report)),
        *(_figure(chart) for chart in drawn),
        *(_table(table) for table in tables(report)),
    )
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Run of {_text(names)}</title>",
            f"<style>\n{_file('page.css')}</style>",
            "</head>\n<body>\n<main>",
            *parts,
            "</main>",
            f'<script type="application/json" id="specs">{_inert(specs)}</script>',
            f"<script>{_closed(library)}</script>",
            f"<script>\n{_file('page.js')}</script>",
            "</body>\n</html>\n",
        )
    )


def _head(report: RunReport, names: str) -> Iterable[str]:
    verdict, kind = ("Succeeded", "good") if report.succeeded else ("Failed", "bad")
    if report.interrupted:
        verdict = "Interrupted"
    elif all(job.ran_nothing for job in report.jobs):
        verdict = "Nothing was left to do"
    yield f"<header>\n<h1>Run of {_text(names)}</h1>"
    yield (
        f'<p><span class="{kind}">{verdict}</span> <span class="soft">'
        f"{_text(_moment(report.started))}, Shoal {_text(report.shoal_version)}</span></p>"
    )
    yield f"<dl>{''.join(map(_number, figures(report)))}</dl>"
    if (more := len(report.devices) - MOST_DEVICES) > 0:
        text = f"Charts and times are of {MOST_DEVICES} devices; {more} more are in the report."
        yield f'<p class="soft">{text}</p>'
    yield "</header>"


def _text(of: str) -> str:
    """A text that is only shown: no markup, and no order of letters but its own."""
    return escape(visible(of))


def _moment(started: str) -> str:
    """`2026-11-22 21:33:09 UTC`"""
    return started.replace("T", " ").replace("+00:00", " UTC")


def _number(figure: Figure) -> str:
    kind = ' class="bad"' if figure.wrong else ""
    return f"<div><dt>{_text(figure.name)}</dt><dd{kind}>{_text(figure.value)}</dd></div>"


def _troubles(found: Iterable[str]) -> Iterable[str]:
    if items := "".join(f"<li>{_text(text)}</li>" for text in found):
        yield f'<ul id="troubles">{items}</ul>'


def _figure(chart: Chart) -> str:
    return (
        f'<section class="figure">'
        f"<h2>{_text(chart.title)}</h2>\n<figure>"
        f"<figcaption>{_text(chart.text)}</figcaption>"
        f'<div class="chart" id="{chart.name}" role="img" aria-label="{_text(chart.text)}"></div>'
        "</figure></section>"
    )


def _table(table: Table) -> str:
    head = "".join(_cell("th", index, text, table) for index, text in enumerate(table.headings))
    rows = "".join(
        f"<tr>{''.join(_cell('td', index, text, table) for index, text in enumerate(row))}</tr>"
        for row in table.rows
    )
    more = f"<p>{table.left_out} more are in the report.</p>" if table.left_out else ""
    return (
        f'<section><h2>{_text(table.title)}</h2>\n<div class="wide"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>{more}</section>"
    )


def _cell(tag: str, index: int, text: str, table: Table) -> str:
    kind = ' class="name"' if index < table.names else ""
    return f"<{tag}{kind}>{_text(text)}</{tag}>"


def _file(name: str) -> str:
    """A file beside this module."""
    return files(__package__).joinpath(name).read_text()


def _inert(data: str) -> str:
    """JSON in which no tag begins."""
    return data.replace("<", "\\u003c")


def _closed(script: str) -> str:
    """A script that does not end early."""
    return script.replace("</script", "<\\/script")
