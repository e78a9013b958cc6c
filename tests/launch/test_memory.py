"""A rank that the kernel kills for want of memory is said to be that: with real limits."""

import contextlib
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from dtk.cluster.usage import MemoryKills, cores_allowed

from support.launched import dtk_run

pytestmark = pytest.mark.command

GROUPS = Path("/sys/fs/cgroup")
FILL = """
import os, time
if os.environ["R"] == "1":
    held = []
    while True:
        held.append(bytearray(8 << 20))
time.sleep(60)
"""
HELD = "import os, time; held = b'1' * 300_000_000; time.sleep(3); os.kill(os.getpid(), 9)"
RUN = """
import os, sys, io
with open(sys.argv[1], "w") as group:
    group.write(str(os.getpid()))
from dtk.launch import Job, JobSpec, Process
command = (sys.executable, "-c", sys.argv[2])
host = sys.argv[4]
ranks = [Process(f"rank {r}", "worker", r, host, command, {"R": str(r)}) for r in (0, 1)]
settings = {"remote_shell": sys.argv[3], "grace": 1.0, "stall_timeout": 30.0}
with Job(JobSpec(processes=tuple(ranks), max_restarts=3, **settings)) as job:
    sys.exit(job.wait(timeout=60))
"""


@pytest.fixture
def group():
    """A control group whose processes may have 300 MB together."""
    version_1 = (GROUPS / "memory").is_dir()
    path = (GROUPS / "memory" if version_1 else GROUPS) / f"dtk{uuid.uuid4().hex[:8]}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        limit = path / ("memory.limit_in_bytes" if version_1 else "memory.max")
        if not limit.exists():
            pytest.skip("control groups limit no memory here")
        limit.write_text(str(300 << 20))
        swap = path / ("memory.memsw.limit_in_bytes" if version_1 else "memory.swap.max")
        with contextlib.suppress(OSError):  # a kernel that counts no swap
            swap.write_text(str(300 << 20) if version_1 else "0")
        yield path
    finally:
        path.rmdir()


@pytest.mark.parametrize("host", ["localhost", "node1.invalid"])
def test_a_rank_that_is_killed_for_want_of_memory(group, tmp_path, host):
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\nshift; exec sh -c "$*"\n')
    shell.chmod(0o755)
    command = [sys.executable, "-c", RUN, str(group / "cgroup.procs"), FILL, str(shell), host]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 137
    assert f"dtk: rank 1, host {host}, failed first" in done.stderr
    said = "by SIGKILL (exit code 137), probably by the kernel's out-of-memory killer"
    assert said in done.stderr
    assert "need less memory. When last seen, rank 1 held 0." in done.stderr
    assert "of the 0.3 GB of its host." in done.stderr


def test_another_kill_is_not(tmp_path):
    (tmp_path / "train.py").write_text(HELD)
    done = dtk_run("-n", "2", "--communicator", "collective", tmp_path / "train.py")
    assert done.returncode == 137 and "probably by the kernel" not in done.stderr
    assert "dtk: SIGKILL comes from outside: mostly from the kernel, a container" in done.stderr
    held, allowed = re.search(r"held (\S+) of the (\S+) GB of its host\.", done.stderr).groups()
    assert 0.3 <= float(held) < 0.5 < float(allowed)


@pytest.mark.parametrize(
    "told, file",
    [
        ("4:memory:/job\n0::/\n", "memory/job/memory.oom_control"),
        ("0::/job\n", "job/memory.events"),
    ],
    ids=["version 1", "version 2"],
)
def test_kills_are_counted_in_the_rank_s_own_group(tmp_path, told, file):
    """Those of other containers of the machine are not its own."""
    proc, counts = tmp_path / "proc", tmp_path / "groups" / file
    (proc / "7").mkdir(parents=True)
    counts.parent.mkdir(parents=True)
    (proc / "7" / "cgroup").write_text(told)
    (proc / "vmstat").write_text("pgfault 1\noom_kill 3\n")
    counts.write_text("under_oom 0\noom_kill 1\n")
    kills = MemoryKills(7, str(proc), str(tmp_path / "groups"))
    (proc / "vmstat").write_text("oom_kill 4\n")
    assert not kills.are_more()
    counts.write_text("oom_kill 2\n")
    assert kills.are_more()
    counts.unlink()
    machine = MemoryKills(7, str(proc), str(tmp_path / "groups"))
    (proc / "vmstat").write_text("oom_kill 5\n")
    assert machine.are_more()


@pytest.mark.parametrize(
    ("group", "files", "allowed"),
    [
        ("0::/pod/box", {"pod/cpu.max": "150000 100000", "pod/box/cpu.max": "max 100000"}, 2),
        ("0::/", {"cpu.max": "400000 100000"}, 4),
        ("4:cpu,cpuacct:/docker/7", {"cpu/cpu.cfs_quota_us": "50000"}, 1),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1"}, None),
    ],
    ids=["group above", "container", "cgroup 1", "no limit"],
)
def test_the_cores_of_a_container_are_counted(group, files, allowed, tmp_path):
    """Breaks as 64 threads that share the time of four cores."""
    (tmp_path / "cgroup").write_text(f"{group}\n")
    for name, content in {**files, "cpu/cpu.cfs_period_us": "100000"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    assert cores_allowed(str(tmp_path), str(tmp_path)) == allowed
