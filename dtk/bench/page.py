"""Tables, and the notes below them: on a terminal, or as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import rich.console
import rich.table

Table = Sequence[Sequence[str]]  # a header, then rows
Titled = tuple[str, Table]

_WIDTH = 140  # of a table that goes to no terminal


def show(tables: Sequence[Titled], notes: Sequence[str], file: str | None = None) -> None:
    """Print them, and write them to a file as Markdown."""
    if file is not None:
        Path(file).write_text(markdown(tables, notes))
    console = rich.console.Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH
    for title, (header, *rows) in tables:
        table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for number, column in enumerate(header):
            table.add_column(column, justify="right" if number else "left", no_wrap=not number)
        for row in rows:
            table.add_row(*row)
        console.print(title, style="bold")
        console.print(table)
        console.print()
    for note in notes:
        console.print(note, soft_wrap=not console.is_terminal)


def markdown(tables: Iterable[Titled], notes: Sequence[str]) -> str:
    """Return them as a page.

    Example:
        >>> markdown([("speed", [("", "steps/s"), ("limit", "40.0")])], [])
        '### speed\\n\\n|  | steps/s |\\n|---|---|\\n| limit | 40.0 |\\n\\n'
    """
    lines: list[str] = []
    for title, table in tables:
        lines += [f"### {title}", "", *markdown_table(table), ""]
    return "\n".join([*lines, *notes, ""])


def markdown_table(table: Table) -> list[str]:
    """Return the lines of one table."""
    header, *rows = ("| " + " | ".join(row) + " |" for row in table)
    return [header, "|---" * len(table[0]) + "|", *rows]
