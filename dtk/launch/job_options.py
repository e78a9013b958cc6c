"""Options of the commands that start a job, and seeing it to its end."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import IO

import click
from click.core import ParameterSource

from dtk.cluster import Host, mpi_installs, parse_hosts, progress, read_hostfile, slurm
from dtk.errors import ClusterError, CommunicatorError, DtkError
from dtk.launch import COMMUNICATORS, Job, job_file, screen, ssh

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# What other launchers call -n: --np, --nproc_per_node, --num-proc.
_OTHERS_NUMBER = re.compile(r"--(n|np|nproc.*|num.*)")

# Options of all of them.
communicator = click.option(
    "--communicator",
    default="auto",
    show_default="auto: mpi where it is installed, else collective",
    help="What moves the bytes: " + ", ".join(COMMUNICATORS) + ".",
)
hosts = click.option(
    "-H", "--hosts", metavar="H1:N,H2:N", help="Hosts and how many processes each takes."
)
hostfile = job_file.path_option("--hostfile", help="The same, one `host slots=n` per line.")
remote_shell = click.option(
    "--remote-shell",
    metavar="CMD",
    default=ssh.DEFAULT_REMOTE_SHELL,
    show_default=True,
    help="Command that reaches other hosts, called as `CMD host command`.",
)
seconds = functools.partial(click.option, metavar="S", type=float, show_default=True)
stall_timeout = seconds(
    "--stall-timeout",
    envvar=progress.VARIABLE,
    default=progress.DEFAULT_TIMEOUT,
    help="Seconds without progress after which the job is ended and the missing rank is named; "
    "with parameter servers, a stuck worker is started again. A slow step counts as progress. 0 "
    "for never.",
)


# Of options, by their names in Python: whether a number fits, and which do.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "stall_timeout": (progress.is_timeout, progress.TIMEOUTS),
    "timeout_grace": (lambda seconds: 0.0 <= seconds <= 3600.0, "0 to 3600 seconds"),
    "save_grace": (lambda seconds: 1.0 <= seconds <= 1e6, "1 to 1000000 seconds"),
    "max_restarts": (lambda number: number >= 0, "0 or more"),
}


def _check_values(ctx: click.Context) -> None:
    for name, (fits, wanted) in _RANGES.items():
        value = ctx.params.get(name)
        if isinstance(value, int | float) and not fits(value):
            option = f"--{name.replace('_', '-')}{_by_variable(ctx, name)}"
            raise ClusterError(f"{option} {value:g}: expected {wanted}")
    for name, value in ctx.params.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ClusterError(f"--{name.replace('_', '-')} {value:g}: expected a finite number")
    shell = ctx.params.get("remote_shell")
    if isinstance(shell, str) and not shell.split():
        raise ClusterError("--remote-shell is empty, expected a command such as ssh")


def _by_variable(ctx: click.Context, name: str | None) -> str:
    """Return which variable has given an option its value; "" if none has."""
    if not name or ctx.get_parameter_source(name) is not ParameterSource.ENVIRONMENT:
        return ""
    return next(f" (by {one.envvar})" for one in ctx.command.params if one.name == name)


class Refused(click.ClickException):
    """One clear line, exit code 2."""

    exit_code = 2

    def __init__(self, command: str | None, message: str) -> None:
        super().__init__(f"dtk {command}: {message}")

    def show(self, file: IO[str] | None = None) -> None:
        """Print the line."""
        click.echo(self.message, err=True)


class JobCommand(click.Command):
    """A command whose mistakes, dtk's errors and usage errors alike, are one line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            message = error.format_message().rstrip(".")
            if isinstance(error, click.BadParameter) and error.param is not None:
                message += _by_variable(ctx, error.param.name)
            if isinstance(error, click.NoSuchOption):
                close = " or ".join(error.possibilities or ())
                if _OTHERS_NUMBER.fullmatch(error.option_name):
                    close = "-n"
                message = f"no such option: {error.option_name}"
                message += f", did you mean {close}?" if close else ""
            raise Refused(self.name, f"{message}; see `dtk {self.name} --help`") from None

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        job_file.drop_replaced(ctx)
        try:
            _check_values(ctx)
            return super().invoke(ctx)
        except DtkError as error:
            of_files = job_file.told(ctx)
            raise Refused(self.name, f"{error}; {of_files}" if of_files else str(error)) from None


class _Signalled(BaseException):
    """The launcher was asked to end."""


def interruptible(work: Callable[[], int], command: str, jobs: Iterable[Job]) -> int:
    """Do what starts jobs; Ctrl-C, SIGTERM and a closed terminal end all of them.

    Interrupted, this process ignores all three from then on, and so does what it starts: it is to
    exit with the code, which one more Ctrl-C must not spoil.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    caught: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        # The first ends everything, the second at once; a third must not interrupt that.
        if len(caught) <= 2:
            raise _Signalled

    # nohup has SIGHUP ignored, so that the job outlives its terminal
    outlives = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    ending = [one for one in _ENDING if one != signal.SIGHUP or not outlives]

    before = {one: signal.signal(one, handle) for one in ending}
    try:
        try:
            return work()
        finally:
            for one, handler in before.items():
                signal.signal(one, signal.SIG_IGN if caught else handler)
    except _Signalled:
        # A second signal may have come before `with` could begin to end the job.
        for job in jobs:
            job.stop(hurry=True)
        # Of two signals the first decides; a second one only made the ending quicker.
        name = signal.Signals(caught[0]).name
        click.echo(f"dtk {command}: {name}: every process was ended", err=True)
        return 128 + caught[0]


def installed() -> list[str]:
    """Return the communicators that a job can use here; `dtk run` takes the first by itself."""
    has_horovod = importlib.util.find_spec("horovod") is not None
    mpi = ["mpi"] if mpi_installs.mpirun() else []
    first = [*mpi, "collective"] if mpi_installs.unasked() else ["collective", *mpi]
    return [*first, *(["horovod"] if has_horovod else [])]


def check_installed(name: str) -> None:
    """Refuse a communicator that is not installed.

    Check everything else first: a package does not cure any other mistake.
    """
    if name == "mpi":
        mpi_installs.required_mpirun()
    if name == "horovod" and name not in installed():
        raise CommunicatorError(
            "--communicator horovod: Horovod is not installed; run `dtk install-horovod`"
        )


def places(hosts: str | None, hostfile: str | None) -> tuple[Host, ...]:
    """Return the hosts that --hosts or --hostfile name."""
    if hosts is not None and hostfile is not None:
        raise ClusterError("--hosts and --hostfile were both given; keep one")
    if hostfile is not None:
        return read_hostfile(hostfile)
    return () if hosts is None else parse_hosts(hosts)


def places_in_slurm(workers: int | None, remote_shell: str) -> tuple[tuple[Host, ...], str]:
    """Return the hosts of an allocation of Slurm's, and what reaches them.

    None where there is no allocation, or one on this host alone that `workers` were asked of.
    """
    hosts = slurm.allocation(os.environ)
    if not hosts or (workers is not None and len(hosts) == 1 and ssh.is_local(hosts[0].name)):
        return (), remote_shell
    if remote_shell == ssh.DEFAULT_REMOTE_SHELL:
        remote_shell = slurm.remote_shell(os.environ)
    slots = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
    screen.say(f"on the hosts of Slurm's job {os.environ['SLURM_JOB_ID']}, by srun: {slots}")
    return hosts, remote_shell
