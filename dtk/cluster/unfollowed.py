"""Launchers that dtk does not follow: each of their processes would train alone, with success.

| launcher | rank | size |
|---|---|---|
| torchrun, torch jobs of Kubeflow, Azure ML and most clouds | RANK | WORLD_SIZE |
| MVAPICH2's mpirun_rsh | MV2_COMM_WORLD_RANK | MV2_COMM_WORLD_SIZE |
| SkyPilot | SKYPILOT_NODE_RANK | SKYPILOT_NUM_NODES |
| Flux | FLUX_TASK_RANK | FLUX_JOB_SIZE |
| LSF's jsrun | JSM_NAMESPACE_RANK | JSM_NAMESPACE_SIZE |

Of half a set, a rank above 0 is one of several. Ray gives its workers neither. DTK_ALONE=1 trains
alone on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dtk.cluster.slurm import in_step
from dtk.errors import ClusterError

ALONE = "DTK_ALONE"
_LAUNCHERS = (
    ("torchrun, or a torch job of Kubeflow or Azure ML", "RANK", "WORLD_SIZE"),
    ("MVAPICH2's mpirun_rsh", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
    ("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("LSF's jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
)
_OF_RAY = "RAY_RAYLET_PID"  # of its workers, and not of the script that starts them


def check(environ: Mapping[str, str]) -> None:
    """Refuse to train alone where a launcher has started several processes.

    Raises:
        ClusterError: What was seen, and the ways out.

    >>> check({"RANK": "0", "WORLD_SIZE": "1"})
    >>> check({"RANK": "1", "WORLD_SIZE": "4"})
    Traceback (most recent call last):
    dtk.errors.ClusterError: RANK=1 and WORLD_SIZE=4 are those of torchrun, or a torch job of ...
    """
    if environ.get(ALONE) == "1":
        return
    for launcher, *names in _LAUNCHERS:
        told = {name: environ[name] for name in names if environ.get(name)}
        rank, size = (_number(told.get(name, "")) for name in names)
        if max(size, rank + 1) > 1:
            seen = " and ".join(f"{name}={value}" for name, value in told.items())
            what = "are those" if len(told) > 1 else "is one"
            raise _refused(f"{seen} {what} of {launcher}", str(max(size, rank + 1)))
    if _OF_RAY in environ:
        raise _refused(
            f"{_OF_RAY} is set in workers of Ray, and there is no TF_CONFIG, which Ray Train's "
            "TensorflowTrainer would set"
        )


def idle_tasks(environ: Mapping[str, str]) -> str | None:
    """Return what to say where Slurm has room for several tasks, and one process runs.

    >>> idle_tasks({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})
    'SLURM_NTASKS=4, but this process is no task of srun: it trains alone; start with `srun ...`'
    """
    tasks = environ.get("SLURM_NTASKS", "")
    if environ.get(ALONE) == "1" or in_step(environ) or _number(tasks) < 2:
        return None
    return (
        f"SLURM_NTASKS={tasks}, but this process is no task of srun: it trains alone; start with "
        "`srun ...`"
    )


def _number(text: str) -> int:
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else 0


def _refused(seen: str, count: str = "all") -> ClusterError:
    return ClusterError(
        f"{seen}: dtk does not follow that launcher, and each of {count} processes would train "
        "alone. Start the script with `dtk run`, mpirun or srun, or give each process a TF_CONFIG; "
        f"to train alone on purpose, set {ALONE}=1"
    )
