"""`dtk top`: the jobs of this user that run on this machine, and what their ranks do."""

from __future__ import annotations

import contextlib
import sys
import time

import click
import rich.console
import rich.live
import rich.table
import rich.text

from dtk.launch import job_options, monitor
from dtk.launch.monitor import JobSnapshot

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
    if (shown := _shown(job)) is None:
        which = "no job" if job is None else f"no job {job}"
        click.echo(f"dtk top: {which} of `dtk run` runs here as this user", err=True)
        sys.exit(1)
    if not console.is_terminal:
        console.print(shown)
        return
    with (
        contextlib.suppress(KeyboardInterrupt),
        rich.live.Live(shown, console=console, auto_refresh=False) as live,
    ):
        while (shown := _shown(job)) is not None:
            live.update(shown, refresh=True)
            time.sleep(_PERIOD)


def _shown(job: int | None) -> rich.console.Group | None:
    jobs = [one for one in monitor.jobs() if job in (None, one["pid"])]
    return rich.console.Group(*map(_of_job, jobs)) if jobs else None


def _of_job(job: JobSnapshot) -> rich.console.Group:
    table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in job["rows"][0] if job["rows"] else ():
        left = name in ("rank", "host", "state")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in job["rows"]:
        is_slowest = row["rank"] == str(job["slowest"])
        table.add_row(*row.values(), style="bold red" if is_slowest else "")
    slowest = f"rank {job['slowest']} is the slowest: others wait for it\n"
    told = rich.text.Text("" if job["slowest"] is None else slowest)
    return rich.console.Group(rich.text.Text(job["title"], style="bold"), table, told)
