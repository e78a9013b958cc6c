"""`dtk run`: start a script on N processes and watch them until they end."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import click

from dtk.cluster import Host, progress
from dtk.cluster.detect import check_not_launched
from dtk.cluster.variables import SAVE_GRACE
from dtk.errors import ClusterError
from dtk.launch import check_plan, job_file, job_options, network, screen, views
from dtk.launch.job_run import JobRun
from dtk.launch.plan import JobSpec
from dtk.launch.starter import FORWARDED

_MAX_RESTARTS = 3
# Packages that ranks import. Each is a folder, so a file with the same name is another module, and
# a folder beside the script hides the installed one.
_IMPORTED = ("dtk", "horovod", "keras", "mpi4py", "numpy", "tensorflow")
_PATHS = importlib.machinery.PathFinder
# What joins processes by another library: the line, and what to do about it.
_OTHERS = {
    r"^[ \t]*(?:import|from)\s+horovod\b": (
        "Horovod, which `dtk run` does not start: {}; or write `import dtk.migrate.horovod as hvd` "
        "there, and leave the rest"
    ),
    r"^[^#\n]*\bMultiWorkerMirroredStrategy\s*\(": (
        "TensorFlow's own strategy, with which Keras 3 does not train on several workers: {}"
    ),
}
# Variables that tell a rank its place, of which `dtk run` gives each its own.
_PLACES = ("TF_CONFIG", "HOROVOD_RANK", "HOROVOD_SIZE", "DTK_RUN", "DTK_HOSTS", "DTK_JOB")
_OF_A_PROCESS = ("/dev/fd/", "/dev/stdin", "/proc/")  # ranks have others by these names
_USES_DTK = re.compile(r"^\s*(?:import|from)\s+dtk\b", re.MULTILINE)


@click.command(
    cls=job_options.JobCommand,
    context_settings={"allow_interspersed_args": False},
    epilog="""
    \b
    dtk run -n 2 train.py --epochs 3
    dtk run -n 2 -m package.train
    dtk run --hosts node1:2,node2:2 train.py
    dtk run -n 4 --ps 2 train.py
    """,
)
@click.option(
    "-n",
    "-np",  # as with mpirun
    "--workers",
    type=int,
    help="Processes to start. Default: the slots of the hosts.",
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
    show_default=f"{_MAX_RESTARTS} with --ps or --min-workers, else 0",
    help="Times a job that fails is started again, to resume from its checkpoint; with --ps, times "
    "each worker killed by a signal is.",
)
@click.option(
    "--min-workers",
    metavar="M",
    type=int,
    show_default="all",
    help="Fewest workers to start the job again with, on the hosts that still answer.",
)
@job_options.communicator
@job_options.hosts
@job_options.hostfile
@click.option(
    "--bind/--no-bind",
    default=True,
    help="Bind each rank to its share of the host's cores; never with --ps, with more ranks than "
    "cores, or with more threads asked for than a share has.",
)
@click.option(
    "--isolate",
    is_flag=True,
    help="Give the job a separate network: nothing outside can reach its ports, and it can reach "
    "nothing outside. On this machine only.",
)
@click.option(
    "-x",
    "exported",
    metavar="NAME[=VALUE]",
    multiple=True,
    help="Give every rank this variable, on other hosts as well; repeat it for more. Those of "
    f"TensorFlow and the like ({', '.join(FORWARDED)}) are given anyway.",
)
@job_file.path_option(
    "--output-dir", metavar="DIR", help="Also write each rank's output to a file there."
)
@job_file.path_option("--events", help="Write what happens to a file, as JSON lines.")
@job_file.path_option("--timeline", help="Write a timeline for https://ui.perfetto.dev.")
@job_file.path_option("--report", help="Write a report of the job, a page of HTML.")
@job_options.remote_shell
@job_options.seconds(
    "--timeout-grace",
    default=5.0,
    help="Seconds a process gets to end itself before it is killed.",
)
@job_options.seconds(
    "--save-grace",
    envvar=SAVE_GRACE,
    default=progress.DEFAULT_SAVE_GRACE,
    help="Seconds that ranks with a Checkpoint get to end their step, and as many again to save, "
    "when Ctrl-C or SIGTERM ends the job.",
)
@job_options.stall_timeout
@job_file.option
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script", required=False, type=click.Path())
@click.argument("args", nargs=-1, type=click.Path())
@click.pass_context
def run(
    ctx: click.Context,
    workers: int | None,
    ps: int,
    evaluator: bool,
    max_restarts: int | None,
    min_workers: int | None,
    communicator: str,
    hosts: str | None,
    hostfile: str | None,
    bind: bool,
    isolate: bool,
    exported: tuple[str, ...],
    output_dir: str | None,
    events: str | None,
    timeline: str | None,
    report: str | None,
    remote_shell: str,
    timeout_grace: float,
    save_grace: float,
    stall_timeout: float,
    module: bool,
    script: str | None,
    args: tuple[str, ...],
) -> None:
    """Start SCRIPT with ARGS on several processes.

    Output is prefixed with the rank. If one process fails, all end; the last output and the exit
    code are those of the failed process.

    With --ps the job ends when the chief (and the evaluator) ends, and a worker or evaluator that
    is killed is started again. Without --ps, --max-restarts starts all ranks again; a Checkpoint
    callback resumes.
    """
    screen.hold_standard_descriptors()
    command = command_of(script, module, args)
    check_not_launched(os.environ)
    variables = dict(map(_variable, exported))
    os.environ.update(variables)  # as if they were set: threads and settings are planned by them
    where = job_options.places(hosts, hostfile)
    if not where and not isolate:
        where, remote_shell = job_options.places_in_slurm(workers, remote_shell)
    check_plan(command, workers, where, communicator, ps, evaluator)
    _check_fewest(min_workers, workers, where, ps)
    if isolate and where:
        raise ClusterError(
            "--isolate is for a job on this machine: one on several hosts needs the network "
            "between them; leave it out, and keep others from that network"
        )
    job_options.check_installed(communicator)
    if isolate:
        network.isolate()
    if max_restarts is None:
        max_restarts = _MAX_RESTARTS if ps or min_workers else 0

    if message := job_file.told(ctx):
        screen.say(message)
    spec = JobSpec(
        command=command,
        workers=workers,
        communicator=communicator,
        hosts=where,
        ps=ps,
        evaluator=evaluator,
        bind=bind,
        max_restarts=max_restarts,
        min_workers=min_workers,
        remote_shell=remote_shell,
        stall_timeout=stall_timeout,
        grace=timeout_grace,
        save_grace=save_grace,
        output_dir=output_dir,
        variables=variables,
        records_steps=bool(events or timeline or report),
    )
    running = JobRun(spec)
    with views.reporting(ctx.params, running, screen.say):
        code = job_options.interruptible(running.wait, "run", running.jobs)
        running.log.record("job end", code=code)
    ranks = len(running.jobs[-1].states) if running.jobs else 0
    others = (code or ranks > 1) and not module and communicator != "horovod"
    if others and (told := _of_another_library(command[1])):
        screen.say(told)
    sys.exit(code)


def _of_another_library(script: str) -> str:
    """Return what to do with a script that Horovod or TensorFlow would join to others, not dtk."""
    with contextlib.suppress(OSError):
        text = Path(script).read_text(encoding="utf-8", errors="replace")
        for line, told in () if _USES_DTK.search(text) else _OTHERS.items():
            if found := re.search(line, text, re.MULTILINE):
                number = 1 + text.count("\n", 0, found.start())
                moved = f"`dtk migrate {shlex.quote(script)}` shows the script in dtk's names"
                return f"{script}:{number} is for {told.format(moved)}"
    return ""


def _variable(assignment: str) -> tuple[str, str]:
    """Return name and value of a variable that is given as NAME=VALUE, or NAME if it is set."""
    name, equals, value = assignment.partition("=")
    if not name:
        raise ClusterError(
            f"-x {assignment}: no name; give -x NAME=VALUE, or the NAME of a set one"
        )
    if name in _PLACES:
        raise ClusterError(
            f"-x {assignment}: `dtk run` gives each rank a {name} of its own; leave this one out"
        )
    if not equals and name not in os.environ:
        raise ClusterError(
            f"-x {assignment}: {name} is not set here; set it, or give -x {name}=VALUE"
        )
    return name, value if equals else os.environ[name]


def command_of(script: str | None, module: bool, args: tuple[str, ...]) -> list[str]:
    """Return the command that starts a script or module."""
    if not script:  # also of a shell's variable that is not set
        what = "module" if module else "script"
        raise ClusterError(
            f"no {what} given; for example `dtk run -n 2 "
            f"{'-m package.train' if module else 'train.py'}`"
        )
    path = Path(script)
    if module:
        if not _module_exists(top := script.partition(".")[0]):
            raise ClusterError(
                f"no module named {top!r} here or installed; run from the directory that holds it"
            )
        path = Path.cwd()
    elif path.is_dir() and not (path / "__main__.py").is_file():
        raise ClusterError(
            f"{script} is a directory; name the script in it, e.g. `{path / 'train.py'}`"
        )
    elif script.startswith(_OF_A_PROCESS) or path.is_fifo() or path.is_char_device():
        raise ClusterError(
            f"{script} is no file that each rank can read; save the script in one, e.g. train.py"
        )
    elif _is_program(path):
        rest = " ".join(args) or "train.py"
        raise ClusterError(
            f"{script!r} is a program; dtk starts Python itself: `dtk run -n 2 {rest}`"
        )
    elif not path.exists():
        raise ClusterError(
            f"no such script: {script} (looked in {os.getcwd()}); give the path of a .py file"
        )
    _check_shadows(path if path.is_dir() else path.resolve().parent)
    return [sys.executable, *(["-m"] if module else []), script, *args]


def _is_program(path: Path) -> bool:
    """Return whether a script's path is a program's, such as Python, or a shell's script."""
    if path.suffix == ".py":
        return False
    if not path.exists():
        return path.name.startswith("python") or shutil.which(path) is not None
    with contextlib.suppress(OSError), path.open("rb") as file:
        first, second = file.readline(128), file.readline(128)
        # pip begins a command with a shell's line, and a second one that starts Python, if the path
        # of Python is too long for the first.
        is_shell = first.startswith(b"#!") and b"py" not in first and b"'''exec'" not in second
        return is_shell or first.startswith(b"\x7fELF")
    return False


def _check_shadows(folder: Path) -> None:
    """Refuse files and folders beside the script that would be imported instead of packages."""
    if os.environ.get("PYTHONSAFEPATH"):  # then Python does not search the script's folder
        return
    others = [one for one in sys.path if Path(one).resolve() != folder.resolve()]
    for name in _IMPORTED:
        found, installed = (_PATHS.find_spec(name, paths) for paths in ([str(folder)], others))
        if found is None or not found.origin:  # Python goes on where a folder has no __init__.py
            continue
        file = Path(found.origin)
        if found.submodule_search_locations is not None:
            if installed is None or not installed.origin or file.samefile(installed.origin):
                continue
            file = file.parent
            if (file / "launch" / "bootstrap").is_dir():  # a checkout of dtk itself
                continue
        raise ClusterError(
            f"{file} would be imported in place of the package {name}, as it stands beside the "
            "script; rename it"
        )


def _module_exists(top: str) -> bool:
    with contextlib.suppress(ImportError, ValueError):
        return bool(_PATHS.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top))
    return False


def _check_fewest(
    fewest: int | None, workers: int | None, hosts: tuple[Host, ...], ps: int
) -> None:
    if fewest is None:
        return
    wanted = sum(host.slots for host in hosts) if workers is None else workers
    if ps:
        raise ClusterError(
            "--min-workers and --ps were both given; with servers a lost worker is done without "
            "anyway, so leave --min-workers out"
        )
    if not hosts:
        raise ClusterError(
            "--min-workers is for hosts that may be lost; give them with --hosts or --hostfile, or "
            "leave it out"
        )
    if not 1 <= fewest <= wanted:
        raise ClusterError(f"--min-workers {fewest}: expected 1 to {wanted}, the number of workers")
