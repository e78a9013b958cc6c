"""`dtk top`: the jobs of this user that run on this machine, and what their ranks do."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

import click
import rich.console
import rich.live
import rich.table
import rich.text

from dtk.launch import job_options, monitor
from dtk.launch.events import Event

_PERIOD = 1.0
_WIDTH = 140  # of what goes to no terminal


@click.command(
    cls=job_options.JobCommand,
    epilog="""
    \b
    dtk top
    dtk top 4711
    ssh node1 dtk top
    """,
)
@click.argument("job", required=False, type=int)
def top(job: int | None) -> None:
    """Show the jobs of `dtk run`, or the one whose launcher has process id JOB.

    On a terminal the table is renewed until Ctrl-C or the end of the jobs; elsewhere it is printed
    once. Exit code 1 if there is no job.
    """
    console = rich.console.Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH
    found = _jobs(job)
    if not found:
        which = "no job" if job is None else f"no job {job}"
        click.echo(f"dtk top: {which} of `dtk run` runs here as this user", err=True)
        sys.exit(1)
    if not console.is_terminal:
        console.print(_tables(found))
        return
    try:
        with rich.live.Live(_tables(found), console=console, auto_refresh=False) as live:
            while found := _jobs(job):
                live.update(_tables(found), refresh=True)
                time.sleep(_PERIOD)
    except KeyboardInterrupt:
        return


def _jobs(wanted: int | None) -> list[Event]:
    return [one for one in monitor.jobs() if wanted in (None, one["pid"])]


def _tables(jobs: Sequence[Event]) -> rich.console.Group:
    return rich.console.Group(*(part for job in jobs for part in _of_job(job)))


def _of_job(job: Event) -> list[rich.console.RenderableType]:
    table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("rank", "host", "epoch", "step", "samples/s", "waiting", "memory", "sent/s"):
        table.add_column(name, justify="left" if name in ("rank", "host") else "right")
    table.add_column("state", no_wrap=True)
    rows, command = job["ranks"], job["command"]
    assert isinstance(rows, list) and isinstance(command, list)
    for row in rows:
        table.add_row(*_cells(row), style="bold red" if row["rank"] == job["slowest"] else "")
    title = f"job {job['pid']}: {' '.join(map(str, command))}"
    title += f" (restarts: {job['restarts']})" if job["restarts"] else ""
    parts: list[rich.console.RenderableType] = [rich.text.Text(title, style="bold"), table]
    if job["slowest"] is not None:
        parts.append(rich.text.Text(f"rank {job['slowest']} is the slowest: others wait for it"))
    return [*parts, rich.text.Text()]


def _cells(row: Mapping[str, object]) -> list[str]:
    def cell(name: str, style: str, unit: float = 1.0) -> str:
        value = row.get(name)
        return "-" if value is None else format(float(str(value)) / unit, style)

    return [
        str(row["rank"]),
        str(row["host"]),
        cell("epoch", ".0f"),
        cell("step", ".0f"),
        cell("samples", ",.0f"),
        cell("waiting", ".0%"),
        cell("memory", ",.0f", 1e6) + " MB",
        cell("bytes", ",.1f", 1e3) + " kB",
        str(row["state"]),
    ]
