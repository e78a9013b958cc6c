"""`dtk check`: whether a script's training step gives the same on one and several processes."""

from __future__ import annotations

import sys

import click

from dtk.cli.run import command_of
from dtk.cluster.variables import SELF_TEST
from dtk.errors import ClusterError
from dtk.launch import job_options
from dtk.launch.job_run import JobRun
from dtk.launch.plan import JobSpec


@click.command(
    cls=job_options.JobCommand,
    context_settings={"allow_interspersed_args": False},
    epilog="""
    \b
    dtk check train.py --epochs 3
    dtk check -n 4 -m package.train
    """,
)
@click.option("-n", "--workers", type=int, default=2, show_default=True, help="Processes to start.")
@job_options.communicator
@job_options.stall_timeout
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script", required=False, type=click.Path())
@click.argument("args", nargs=-1, type=click.Path())
def check(
    workers: int,
    communicator: str,
    stall_timeout: float,
    module: bool,
    script: str | None,
    args: tuple[str, ...],
) -> None:
    """Try the training step of SCRIPT on a few rows, and end.

    SCRIPT runs on several processes up to the first step of its first fit. A few rows of its first
    batch go through the step as a whole, and in parts on all processes: gradients, losses, metrics
    and everything else that the step changes must agree. The step trains and saves nothing.

    The exit code is 0 if they agree. A script that trains no model ends with 1.
    """
    command = command_of(script, module, args)
    if workers < 2:
        raise ClusterError(f"-n {workers}: there is something to compare from 2 on")
    job_options.check_installed(communicator)
    running = JobRun(
        JobSpec(
            command=command,
            workers=workers,
            communicator=communicator,
            stall_timeout=stall_timeout,
            variables={SELF_TEST: "only"},
        )
    )
    code = job_options.interruptible(running.wait, "check", running.jobs)
    if code == 0 and not running.jobs[-1].worked_together:  # with a strategy a rank says so itself
        click.echo("dtk check: the script ended without making a strategy", err=True)
        code = 1
    sys.exit(code)
