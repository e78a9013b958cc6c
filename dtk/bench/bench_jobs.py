"""Jobs of `dtk bench`: one for what cannot share a process, as two communicators, or PyTorch.

Each is a job of `dtk run`'s launcher that lives as long as the benchmark. Its ranks measure when it
is their turn (see `dtk.bench.worker`).

Baselines are libraries that dtk is measured against. They are part of dtk's repository, and of no
installed package:

    benchmarks/baselines/registry.py     BASELINES, a `Baseline` for each name of --peer
    benchmarks/baselines/torch_ddp.py    a `dtk.bench.worker.BenchWorker`, in its own environment
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from dtk.bench import worker
from dtk.bench.ranks import Ranks, RanksFailed
from dtk.bench.results import BenchError, Reading, Setting, check_names
from dtk.cluster import Host, mpi_installs
from dtk.errors import ClusterError, CommunicatorError, DtkError
from dtk.launch import COMMUNICATORS, Process, assign, job_options, ssh

MPI = "horovod-mpi"
LAUNCHERS = (*(name for name in COMMUNICATORS if name != "auto"), MPI)
# Their threads exchange messages all the time, also when nothing is reduced.
BUSY = ("horovod", MPI)
_SHARED = {
    # A process that was stopped for as long as others were measured is not lost.
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "86400",
    # Jobs share a GPU: none may take all of its memory.
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
_START = 300.0  # seconds a job gets to start
_TURN = 1800.0  # and to answer
_END = 10.0  # and to end by itself
_FAIL = 30.0  # and to end when one of its processes has failed


class JobLost(DtkError, RuntimeError):
    """A job has ended, or could not start; says why."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


class Places(NamedTuple):
    """Where the ranks of all jobs run."""

    workers: int
    hosts: tuple[Host, ...] = ()  # this machine when empty
    remote_shell: str = ssh.DEFAULT_REMOTE_SHELL


def check(launcher: str, hosts: Sequence[Host]) -> None:
    """Refuse a launcher that cannot start ranks on these hosts."""
    check_names("--communicator", [launcher], LAUNCHERS)
    if launcher == MPI:
        check_mpirun(hosts)
    job_options.check_installed("horovod" if launcher == MPI else launcher)


def check_mpirun(hosts: Sequence[Host]) -> None:
    """Refuse `mpirun` where it cannot start processes."""
    if hosts:
        raise ClusterError(
            f"{MPI} and mpi4py, which mpirun starts, are measured on this machine only; leave "
            "--hosts out"
        )
    if mpi_installs.find_other("mpirun") is None:
        raise CommunicatorError(
            "no mpirun: install Debian's openmpi-bin and libopenmpi-dev, then `dtk install-horovod`"
        )


def command(made: str, setting: Setting, python: str = sys.executable) -> list[str]:
    """Return what ranks run: `dtk.bench.worker`, by its path, since peers may have no dtk."""
    # -P: what is beside `worker` is dtk's, and hides nothing of others.
    return [python, "-P", worker.__file__, made, repr(dataclasses.asdict(setting))]


def place(launcher: str, argv: Sequence[str], places: Places) -> list[Process]:
    """Plan the processes of a job, so that every rank gets its share of the cores."""
    # Each host is surveyed by the interpreter that will run there: one that has none is named.
    survey = functools.cache(
        functools.partial(ssh.survey, remote_shell=places.remote_shell, python=argv[0])
    )
    kind = "horovod" if launcher in BUSY else launcher
    planned = assign(argv, places.workers, hosts=places.hosts, communicator=kind, survey=survey)
    shared = dict(_SHARED)
    if launcher == MPI:
        # Ranks bind themselves, to the parts that `dtk run` would give them.
        shared[worker.CORES] = json.dumps([one.cores for one in planned])
        variables = planned[0].env.items()
        shared |= {n: v for n, v in variables if not n.startswith(("HOROVOD_", "DTK_"))}
        return [mpirun(argv, places.workers, shared)]
    hosts = [one.host for one in planned]
    # PyTorch's own launcher sets these, by which its processes find each other.
    shared["WORLD_SIZE"] = str(len(planned))
    if planned[0].address:
        host, _, port = planned[0].address.rpartition(":")
        shared |= {"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}
    placed = []
    for one in planned:
        env = {**shared, "RANK": str(one.rank)}
        if interface := survey(one.host, hosts.count(one.host)).interface:
            # By the name a host gives itself Gloo may find no address, or one of loopback.
            env["GLOO_SOCKET_IFNAME"] = interface
        placed.append(one.with_env(env))
    return placed


def mpirun(
    argv: Sequence[str],
    workers: int,
    env: Mapping[str, str],
    binding: Sequence[str] = ("--bind-to", "none"),
) -> Process:
    """Return one process that starts all ranks, on this machine."""
    path = mpi_installs.find_other("mpirun") or "mpirun"
    as_root = ["--allow-run-as-root"] * (os.geteuid() == 0)
    # A rank that waits must not keep the others from computing.
    patient = ["--mca", "mpi_yield_when_idle", "1", "-np", str(workers)]
    started = (path, "--oversubscribe", *binding, *as_root, *patient, *argv)
    return Process("mpirun", "worker", 0, "localhost", started, env)


class BenchJob(Ranks):
    """A job that measures when it is asked.

    Args:
        name: Unique.
        processes: What to start.
        places: Where its ranks are.
        essential: Whether there is nothing to measure without it.
        busy: Whether it computes while nothing is asked of it.
    """

    def __init__(
        self,
        name: str,
        processes: Sequence[Process],
        places: Places,
        *,
        essential: bool = True,
        busy: bool = False,
    ):
        self.name, self.essential, self._busy = name, essential, busy
        self._unseen = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        output = sys.stderr if essential else self._unseen
        shell = places.remote_shell
        super().__init__(processes, places.workers, output=output, remote_shell=shell)

    def start(self, timeout: float = _START) -> None:
        """Start it, and wait until every rank has said hello."""
        with self._explained():
            super().start(timeout)
            self._rest()

    def build(self, task: str) -> tuple[int, list[str], dict[str, str]]:
        """Make ready for a task; return the model's parameters, what can be measured, what not."""
        return cast(tuple[int, list[str], dict[str, str]], self._asked(("build", task))[0])

    def measure(self, name: str) -> list[Reading]:
        """Measure on all ranks at once."""
        answers = cast(list[worker.Numbers], self._asked(("measure", name)))
        return [Reading(**numbers) for numbers in answers]

    def _asked(self, request: tuple[str, str]) -> list[object]:
        with self._explained():
            answers = self.ask(request, _TURN)
            self._rest()
            return answers

    def _rest(self) -> None:
        """Stop the processes until they are asked again, if they are busy meanwhile.

        All must have answered: what one still sends, another waits for.
        """
        if self._busy:
            self.ask(worker.REST, _TURN)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say why the job is lost: by the last line of the first process that failed."""
        try:
            yield
        except TimeoutError as error:
            raise JobLost(str(error)) from None
        except RanksFailed:
            if not self.ended(_FAIL) or self.job.failure is None:
                raise JobLost("ended too early") from None
            process, code, words = self.job.failure
            host = "" if process.host == "localhost" else f" on {process.host}"
            why = f"{process.name}{host} ended with exit code {code}: {last_words(words)}"
            raise JobLost(why, code) from None

    def close(self, patience: float = _END, hurry: bool = False) -> None:
        """End every rank; in a hurry, without patience."""
        super().close(0.0 if hurry else patience, hurry)
        self._unseen.close()


def last_words(output: str) -> str:
    """Return the line that says most: the last exception, or else the last line.

    Example:
        >>> last_words("RuntimeError: no peer\\nmpirun has exited\\n")
        'RuntimeError: no peer'
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (raised or lines or ["it wrote nothing"])[-1]


FOLDER = Path(__file__).parents[2] / "benchmarks" / "baselines"


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Another library that trains on several processes."""

    name: str  # as given with --peer
    about: str  # what it is, for the help
    worker: Path  # file with its `Worker`, which may import what is beside it
    launcher: str  # "collective", "horovod" or "horovod-mpi", see `dtk.bench.bench_jobs`
    # returns the interpreter of its own environment; if there is none, makes it and says so before.
    # None for this Python, which Horovod is built for
    python: Callable[[Callable[[str], None]], str] | None = None
    trains: bool = True  # whether it does; or else it measures sizes alone


def find(folder: Path = FOLDER) -> Mapping[str, Baseline]:
    """Return the baselines of the repository that dtk is in, by name."""
    file = folder / "registry.py"
    known = runpy.run_path(str(file))["BASELINES"] if file.exists() else ()
    return {baseline.name: baseline for baseline in known}


def choose(names: Sequence[str], known: Mapping[str, Baseline]) -> tuple[Baseline, ...]:
    """Return the baselines of these names.

    Example:
        >>> choose(["torch"], find())[0].about
        "PyTorch's DistributedDataParallel over Gloo"
    """
    for name in names:
        if not known:
            raise BenchError(
                f"--peer {name}: other frameworks are measured from a clone of dtk's repository, "
                f"and the dtk in {Path(__file__).parents[1]} is installed without; run `pip "
                f"install -e '.[bench]'` in a clone, then `dtk bench --peer {name}` again"
            )
    check_names("--peer", names, known)
    return tuple(known[name] for name in names)
