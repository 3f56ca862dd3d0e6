"""What of a view a screen has room for. The lower end of what is too high for it would be lost, and
there the devices are."""

from bisect import bisect_right

from rich.console import Console, Group, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

from shoal_cli.commands.live_tables import jobs_of, picture
from shoal_cli.live.view import View


def filled(console: Console, title: str, view: View) -> RenderableType:
    """As many jobs as leave room for the devices; of the first, where it has none for that, no
    stages. What is still too high is cut, and that is said."""
    height = console.height
    counts = range(1, min(len(jobs_of(view)), height) + 1)
    fitting = bisect_right(
        counts, height, key=lambda count: len(_lines(console, picture(title, view, count)))
    )
    if fitting or not counts:
        return _cut(console, picture(title, view, fitting))
    return _cut(console, picture(title, view, 1, stages=False))


def _cut(console: Console, shown: RenderableType) -> RenderableType:
    lines, height = _lines(console, shown), console.height
    if len(lines) <= height:
        return shown
    kept = [[*line, Segment.line()] for line in lines[: height - 1]]
    below = f"{len(lines) - len(kept)} more lines: shoal top | less"
    return Group(Segments([segment for line in kept for segment in line]), Text(below, style="dim"))


def _lines(console: Console, shown: RenderableType) -> list[list[Segment]]:
    return console.render_lines(shown, pad=False)
