"""Tables that lose no column on a narrow terminal: what does not fit goes below, under the same
name."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Span, Text

from shoal_protocol.visible import visible

_INDENT: Final = 2
_BAR: Final = 10
_LONG_WORD: Final = 40
"""A longer one is broken; on a narrow terminal one that is longer than two thirds of it."""
_WIDE: Final = Console(width=1000, height=100, markup=False)
"""What a table would take if it could. Without a height rich gives a dumb terminal 80 columns."""

R = TypeVar("R")
Columns = Sequence[tuple[str, Callable[[R], str | Text]]]
"""Headings, and what of a row is below each."""


def plain_table(*columns: Column | str) -> Table:
    """A table with a line below its headings, and no other."""
    return Table(*columns, box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)


def facts_grid(facts: Sequence[tuple[str, str]]) -> Table:
    """A line for each fact that has a value; long ones are broken, not cut short."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        if value:
            grid.add_row(name, value)
    return grid


def written_out(text: Text) -> Text:
    """A text with what would command a terminal written out (`visible`), in the same styles."""
    plain, seen = text.plain, visible(text.plain)
    if seen == plain:
        return text
    shown = text.copy()
    shown.plain = seen
    shown.spans = [
        Span(len(visible(plain[: span.start])), len(visible(plain[: span.end])), span.style)
        for span in text.spans
    ]
    return shown


def share_bar(part: int, whole: int) -> Text:
    """How much a part is of the whole: `███░░░░░░░`, red where it is more than that."""
    share = part / whole if whole else 0.0
    full = min(_BAR, round(share * _BAR))
    bar = Text("█" * full, style="red" if share > 1 else "green")
    return bar.append("░" * (_BAR - full), style="dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnTable(Generic[R]):
    """A table of `names` and as many `columns` as fit whole into the width. The others, those to
    `spare` first and in order, are in further ones below, each with the first name again.
    `numbers`, by default all `columns` but the `texts`, are aligned to the right; others break
    their lines if they may `wrap`."""

    rows: Sequence[R]
    names: Columns[R]
    columns: Columns[R]
    spare: Sequence[str] = ()
    numbers: Collection[str] | None = None
    texts: Collection[str] = ()
    wrap: bool = False

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        names, left, width = self.names, list(self.columns), options.max_width
        shown = self._fitting(names, left, width)
        yield self._table(names, shown, width)
        names, width = names[:1], width - _INDENT
        while left := [column for column in left if column not in shown]:
            shown = self._fitting(names, left, width)
            yield Text()
            yield Padding(self._table(names, shown, width), (0, 0, 0, _INDENT), expand=False)

    def _fitting(self, names: Columns[R], columns: Columns[R], width: int) -> Columns[R]:
        """As many of the columns as fit, and at least one: those to spare go first, then the last.
        Rich would fit all of them in by breaking words into letters."""
        kept = list(columns)
        others = [heading for heading, _ in columns if heading not in self.spare]
        for heading in (*self.spare, *reversed(others)):
            needed = Measurement.get(_WIDE, _WIDE.options, self._table(names, kept, width))
            if (needed.minimum if self.wrap else needed.maximum) <= width:
                break
            kept = [column for column in kept if column[0] != heading]
        return kept or columns[:1]

    def _table(self, names: Columns[R], columns: Columns[R], width: int) -> Table:
        shown, longest = (*names, *columns), min(_LONG_WORD, width * 2 // 3)
        table = plain_table(*(self._column(heading, show, longest) for heading, show in shown))
        for row in self.rows:
            table.add_row(*(_cell(show(row)) for _, show in shown))
        return table

    def _column(self, heading: str, show: Callable[[R], str | Text], longest: int) -> Column:
        """Where columns wrap, each takes at least its longest word, a number all of itself: rich
        would break them to fit the others in."""
        texts = [heading, *(_cell(show(row)).plain for row in self.rows)]
        numbers = self.numbers
        if numbers is None:
            numbers = {each for each, _ in self.columns} - {*self.texts}
        if heading in numbers:
            least = max(map(len, texts)) if self.wrap else None
            return Column(heading, justify="right", no_wrap=True, min_width=least)
        words = [len(word) for text in texts for word in text.split()]
        least = min(longest, max(words, default=1)) if self.wrap else None
        return Column(heading, overflow="fold", min_width=least)


def _cell(shown: str | Text) -> Text:
    return Text(visible(shown)) if isinstance(shown, str) else written_out(shown)
