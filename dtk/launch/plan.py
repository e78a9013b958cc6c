"""Planning the processes of a job from a command, hosts and counts. Starts nothing.

    hosts h1:2,h2:2 and workers=3:        rank 0 -> h1   rank 1 -> h1   rank 2 -> h2

Ranks fill the hosts in the order given. With parameter servers a chief is added in front, which
makes it rank 0; it, the servers and the evaluator take no slot and go round the hosts from the
first.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence

from dtk.cluster import Host, TFConfig, progress
from dtk.cluster.place import THREADS
from dtk.cluster.variables import COMMUNICATOR, JOB_SECRET
from dtk.errors import ClusterError
from dtk.even_division import even_bounds
from dtk.launch import ssh

COMMUNICATORS = ("auto", "collective", "horovod", "mpi")
# `assign` takes these, too: such ranks show what a step costs without communication.
_NOT_BETWEEN_PROCESSES = ("local", "null")
# Each process takes a port and hundreds of MB: more is a mistyped number.
MOST_ON_A_HOST = 1024
# They mostly wait: the chief for workers, the servers for gradients that workers compute. Giving
# them a share of the cores would leave it idle. The evaluator computes like a worker.
_WAITING = ("chief", "ps")
# glibc gives large tensors back to the system, page by page, and asks anew in every step. In huge
# pages an all-reduce of 100 MB over Horovod took 38 ms, not 76. Other C libraries do not read it.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclasses.dataclass(frozen=True)
class Process:
    """One process of a job.

    Attributes:
        name: "rank 0", "ps 1" or "evaluator 0".
        role: "worker", "chief", "ps" or "evaluator".
        rank: Rank among the training processes; index within its role for any other.
        host: Where it runs.
        argv: What it runs.
        env: Variables added to its environment.
        address: "host:port" it will listen on, or "" when its library chooses.
        cores: Those of its host that it is bound to; all when empty.
    """

    name: str
    role: str
    rank: int
    host: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    address: str = ""
    cores: tuple[int, ...] = ()

    @property
    def rank_name(self) -> int | str:
        """Its number where it is a rank, else its name; before each line of its output, too."""
        return self.rank if self.name == f"rank {self.rank}" else self.name

    def with_env(self, more: Mapping[str, str]) -> Process:
        """Return this process with more variables.

        Args:
            more: Variables by name; they win over its own.

        Returns:
            A process like this one, with all of them.
        """
        return dataclasses.replace(self, env={**self.env, **more})


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What to run where; the one holder of a job's settings, which are the options of `dtk run`.

    Attributes:
        command: What every process runs.
        processes: What to start in place of that, where it is planned already.
        workers: Number of training processes; every slot of the hosts when None.
        communicator: As for `assign`.
        hosts: Where to run; this machine when empty.
        ps: Number of parameter servers.
        evaluator: Whether a process evaluates beside the training.
        bind: Whether ranks of a host are bound to a part of its cores each.
        max_restarts: How often the job is started again; with servers, each worker that a signal
            has ended.
        min_workers: Fewest to start the job again with; all when None.
        remote_shell: Command that reaches other hosts, called as `ssh` is.
        stall_timeout: Seconds without progress of any rank after which the job is ended; 0 for
            never.
        grace: Seconds between SIGTERM and SIGKILL; before that, what servers get to end by
            themselves after the chief.
        save_grace: Seconds that ranks have to begin a checkpoint when the job is stopped, and as
            many to write it.
        output_dir: Directory that gets one file for each process with its whole output, or None.
        variables: Variables of every rank.
        records_steps: Whether events have what was measured of every step.
    """

    command: Sequence[str] = ()
    processes: tuple[Process, ...] = ()
    workers: int | None = None
    communicator: str = "auto"
    hosts: tuple[Host, ...] = ()
    ps: int = 0
    evaluator: bool = False
    bind: bool = True
    max_restarts: int = 0
    min_workers: int | None = None
    remote_shell: str = ssh.DEFAULT_REMOTE_SHELL
    stall_timeout: float = progress.DEFAULT_TIMEOUT
    grace: float = 5.0
    save_grace: float = 0.0
    output_dir: str | os.PathLike[str] | None = None
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    records_steps: bool = False


def assign(
    command: Sequence[str],
    workers: int | None = None,
    *,
    hosts: Sequence[Host] = (),
    communicator: str = "collective",
    ps: int = 0,
    evaluator: bool = False,
    bind: bool = True,
    environ: Mapping[str, str] | None = None,
    survey: Callable[[str, int], ssh.HostFacts] = ssh.survey,
) -> list[Process]:
    """Decide which processes to start, where, and with which variables.

    Args:
        command: What every process runs, for example `[sys.executable, "train.py"]`.
        workers: Number of training processes, without the chief of parameter servers; every slot
            of `hosts` when None.
        hosts: Where to run; this machine, over loopback, when empty.
        communicator: What moves the bytes: "collective" (TF_CONFIG is set), "mpi" (the same, and
            the job starts MPI's server), "horovod" (Gloo; HOROVOD_RANK ... are set), or "auto":
            what DTK_COMMUNICATOR says, else mpi where it is installed and starts, else collective.
        ps: Number of parameter servers; with any, a chief is added as rank 0.
        evaluator: Whether to add a process that evaluates beside the training; with `ps` only.
        bind: Whether ranks that share a host are bound to a part of its cores each: the thread that
            computes then stays where it is while others send. Not with `ps`, whose processes wait
            at different times, nor where there are more ranks than cores, or the user asks for more
            threads than a part has.
        environ: Variables of the user's that win over defaults; `os.environ` when None.
        survey: Tells a host's free ports, cores and interface. The only part that is not pure.

    Returns:
        Training processes in rank order, then parameter servers, then the evaluator.

    Raises:
        ClusterError: The counts do not fit the hosts, or the communicator is unknown.

    >>> [(p.name, p.host) for p in assign(["python", "train.py"], workers=2)]
    [('rank 0', 'localhost'), ('rank 1', 'localhost')]
    """
    environ = os.environ if environ is None else environ
    if communicator == "auto":
        told = environ.get(COMMUNICATOR) or "auto"
        if told not in (*COMMUNICATORS, *_NOT_BETWEEN_PROCESSES):
            raise ClusterError(
                f"{COMMUNICATOR}={told!r}: unknown, expected {', '.join(COMMUNICATORS)}; unset it"
            )
        # Beside a server there is nothing for the others to do.
        communicator = told if told in COMMUNICATORS and not ps else "collective"
    check(command, workers, hosts, communicator, ps, evaluator)
    hosts = tuple(hosts) or (Host("localhost", workers or 1),)
    placed = _place(workers, hosts, ps, evaluator)
    per_host = collections.Counter(host for _, _, host in placed)
    facts = {host: survey(host, count) for host, count in per_host.items()}
    computing = collections.Counter(host for role, _, host in placed if role not in _WAITING)
    if communicator == "horovod":
        envs, addresses = _horovod(placed, facts), [""] * len(placed)
    else:
        envs, addresses = _collective(placed, facts, communicator)
    secret = {JOB_SECRET: environ.get(JOB_SECRET) or secrets.token_hex(16)}
    processes = []
    for (role, index, host), env, address in zip(placed, envs, addresses, strict=True):
        rank = index + (ps > 0 and role == "worker")  # the chief is rank 0
        name = f"{role} {index}" if role in ("ps", "evaluator") else f"rank {rank}"
        share = facts[host].threads // max(1, computing[host])
        env = {**_defaults(environ, share), **secret, "DTK_RUN": "1", **env}
        processes.append(Process(name, role, rank, host, tuple(command), env, address))
    return _bound(processes, facts) if bind and not ps else processes


def check(
    command: Sequence[str],
    workers: int | None,
    hosts: Sequence[Host],
    communicator: str,
    ps: int = 0,
    evaluator: bool = False,
) -> None:
    """Refuse what cannot be planned on any hosts, before these are asked.

    Args:
        command: As for `assign`.
        workers: As for `assign`.
        hosts: As for `assign`.
        communicator: As for `assign`.
        ps: As for `assign`.
        evaluator: As for `assign`.

    Raises:
        ClusterError: The counts do not fit, or the communicator is unknown.
    """
    if not command:
        raise ClusterError("no command to run; give at least a program, e.g. `python train.py`")
    if communicator not in COMMUNICATORS:
        raise ClusterError(
            f"--communicator {communicator}: unknown, expected {', '.join(COMMUNICATORS)}"
        )
    if workers is None and not hosts:
        raise ClusterError(
            "the number of processes is not given; add -n before the script, e.g. `dtk run -n 2 "
            "train.py`"
        )
    if workers is not None and not (isinstance(workers, int) and workers >= 1):
        raise ClusterError(f"-n {workers!r}: expected 1 or more, e.g. `dtk run -n 2 train.py`")
    if ps < 0:
        raise ClusterError(f"--ps {ps}: expected 0 or more, e.g. `dtk run -n 4 --ps 2 train.py`")
    if communicator in ("horovod", "mpi") and (ps or evaluator):
        raise ClusterError(
            f"parameter servers and evaluators need the collective communicator, not {communicator}"
        )
    if evaluator and not ps:
        # It has no rank in TF_CONFIG: among all-reduce ranks it would take itself for rank 0.
        raise ClusterError(
            "an evaluator needs parameter servers beside it; add some, e.g. `dtk run -n 2 --ps 1 "
            "--evaluator train.py`"
        )
    slots = sum(host.slots for host in hosts)
    most = MOST_ON_A_HOST * max(1, len(hosts))
    asked = slots if workers is None else workers
    for count, of in ((asked, "workers"), (ps, "parameter servers")):
        if count > most:
            raise ClusterError(
                f"{count} {of} on {max(1, len(hosts))} host(s), each of which takes "
                f"{MOST_ON_A_HOST} at most; give fewer, or more hosts"
            )
    if hosts and workers is not None and workers > slots:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ClusterError(
            f"-n {workers}: {listed} have {slots} slots; use -n {slots} or give the hosts more "
            "slots"
        )
    loopback = {host.name for host in hosts if ssh.is_loopback(host.name)}
    if loopback and len(hosts) > len(loopback):
        raise ClusterError(
            f"other hosts cannot reach {', '.join(sorted(loopback))}; give this machine's own "
            "name or address"
        )


def _place(
    workers: int | None, hosts: tuple[Host, ...], ps: int, evaluator: bool
) -> list[tuple[str, int, str]]:
    """Give every process its role, index within the role, and host."""
    slots = [host.name for host in hosts for _ in range(host.slots)]
    extra = (hosts[i % len(hosts)].name for i in range(ps + 2))
    placed = [("chief", 0, next(extra))] if ps else []
    placed += [("worker", index, host) for index, host in enumerate(slots[:workers])]
    placed += [("ps", index, next(extra)) for index in range(ps)]
    if evaluator:
        placed.append(("evaluator", 0, next(extra)))
    return placed


def _collective(
    placed: list[tuple[str, int, str]],
    facts: Mapping[str, ssh.HostFacts],
    communicator: str,
) -> tuple[list[dict[str, str]], list[str]]:
    """Return what TensorFlow's collectives read, and MPI, and the address of each process."""
    joined_by = communicator if len(placed) > 1 else "collective"
    ports: dict[str, Iterator[int]] = {host: iter(fact.ports) for host, fact in facts.items()}
    cluster: dict[str, list[str]] = {}
    for role, _, host in placed:
        listens = "127.0.0.1" if host == "localhost" else host
        cluster.setdefault(role, []).append(f"{listens}:{next(ports[host])}")
    frozen = {role: tuple(addresses) for role, addresses in cluster.items()}
    envs = []
    for role, index, host in placed:
        env = {COMMUNICATOR: joined_by, "TF_CONFIG": TFConfig(frozen, role, index).dumps()}
        if joined_by != "collective" and facts[host].interface not in ("", "lo"):
            env["OMPI_MCA_btl_tcp_if_include"] = facts[host].interface
        envs.append(env)
    return envs, [frozen[role][index] for role, index, _ in placed]


def _horovod(
    placed: list[tuple[str, int, str]], facts: Mapping[str, ssh.HostFacts]
) -> list[dict[str, str]]:
    """Return what Horovod's Gloo controller reads; the job adds the address of its rendezvous."""
    hosts = [host for _, _, host in placed]
    local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    envs = []
    for rank, host in enumerate(hosts):
        # "cross" is the group of the ranks that have the same local rank, one per host.
        cross = [r for r in range(len(hosts)) if local_ranks[r] == local_ranks[rank]]
        env = {
            COMMUNICATOR: "horovod",
            "DTK_HOSTS": ",".join(hosts),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_HOSTNAME": host,
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(len(hosts)),
            "HOROVOD_LOCAL_RANK": str(local_ranks[rank]),
            "HOROVOD_LOCAL_SIZE": str(hosts.count(host)),
            "HOROVOD_CROSS_RANK": str(cross.index(rank)),
            "HOROVOD_CROSS_SIZE": str(len(cross)),
        }
        if facts[host].interface:
            env["HOROVOD_GLOO_IFACE"] = facts[host].interface
        envs.append(env)
    return envs


def _bound(processes: list[Process], facts: Mapping[str, ssh.HostFacts]) -> list[Process]:
    """Divide the cores of each host that has several ranks, a core or more for each thread."""
    hosts = [process.host for process in processes]
    bound = []
    for rank, process in enumerate(processes):
        cores, count = facts[process.host].cores, hosts.count(process.host)
        place = hosts[:rank].count(process.host)
        begin, end = even_bounds(len(cores), place, count)
        threads = max(_threads(process.env[name]) for name in THREADS)
        free = count == 1 or threads > len(cores) // count
        bound.append(dataclasses.replace(process, cores=() if free else tuple(cores[begin:end])))
    return bound


def _threads(value: str) -> int:
    """Return how many threads a variable asks for; OMP_NUMTHREADS may say so for each level."""
    first = value.partition(",")[0].strip()
    return int(first) if first.isdecimal() else 1


def _defaults(environ: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return what every rank gets unless the user decided otherwise: its cores, and quiet.

    If it crashes in C++, it prints where in the script.
    """
    defaults = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1", **HUGE_PAGES}
    defaults["PYTHONFAULTHANDLER"] = "1"
    defaults |= dict.fromkeys(THREADS, str(max(1, cores)))
    return {name: environ.get(name, value) for name, value in defaults.items()}
