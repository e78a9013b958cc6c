"""`dtk tune`: find the TensorFlow settings with which a script's step is fastest here."""

from __future__ import annotations

import functools
import os
import statistics
import sys
from pathlib import Path

import click
import rich.console
import rich.table

from dtk.cli.run import command_of
from dtk.errors import ClusterError
from dtk.launch import Process, job_options, plan, step_settings


@click.command(
    cls=job_options.JobCommand,
    context_settings={"allow_interspersed_args": False},
    epilog="""
    \b
    dtk tune train.py --batch-size 256
    dtk tune --forget train.py
    """,
)
@click.option("-n", "--workers", type=int, default=2, show_default=True, help="Processes to start.")
@job_options.communicator
@click.option("--rounds", type=int, default=2, show_default=True, help="Measurements per setting.")
@click.option("--forget", is_flag=True, help="Use TensorFlow's own settings again.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def tune(
    workers: int,
    communicator: str,
    rounds: int,
    forget: bool,
    module: bool,
    script: str | None,
    args: tuple[str, ...],
) -> None:
    """Find the settings with which a step of SCRIPT is fastest on this machine, and keep them.

    SCRIPT is started once for each setting of TensorFlow, in turns, up to the first step of its
    first fit. That step is timed on its first batch over all processes; then the script ends. The
    settings are oneDNN, XLA, fused batch normalization and Adam, the size of pages, threads between
    operations, and communicators; a variable that you have set does not change. `dtk run` then uses
    settings that were faster by more than 5 % each time, and prints them; it uses the communicator
    on one machine only.

    Other kernels may round differently: weights then equal those of one process with the same
    settings.
    """
    command = command_of(script, module, args)
    job_options.check_communicator(communicator)
    if workers < 2:
        raise ClusterError(f"-n {workers}: steps of one process alone are not timed; use -n 2")
    if rounds < 1:
        raise ClusterError(f"--rounds {rounds}: expected 1 or more")
    job_options.check_installed(communicator)

    def planned(name: str | None) -> list[Process]:
        return plan(command, workers, communicator=name or communicator)

    threads = planned(None)[0].env["OMP_NUM_THREADS"]
    others = job_options.installed()[1:] if communicator == "auto" else []
    file = step_settings.file_of(command, threads)
    if forget:
        known = file.exists()
        file.unlink(missing_ok=True)
        click.echo("forgotten" if known else "there was nothing to forget")
        return
    with rich.console.Console(stderr=True).status("starting ...") as status:
        found = step_settings.Tuning(
            step_settings.ways(int(threads), os.environ, others),
            functools.partial(step_settings.measure, planned),
            lambda name: status.update(f"measuring: {name}"),
            rounds,
        )
        code = job_options.interruptible(lambda: _choose(found, file), "tune", ())
    if code:
        sys.exit(code)


def _choose(found: step_settings.Tuning, file: Path) -> int:
    best = found.choose()
    table = rich.table.Table("", "ms per step (least - most)", box=None, pad_edge=False)
    for name, times in found.times.items():
        middle = statistics.median(times)
        table.add_row(name, f"{middle:.1f} ({min(times):.1f} - {max(times):.1f})")
    for name in found.failed:
        table.add_row(name, "the script fails with it")
    rich.console.Console(width=100).print(table)
    step_settings.save(file, best)
    if best.variables:
        click.echo(
            f"kept: {step_settings.written(best.variables)}; `dtk run` sets it for this script, "
            f"{best.milliseconds:.1f} ms a step instead of {best.milliseconds_before:.1f}"
        )
    else:
        click.echo("nothing is faster by 5 %: TensorFlow's own settings stay")
    return 0
