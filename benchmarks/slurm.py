"""A cluster of Slurm without machines: its daemons, and a node in each of several hosts."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import hosts

COMMANDS = ("munged", "slurmctld", "slurmd", "srun")
# Nothing of control groups, accounting or switches, which single machines lack.
SETTINGS = """ClusterName=dtk
SlurmctldHost={name}({gate})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=defer,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
KillWait=30
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:8
"""
STARTED_SECONDS = 30


def missing() -> list[str]:
    """Return the commands of Slurm and munge that are not on this machine."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return [command for command in COMMANDS if shutil.which(command, path=path) is None]


@contextlib.contextmanager
def cluster(count: int) -> Iterator[Mapping[str, str]]:
    """Start `count` nodes of Slurm, each a network namespace whose own name means loopback there.

    Yields the variables by which `srun`, `sbatch` and `scontrol` find it. Everything is gone
    afterwards, jobs included.
    """
    with (
        hosts.hosts(count) as (addresses, shell),
        tempfile.TemporaryDirectory(prefix="slurm") as made,
        contextlib.ExitStack() as daemons,
    ):
        folder = Path(made)
        names = [_output(shell, address, "hostname") for address in addresses]
        gate = addresses[0].rpartition(".")[0] + ".254"
        with socket.create_server((gate, 0)) as free:
            port = free.getsockname()[1]
        nodes = [
            f"NodeName={name} NodeAddr={address} CPUs={os.cpu_count()} State=UNKNOWN\n"
            for name, address in zip(names, addresses, strict=True)
        ]
        told = SETTINGS.format(name=os.uname().nodename, gate=gate, port=port, folder=folder)
        settings = folder / "slurm.conf"
        settings.write_text(told + "".join(nodes))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        for name in ("munge", "state", *(f"{use}-{n}" for n in names for use in ("spool", "tmp"))):
            (folder / name).mkdir(mode=0o700)
        key = folder / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        environment = {
            **os.environ,
            "SLURM_CONF": str(settings),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }

        def start(*command: str) -> None:
            log = daemons.enter_context(open(folder / "daemons.log", "a"))
            daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            daemons.callback(_end, daemon)

        places = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={folder}/munge/{file}" for option, file in places.items()]
        start("munged", "--foreground", "--force", f"--log-file={folder}/munge/log", *options)
        start("slurmctld", "-D", "-f", str(settings))
        for name, address in zip(names, addresses, strict=True):
            start(shell, address, f"SLURM_CONF={settings} exec slurmd -D -N {name}")
        daemons.callback(_cancel, environment)
        _await_nodes(count, environment, folder)
        yield environment


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _await_nodes(count: int, environment: Mapping[str, str], folder: Path) -> None:
    deadline = time.monotonic() + STARTED_SECONDS
    command, said = ["sinfo", "--noheader", "--format=%D %t"], ""
    while said != f"{count} idle":
        if time.monotonic() > deadline:
            log = (folder / "daemons.log").read_text()[-2000:]
            raise TimeoutError(f"Slurm's nodes are {said!r} after {STARTED_SECONDS} s: {log}")
        time.sleep(0.2)
        asked = subprocess.run(
            command, env=environment, check=False, capture_output=True, text=True
        )
        said = asked.stdout.strip()


def _cancel(environment: Mapping[str, str]) -> None:
    """End every job and wait for its processes, which outlive the daemons."""
    subprocess.run(["scancel", "--signal=KILL", "--user=root"], env=environment, check=False)
    for _ in range(50):
        left = subprocess.run(
            ["squeue", "--noheader"], env=environment, check=False, capture_output=True
        )
        if not left.stdout.strip():
            return
        time.sleep(0.1)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
