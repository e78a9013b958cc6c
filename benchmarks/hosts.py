"""Hosts without machines: network namespaces on a bridge, each with a link of limited speed."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Control groups of cores: in version 1 they have a place of their own.
VERSION_1 = Path("/sys/fs/cgroup/cpu")
CORES = VERSION_1 if VERSION_1.is_dir() else VERSION_1.parent
# The least that the kernel lets a control group have at a time: a host that has used it up waits,
# and so does whoever waits for its message.
QUOTA = 1000  # microseconds
# As a launcher gives to as many workers as there are cores: hosts that share them look idle to it.
THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
ONE_THREAD = dict.fromkeys(THREADS, "1")


@contextlib.contextmanager
def hosts(
    count: int, mbit: int | None = None, burst: str = "256kb", cores: float | None = None
) -> Iterator[tuple[list[str], str]]:
    """Make `count` hosts whose links carry `mbit` Mbit/s each way.

    After a pause, a link lets `burst` through at once. Each host computes as fast as `cores` cores
    do, such as 0.5; without, all share those of the machine.

    Yields their addresses, and a program that stands for ssh. Everything is gone afterwards.
    """
    tools = ("ip", "tc") if mbit else ("ip",)
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if os.getuid() != 0 or missing:
        sys.exit(
            "network namespaces need root and iproute2 (apt-get install iproute2); without them "
            "use --mbit 0, which measures processes on loopback"
        )
    mark, net = f"dtk{uuid.uuid4().hex[:6]}", f"10.{200 + os.getpid() % 50}.{os.getpid() % 250}"
    undo: list[str] = []
    # What ends us so would leave all of it behind.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    def do(command: str, cure: str | None = None) -> None:
        subprocess.run(shlex.split(command), check=True, capture_output=True)
        if cure:
            undo.append(cure)

    folders: list[Path] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            do(f"ip link add {mark}b type bridge", f"ip link del {mark}b")
            do(f"ip addr add {net}.254/24 dev {mark}b")
            do(f"ip link set {mark}b up")
            for n in range(1, count + 1):
                do(f"ip netns add {mark}{n}", f"ip netns del {mark}{n}")
                veth = f"{mark}v{n}"
                do(f"ip link add {veth} type veth peer name eth0 netns {mark}{n}")
                do(f"ip link set {veth} master {mark}b up")
                do(f"ip -n {mark}{n} addr add {net}.{n}/24 dev eth0")
                for device in ("eth0", "lo"):
                    do(f"ip -n {mark}{n} link set {device} up")
                if mbit:
                    limit = f"root tbf rate {mbit}mbit burst {burst} latency 200ms"
                    do(f"tc qdisc add dev {veth} {limit}")
                    do(f"ip netns exec {mark}{n} tc qdisc add dev eth0 {limit}")
                # What `ip netns exec` shows as /etc/hosts; Debian gives a host's own name this
                # address, on which no other host can reach it.
                names = Path("/etc/netns", f"{mark}{n}", "hosts")
                names.parent.mkdir(parents=True)
                folders.append(names.parent)
                others = [f"{net}.{k} {mark}{k}" for k in range(1, count + 1) if k != n]
                known = ["127.0.0.1 localhost", f"127.0.1.1 {mark}{n}", *others]
                names.write_text("\n".join([*known, f"{net}.254 {os.uname().nodename}", ""]))
                if cores:
                    folders.append(share_of_cores(f"{mark}{n}", cores))
            join = f'echo $$ > "{CORES}/{mark}$n/cgroup.procs"; ' if cores else ""
            shell = Path(folder, "shell")
            shell.write_text(
                f"#!/bin/sh\nn=${{1##*.}}; shift; {join}exec ip netns exec {mark}$n unshare --uts "
                f'sh -c "hostname {mark}$n; $*"\n'
            )
            shell.chmod(0o755)
            yield [f"{net}.{n}" for n in range(1, count + 1)], str(shell)
        finally:
            for command in reversed(undo):
                subprocess.run(shlex.split(command), check=False, capture_output=True)
            for path in folders:
                remove(path)
            signal.signal(signal.SIGTERM, before)


def share_of_cores(name: str, cores: float) -> Path:
    """Make a control group whose processes compute as fast as so many cores do."""
    period = max(QUOTA, round(QUOTA / cores))
    quota = round(cores * period)
    group = CORES / name
    try:
        group.mkdir()
        if CORES == VERSION_1:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (CORES / "cgroup.subtree_control").write_text("+cpu")
            (group / "cpu.max").write_text(f"{quota} {period}")
    except OSError as error:
        sys.exit(f"--cores needs root and control groups: {error}; leave it out")
    return group


def remove(path: Path) -> None:
    """Remove a directory; a control group goes once it is empty, and its files are not files."""
    if not path.is_relative_to(CORES):
        shutil.rmtree(path)
        return
    for _ in range(50):
        with contextlib.suppress(OSError):
            path.rmdir()
            return
        time.sleep(0.1)
    print(f"{path} could not be removed: a process is still in it", file=sys.stderr)


def run(
    script: str,
    options: list[str],
    workers: int,
    mbit: int | None,
    env: dict[str, str],
    burst: str = "256kb",
    cores: float | None = None,
) -> Any:
    """Run a script on so many workers, each on a host of its own; returns what rank 0 found.

    It prints a line of RESULT and JSON where DTK_BENCHMARK_RANK is set. Without `mbit` and `cores`
    workers are processes on loopback.
    """
    env = {"DTK_BENCHMARK_RANK": "1", **env}
    return result(dtk("run", [script, *options], workers, mbit, env, burst, cores))


def result(printed: str) -> Any:
    """What stands behind RESULT in what a job printed."""
    return json.loads(printed.partition("RESULT ")[2].splitlines()[0])


def dtk(
    command: str,
    options: list[str],
    workers: int,
    mbit: int | None,
    env: dict[str, str],
    burst: str = "256kb",
    cores: float | None = None,
) -> str:
    """`run`, for any command of dtk's that starts workers."""
    argv = [sys.executable, "-m", "dtk.cli.main", command]
    # Other links have the same addresses.
    env = {**os.environ, "DTK_CALIBRATE": "again", **env}
    if not mbit and not cores:
        return _output([*argv, "-n", str(workers), *options], env)
    with hosts(workers, mbit, burst, cores) as (addresses, shell):
        where = ["--hosts", ",".join(f"{a}:1" for a in addresses), "--remote-shell", shell]
        return _output([*argv, *where, *options], env)


def burst_of(mbit: int) -> str:
    """What a link should let through at once: 2 ms of it; with less, tc does not keep the rate."""
    return f"{max(16, mbit // 4)}kb"


def _output(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3600, env=env)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} ended with {done.returncode}")
    return done.stdout
