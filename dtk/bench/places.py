"""Starting the agents of a world of `dtk bench`, by what joins its ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from dtk.bench import agent
from dtk.bench.setting import check_names
from dtk.cluster import Host, mpi_installs
from dtk.errors import ClusterError, CommunicatorError
from dtk.launch import COMMUNICATORS, Process, job_options, machines, plan

MPI = "horovod-mpi"
LAUNCHERS = (*(name for name in COMMUNICATORS if name != "auto"), MPI)
# Their threads exchange messages all the time, also when nothing is reduced.
BUSY = ("horovod", MPI)
_AGENT = (sys.executable, "-m", "dtk.bench.agent")
_SHARED = {
    # A process that was stopped for as long as others were measured is not lost.
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "86400",
    # Worlds share a GPU: none may take all of its memory.
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}

Survey = Callable[[str, int], machines.HostFacts]


def usual() -> str:
    """Return what joins the ranks of `dtk run` unless told otherwise."""
    return "collective" if mpi_installs.mpirun() is None else "mpi"


def check(launcher: str, hosts: Sequence[Host]) -> None:
    """Refuse a launcher that cannot start ranks on these hosts."""
    check_names("--communicator", [launcher], LAUNCHERS)
    if launcher == MPI:
        check_mpirun(hosts)
    job_options.check_installed("horovod" if launcher == MPI else launcher)


def check_mpirun(hosts: Sequence[Host]) -> None:
    """Refuse `mpirun` where it cannot start processes."""
    _check_here(hosts)
    if mpi_installs.find_other("mpirun") is None:
        raise CommunicatorError(
            "no mpirun: install Debian's openmpi-bin and libopenmpi-dev, then `dtk install-horovod`"
        )


def _check_here(hosts: Sequence[Host]) -> None:
    if hosts:
        raise ClusterError(
            f"{MPI} and mpi4py, which mpirun starts, are measured on this machine only; leave "
            "--hosts out"
        )


def place(
    launcher: str, command: Sequence[str], workers: int, hosts: Sequence[Host], survey: Survey
) -> list[Process]:
    """Plan the processes of a world, so that every rank gets its share of the cores."""
    argv = [*_AGENT, *command]
    kind = "horovod" if launcher in BUSY else launcher
    facts: dict[str, machines.HostFacts] = {}

    def noted(host: str, ports: int) -> machines.HostFacts:
        facts[host] = survey(host, ports)
        return facts[host]

    planned = plan(argv, workers, hosts=hosts, communicator=kind, survey=noted)
    if launcher == MPI:
        # Agents bind themselves, to the parts that `dtk run` would give them.
        shares = {
            **_SHARED,
            **{n: v for n, v in planned[0].env.items() if not n.startswith(("HOROVOD_", "DTK_"))},
            agent.CORES: json.dumps([one.cores for one in planned]),
        }
        return [mpirun(argv, workers, shares)]
    return [
        dataclasses.replace(
            one, env={**one.env, **_SHARED, **_for_torch(one, planned, facts[one.host].interface)}
        )
        for one in planned
    ]


def _for_torch(process: Process, planned: Sequence[Process], interface: str) -> dict[str, str]:
    """Return the variables by which PyTorch's processes find each other.

    Its own launcher sets them, and Gloo reads them.
    """
    env = {"RANK": str(process.rank), "WORLD_SIZE": str(len(planned))}
    host, _, port = planned[0].address.rpartition(":")
    if port:
        env |= {"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}
    if interface:
        # By the name a host gives itself Gloo may find no address, or one of loopback.
        env["GLOO_SOCKET_IFNAME"] = interface
    return env


def mpirun(
    command: Sequence[str],
    workers: int,
    env: Mapping[str, str],
    binding: Sequence[str] = ("--bind-to", "none"),
) -> Process:
    """Return one process that starts all ranks, on this machine."""
    argv = [mpi_installs.find_other("mpirun") or "mpirun", "--oversubscribe", *binding]
    if os.geteuid() == 0:
        argv.append("--allow-run-as-root")
    # A rank that waits must not keep the others from computing.
    argv += ["--mca", "mpi_yield_when_idle", "1", "-np", str(workers), *command]
    return Process("mpirun", "worker", 0, "localhost", tuple(argv), env)
