"""`dtk bench`: how fast training on several workers is, against workers that send nothing."""

from __future__ import annotations

import functools
import io
import sys
from pathlib import Path

import click
import rich.console
import rich.status
import rich.table

from dtk.cli import job
from dtk.cluster import Host
from dtk.errors import ClusterError
from dtk.launch import Job, Process, plan, ssh
from dtk.tuning.bench import report
from dtk.tuning.bench.results import Results, read
from dtk.tuning.bench.setting import EXCHANGES, MODELS, BenchError, Setting

_WORKERS = 2
_WIDTH = 120  # of a table that goes to no terminal


@click.command(
    "bench",
    cls=job.JobCommand,
    epilog="""
    \b
    dtk bench --model mlp --exchange none --exchange 1bit
    dtk bench --json before.json
    dtk bench --compare before.json
    dtk bench --hosts node1:1,node2:1 --markdown bench.md
    """,
)
@click.option(
    "-n", "--workers", type=int, help=f"Workers. Default: the slots of the hosts, or {_WORKERS}."
)
@job.communicator
@job.hosts
@job.hostfile
@job.remote_shell
@click.option(
    "--model",
    "models",
    metavar="NAME",
    multiple=True,
    default=Setting.models,
    help=f"One of {', '.join(MODELS)}; may be repeated. Default: all.",
)
@click.option(
    "--exchange",
    "exchanges",
    metavar="NAME",
    multiple=True,
    default=Setting.exchanges,
    help=f"One of {', '.join(EXCHANGES)}; may be repeated. Default: "
    f"{', '.join(Setting.exchanges)}.",
)
@click.option(
    "--batch-size", default=Setting.batch_size, show_default=True, help="Rows, per worker."
)
@click.option("--steps", default=Setting.steps, show_default=True, help="Steps of a turn.")
@click.option("--rounds", default=Setting.rounds, show_default=True, help="Turns of each.")
@click.option("--json", "json_file", metavar="FILE", help="Write all samples there.")
@click.option("--markdown", "markdown_file", metavar="FILE", help="Write the tables there.")
@click.option("--compare", metavar="FILE", help="Compare with a run saved with --json.")
def bench(
    workers: int | None,
    communicator: str,
    hosts: str | None,
    hostfile: str | None,
    remote_shell: str,
    models: tuple[str, ...],
    exchanges: tuple[str, ...],
    batch_size: int,
    steps: int,
    rounds: int,
    json_file: str | None,
    markdown_file: str | None,
    compare: str | None,
) -> None:
    """Measure training on several workers.

    The limit is what each worker does by itself, at the same time, with plain Keras, sending
    nothing. It and `fit` under dtk, with each exchange, take turns in one job, so that other load
    on the machine falls on all alike; the table holds medians and quartiles.

    A time is that of a step; what `fit` does once an epoch is left out (it is in the samples).
    """
    setting = Setting(_once(models), _once(exchanges), batch_size, steps, rounds)
    job.check_communicator(communicator)
    job.check_remote_shell(remote_shell)
    saved = None if compare is None else read(compare)
    for option, file in (("--json", json_file), ("--markdown", markdown_file)):
        _check_writable(option, file)
    where = job.places(hosts, hostfile)
    processes = plan(
        [sys.executable, "-m", "dtk.tuning.bench", setting.dumps()],
        _count(workers, where),
        hosts=where,
        communicator=communicator,
        survey=functools.partial(ssh.survey, remote_shell=remote_shell),
    )
    results = _measure(processes, remote_shell)
    if json_file is not None:
        results.save(json_file)
    if markdown_file is not None:
        Path(markdown_file).write_text(report.markdown(results, saved))
    show(results, saved)


def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _count(workers: int | None, where: tuple[Host, ...]) -> int:
    slots = sum(host.slots for host in where)
    count = (slots or _WORKERS) if workers is None else workers
    if count < 1:
        raise ClusterError(f"-n {count}: expected 2 or more, e.g. `dtk bench -n 2`")
    if count == 1:
        raise ClusterError(
            "1 worker has nobody to send to: the limit is all there is, and a ratio of 1; use -n 2 "
            "or more"
        )
    job.check_slots(workers, where)
    return count


def _check_writable(option: str, file: str | None) -> None:
    """Raise BenchError before anything is measured that could then not be kept."""
    if file is None:
        return
    path = Path(file)
    if path.is_dir():
        raise BenchError(f"{option} {file} is a directory; name a file, e.g. `{path / 'bench'}`")
    if not path.parent.is_dir():
        raise BenchError(f"{option} {file}: there is no directory {path.parent}; make it first")


class _Heard(io.StringIO):
    """What the workers print: results are taken in, the rest goes to standard error.

    Args:
        results: Filled with what was measured.
        status: Shows how far it is.
    """

    def __init__(self, results: Results, status: rich.status.Status) -> None:
        super().__init__()
        self._results, self._status = results, status

    def write(self, text: str) -> int:
        """Called by the job, with a whole line."""
        if not self._results.take(text):
            click.echo(text, err=True, nl=False)
        elif self._results.turns:
            self._status.update(report.progress(self._results))
        return len(text)


def _measure(processes: list[Process], remote_shell: str) -> Results:
    """Run the job; exits as it does where it fails."""
    results = Results()
    with rich.console.Console(stderr=True).status("starting ...") as status:
        heard = _Heard(results, status)
        started = Job(processes, remote_shell=remote_shell, stdout=heard)
        code = job.see_through(started, "bench")
    if code:
        sys.exit(code)
    return results


def show(results: Results, saved: Results | None = None) -> None:
    """Print a table for each model, and the setting."""
    console = rich.console.Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH
    for model in results.turns:
        header, *rows = report.table(results, model, saved)
        console.print(report.title(results, model), style="bold")
        table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for number, column in enumerate(header):
            table.add_column(column, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()
    for note in report.notes(results, saved):
        console.print(note, soft_wrap=not console.is_terminal)
