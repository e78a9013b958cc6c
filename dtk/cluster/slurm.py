"""Started by `srun`.

Only a job *step* counts. The shell of `sbatch` has SLURM_PROCID=0 as well but no SLURM_STEP_ID, and
the shell of `salloc` has a step id above every real one (4294967290, SLURM_INTERACTIVE_STEP): in
both, a script runs alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import TypeVar

from dtk.cluster.hostfile import Host
from dtk.cluster.place import Place
from dtk.cluster.variables import integer, place
from dtk.errors import ClusterError

T = TypeVar("T")
# Step ids from here on are Slurm's own (batch, interactive, extern, pending).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
PORTS = range(12000, 32000)  # below Linux's ephemeral range, which starts at 32768
_PORTS_PER_JOB = 128
_PORTS_PER_STEP = 16

# More than any machine has: what asks for more is damaged, and would fill the memory.
_MOST = 1 << 17
_REPEAT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_BRACKETS = re.compile(r"([^\[\]]*)\[([^\[\]]*)\]")
# Of a task: its node, and its number there.
_ON_NODE = ("SLURM_NODEID", "SLURM_LOCALID")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def read(environ: Mapping[str, str]) -> Place | None:
    """Read what `srun` sets in a job step.

    >>> place = read({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2",
    ...               "SLURM_NTASKS": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    ...               "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2,1"})
    >>> place.rank, place.local_size, place.meeting
    (2, 1, 'n1:12896')
    """
    if not in_step(environ):
        return None
    size_name = next(
        (name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ),
        "SLURM_NPROCS",
    )
    rank, size = place(environ, "SLURM_PROCID", size_name)
    step = environ["SLURM_STEP_ID"]
    reason = f"srun set SLURM_STEP_ID={step}, SLURM_PROCID={rank} and {size_name}={size}"
    told = {name: integer(environ, name) for name in _ON_NODE if name in environ}
    local_rank = told.get("SLURM_LOCALID", 0)
    here = Place("slurm", rank, size, local_rank, local_rank + 1)

    tasks_text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    nodes_text = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not tasks_text or not nodes_text or len(told) < len(_ON_NODE):
        return dataclasses.replace(
            here,
            reason=f"{reason}; it does not tell which rank is on which host",
            tells_local_rank="SLURM_LOCALID" in told or size == 1,
        )
    tasks, nodes = expand_tasks_per_node(tasks_text), expand_nodelist(nodes_text)
    # Rank 0 is on the first node, but where the user has placed each rank.
    is_placed = environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary") and len(nodes) > 1
    is_elsewhere = rank == 0 and told["SLURM_NODEID"] > 0 and not is_placed
    there = tasks[told["SLURM_NODEID"] : told["SLURM_NODEID"] + 1]
    is_there = 0 <= local_rank < max(there, default=0) and not is_elsewhere
    if len(tasks) != len(nodes) or sum(tasks) != size or not is_there:
        places = " and ".join(f"{name}={value}" for name, value in told.items())
        raise ClusterError(
            f"{len(nodes)} nodes ({nodes_text}) with {tasks_text} tasks per node, {size_name}="
            f"{size}, {places} do not fit together; start again with `srun -n N python train.py`, "
            "without exporting SLURM_ variables"
        )
    meeting = f"{nodes[0]}:{port_base(environ)}" if size > 1 and not is_placed else ""
    return dataclasses.replace(here, local_size=there[0], reason=reason, meeting=meeting)


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether this is a task of `srun`, not the shell of `sbatch` or `salloc`.

    >>> in_step({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"})
    False
    """
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return False
    return 0 <= integer(environ, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP


def step_name(environ: Mapping[str, str]) -> str:
    """Return by what a step differs from all others; "" outside a step."""
    return f"{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}" if in_step(environ) else ""


def allocation(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts of the job whose shell this is, with a slot for each task; () elsewhere.

    >>> allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "3",
    ...             "SLURM_TASKS_PER_NODE": "2,1"})
    (Host(name='n1', slots=2), Host(name='n2', slots=1))
    """
    if "SLURM_JOB_ID" not in environ or in_step(environ):
        return ()
    names = expand_nodelist(environ.get("SLURM_JOB_NODELIST", "localhost"))
    # Of a job that has asked for nodes alone, Slurm makes as many tasks as there are cores.
    asked = {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NPROCS"} & environ.keys()
    tasks = expand_tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", "1")) if asked else ()
    slots = tasks if len(tasks) == len(names) else (1,) * len(names)
    return tuple(Host(name, count) for name, count in zip(names, slots, strict=True))


def remote_shell(environ: Mapping[str, str]) -> str:
    """Return what reaches other hosts of the job, as ssh does."""
    job = f"--jobid={environ['SLURM_JOB_ID']}"
    return shlex.join([sys.executable, "-m", "dtk.cluster.srun_shell", job])


def process_manager(environ: Mapping[str, str]) -> str:
    """Return what `srun --mpi` offers an MPI to find its ranks by: "pmix", "pmi2", or "" for none.

    >>> process_manager({"PMIX_RANK": "0"}), process_manager({"SLURM_MPI_TYPE": "none"})
    ('pmix', '')
    """
    if "PMIX_RANK" in environ:
        return "pmix"
    return "pmi2" if "PMI_RANK" in environ else ""


def offers_mpi(environ: Mapping[str, str]) -> bool:
    """Return whether some MPI finds its ranks in this step.

    >>> offers_mpi({"SLURM_MPI_TYPE": "none"}), offers_mpi({"PMI_RANK": "1"})
    (False, True)
    """
    # By the last two Cray's and Intel's MPI find ranks.
    names = ("PMIX_RANK", "PMI_RANK", "PALS_RANKID", "I_MPI_PMI_LIBRARY")
    return environ.get("SLURM_MPI_TYPE", "none") != "none" or any(one in environ for one in names)


def end_step(environ: Mapping[str, str]) -> None:
    """Let Slurm end every task of this step, a stopped one too; nothing outside a step.

    `srun` leaves the others alone when one task fails, without `--kill-on-bad-exit`. This one gets
    a SIGTERM, too.
    """
    scancel = shutil.which("scancel")
    step = step_name(environ)
    if scancel is None or not step or "SLURM_JOB_ID" not in environ:
        return
    # Waited for: what a task leaves behind may be killed with it.
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([scancel, "--quiet", step], timeout=10, check=False)


def port_base(environ: Mapping[str, str]) -> int:
    """Derive the port at which ranks of this step meet from job and step id.

    Jobs 1 to 156 ids apart do not meet. `DTK_PORT_BASE` overrides it where a port is taken.

    >>> port_base({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
    12896
    """
    if "DTK_PORT_BASE" in environ:
        base = integer(environ, "DTK_PORT_BASE")
        if not 1 <= base <= 65000:
            raise ClusterError(f"DTK_PORT_BASE={base}, expected a port from 1 to 65000")
        return base
    job = integer(environ, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environ else 0
    offset = job * _PORTS_PER_JOB + integer(environ, "SLURM_STEP_ID") * _PORTS_PER_STEP
    return PORTS[offset % (len(PORTS) - _PORTS_PER_JOB)]


def expand_tasks_per_node(text: str) -> tuple[int, ...]:
    """Expand Slurm's run-length list of tasks per node.

    >>> expand_tasks_per_node("2(x3),1")
    (2, 2, 2, 1)
    """
    return _few(_counts(text), f"tasks per node {text!r}")


def _counts(text: str) -> Iterator[int]:
    for part in text.split(","):
        match = _REPEAT.fullmatch(part.strip())
        if match is None:
            raise ClusterError(
                f"tasks per node {text!r}: {part!r} is not understood, expected e.g. 2(x3),1"
            )
        yield from itertools.repeat(int(match[1]), int(match[2] or 1))


def expand_nodelist(text: str) -> tuple[str, ...]:
    """Expand Slurm's compact list of host names, keeping order and leading zeros.

    >>> expand_nodelist("node[01-03,7],gpu2")
    ('node01', 'node02', 'node03', 'node7', 'gpu2')
    """
    if names := _few(_names(text), f"node list {text!r}"):
        return names
    raise ClusterError("node list is empty, expected e.g. node[01-03,7],gpu2")


def _names(text: str) -> Iterator[str]:
    # Commas inside brackets belong to the range, the others separate names.
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[\[\],]", text):
        if item in "[]":
            raise ClusterError(
                f"node list {text!r} has an unbalanced bracket, expected e.g. node[01-03,7],gpu2"
            )
        if item != ",":
            yield from _expanded(item.strip(), text)


def _expanded(name: str, text: str) -> Iterator[str]:
    match = _BRACKETS.match(name)
    if match is None:
        yield name
        return
    for number in _numbers(match[2], text):
        for tail in _expanded(name[match.end() :], text):
            yield match[1] + number + tail


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ClusterError(
                f"node list {text!r}: [{ranges}] is not a range, expected e.g. node[01-03,7]"
            )
        first, last = match[1], match[2] or match[1]
        yield from (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))


def _few(items: Iterator[T], what: str) -> tuple[T, ...]:
    taken = tuple(itertools.islice(items, _MOST + 1))
    if len(taken) > _MOST:
        raise ClusterError(f"{what}: more than {_MOST} nodes, expected fewer")
    return taken
