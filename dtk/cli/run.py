"""`dtk run`: start a script on N processes and see them to their end."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any

import click

from dtk.cluster import Host, parse_hosts, read_hostfile
from dtk.errors import DtkError
from dtk.launch import COMMUNICATORS, Job, plan, ssh

_MAX_RESTARTS = 3


class _Refused(click.ClickException):
    """One clear line, exit code 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line."""
        click.echo(f"dtk run: {self.message}", err=True)


class _Run(click.Command):
    """A command whose usage errors are one line as well."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the arguments."""
        try:
            return super().make_context(*args, **extra)
        except click.UsageError as error:
            raise _Refused(f"{error.format_message().rstrip('.')}; see `dtk run --help`") from None


class _Signalled(BaseException):
    """The launcher was asked to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@click.command(
    cls=_Run,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="""
    \b
    dtk run -n 2 train.py --epochs 3
    dtk run -n 2 -m package.train
    dtk run --hosts node1:2,node2:2 train.py
    dtk run -n 4 --ps 2 train.py
    """,
)
@click.option(
    "-n", "--workers", type=int, help="Processes to start. Default: the slots of the hosts."
)
@click.option(
    "--ps",
    metavar="N",
    type=int,
    default=0,
    show_default=True,
    help="Parameter servers, beside the -n workers and a chief added as rank 0.",
)
@click.option(
    "--evaluator", is_flag=True, help="With --ps, also start a process that evaluates meanwhile."
)
@click.option(
    "--max-restarts",
    metavar="N",
    type=int,
    show_default=f"{_MAX_RESTARTS} with --ps",
    help="Times each worker killed by a signal is started again; with 0, done without.",
)
@click.option(
    "--communicator",
    default="collective",
    show_default=True,
    help="What moves the bytes: " + " or ".join(COMMUNICATORS) + ".",
)
@click.option("--hosts", metavar="H1:N,H2:N", help="Hosts and how many processes each takes.")
@click.option("--hostfile", metavar="FILE", help="The same, one `host slots=n` per line.")
@click.option("--output-dir", metavar="DIR", help="Also write each rank's output to a file there.")
@click.option(
    "--remote-shell",
    metavar="CMD",
    default=ssh.DEFAULT_REMOTE_SHELL,
    show_default=True,
    help="Command that reaches other hosts, called as `CMD host command`.",
)
@click.option(
    "--timeout-grace",
    metavar="S",
    type=float,
    default=5.0,
    show_default=True,
    help="Seconds a process gets to end itself before it is killed.",
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int | None,
    ps: int,
    evaluator: bool,
    max_restarts: int | None,
    communicator: str,
    hosts: str | None,
    hostfile: str | None,
    output_dir: str | None,
    remote_shell: str,
    timeout_grace: float,
    module: bool,
    script: str | None,
    args: tuple[str, ...],
) -> None:
    """Start SCRIPT with ARGS on several processes.

    Output is prefixed with the rank. When one process fails, all end, and its last output is shown
    last; the exit code is its own.

    With --ps the job ends when the chief does (and the evaluator), and a worker that is killed is
    started again.
    """
    try:
        command = _command(script, module, args)
        _check_communicator(communicator)
        if not 0.0 <= timeout_grace <= 3600.0:
            raise _Refused(f"--timeout-grace {timeout_grace:g}: expected 0 to 3600 seconds")
        _check_remote_shell(remote_shell)
        where = _hosts(hosts, hostfile)
        _check_workers(workers, where)
        _check_servers(ps, max_restarts)
        processes = plan(
            command,
            workers,
            hosts=where,
            communicator=communicator,
            ps=ps,
            evaluator=evaluator,
            survey=functools.partial(ssh.survey, remote_shell=remote_shell),
        )
        job = Job(
            processes,
            output_dir=output_dir,
            remote_shell=remote_shell,
            grace=timeout_grace,
            max_restarts=_MAX_RESTARTS if max_restarts is None else max_restarts,
        )
        code = _see_through(job)
    except DtkError as error:
        raise _Refused(str(error)) from None
    sys.exit(code)


def _see_through(job: Job) -> int:
    try:
        with _signals_raise(), job:
            return job.wait()
    except _Signalled as signalled:
        # A second signal may have come before `with` could begin to end the job.
        job.stop(hurry=True)
        # Of two signals the first decides; a second one only made the ending quicker.
        first: BaseException = signalled
        while isinstance(first.__context__, _Signalled):
            first = first.__context__
        assert isinstance(first, _Signalled)
        name = signal.Signals(first.number).name
        click.echo(f"dtk run: {name}: every process was ended", err=True)
        return 128 + first.number


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and a closed terminal into an exception, so that `with` blocks end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    caught = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal caught
        caught += 1
        # The first ends everything, the second at once; a third must not interrupt that.
        if caught <= 2:
            raise _Signalled(number)

    before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    after: dict[Any, Any] = before
    try:
        yield
    except _Signalled:
        # All is ended, and so are we: one more Ctrl-C has nothing left to interrupt.
        after = dict.fromkeys(before, signal.SIG_IGN)
        raise
    finally:
        for number, handler in after.items():
            signal.signal(number, handler)


def _command(script: str | None, module: bool, args: tuple[str, ...]) -> list[str]:
    if script is None:
        what = "module" if module else "script"
        raise _Refused(
            f"no {what} given; for example `dtk run -n 2 "
            f"{'-m package.train' if module else 'train.py'}`"
        )
    if module:
        top = script.partition(".")[0]
        if not _module_exists(top):
            raise _Refused(
                f"no module named {top!r} here or installed; run from the directory that holds it"
            )
        return [sys.executable, "-m", script, *args]
    path = Path(script)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise _Refused(
            f"{script} is a directory; name the script in it, e.g. `{path / 'train.py'}`"
        )
    if not path.exists():
        if Path(script).name.startswith("python") or (
            path.suffix != ".py" and shutil.which(script)
        ):
            rest = " ".join(args) or "train.py"
            raise _Refused(
                f"{script!r} is a program; dtk starts Python itself: `dtk run -n 2 {rest}`"
            )
        raise _Refused(
            f"no such script: {script} (looked in {os.getcwd()}); give the path of a .py file"
        )
    return [sys.executable, script, *args]


def _module_exists(top: str) -> bool:
    if Path(top, "__init__.py").is_file() or Path(top + ".py").is_file() or Path(top).is_dir():
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def _check_communicator(name: str) -> None:
    if name not in COMMUNICATORS:
        raise _Refused(f"--communicator {name}: unknown, expected {' or '.join(COMMUNICATORS)}")
    if name == "horovod" and importlib.util.find_spec("horovod") is None:
        raise _Refused(
            "--communicator horovod: Horovod is not installed; run `dtk install-horovod`"
        )


def _check_remote_shell(command: str) -> None:
    if not command.split():
        raise _Refused("--remote-shell is empty, expected a command such as ssh")


def _hosts(hosts: str | None, hostfile: str | None) -> tuple[Host, ...]:
    if hosts is not None and hostfile is not None:
        raise _Refused("--hosts and --hostfile were both given; keep one")
    if hostfile is not None:
        return read_hostfile(hostfile)
    return () if hosts is None else parse_hosts(hosts)


def _check_workers(workers: int | None, hosts: tuple[Host, ...]) -> None:
    if workers is None and not hosts:
        raise _Refused("the number of processes is not given; add -n, e.g. `dtk run -n 2 train.py`")
    if workers is not None and workers < 1:
        raise _Refused(f"-n {workers}: expected 1 or more, e.g. `dtk run -n 2 train.py`")
    slots = sum(host.slots for host in hosts)
    if hosts and workers is not None and workers > slots:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise _Refused(
            f"-n {workers}: {listed} have {slots} slots; use -n {slots} or give the hosts more "
            "slots"
        )


def _check_servers(ps: int, max_restarts: int | None) -> None:
    if ps < 0:
        raise _Refused(f"--ps {ps}: expected 0 or more, e.g. `dtk run -n 4 --ps 2 train.py`")
    if max_restarts is not None and max_restarts < 0:
        raise _Refused(f"--max-restarts {max_restarts}: expected 0 or more")
    if max_restarts and not ps:
        raise _Refused(
            f"--max-restarts {max_restarts}: only the workers of parameter servers are started "
            "again; a lost rank of an all-reduce job ends it, so leave the option out or add --ps"
        )
