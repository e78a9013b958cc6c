"""What says that a process which trains alone may be one of several.

DTK_ALONE=1 trains alone on purpose, where no launcher of MPI, Slurm or TF_CONFIG says otherwise,
and in programs that a rank has started.
"""

from __future__ import annotations

from collections.abc import Mapping

from dtk.cluster.slurm import in_step
from dtk.cluster.variables import is_number
from dtk.errors import ClusterError

ALONE = "DTK_ALONE"
_OF_RAY = "RAY_RAYLET_PID"  # of its workers, and not of the script that starts them


def is_on_purpose(environ: Mapping[str, str]) -> bool:
    """Return whether this process is to train alone."""
    return environ.get(ALONE) == "1"


def check(environ: Mapping[str, str]) -> None:
    """Refuse to train alone in a worker of Ray, which says nothing of the others.

    >>> check({})
    >>> check({"RAY_RAYLET_PID": "7", "RANK": "0", "WORLD_SIZE": "1"})
    """
    is_sole = environ.get("WORLD_SIZE") == "1"
    if _OF_RAY in environ and not is_sole and not is_on_purpose(environ):
        raise ClusterError(
            f"{_OF_RAY} is set in workers of Ray, but neither RANK nor TF_CONFIG, so that each of "
            "them would train alone. Start them by dtk.engines.ray.KerasTrainer, or by Ray Train's "
            f"TensorflowTrainer; to train alone on purpose, set {ALONE}=1"
        )


def idle_tasks(environ: Mapping[str, str]) -> str | None:
    """Return what to say where there may be several processes, and each trains alone.

    >>> idle_tasks({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})
    'SLURM_NTASKS=4, but this process is no task of srun: it trains alone; start with `srun ...`'
    >>> idle_tasks({"JOB_COMPLETION_INDEX": "0"})
    'JOB_COMPLETION_INDEX=0, but no WORLD_SIZE: each pod of this Indexed Job trains alone; ...'
    """
    if is_on_purpose(environ):
        return None
    tasks = environ.get("SLURM_NTASKS", "")
    if not in_step(environ) and is_number(tasks) and int(tasks) > 1:
        return (
            f"SLURM_NTASKS={tasks}, but this process is no task of srun: it trains alone; start "
            "with `srun ...`"
        )
    if "JOB_COMPLETION_INDEX" in environ and "WORLD_SIZE" not in environ:
        return (
            f"JOB_COMPLETION_INDEX={environ['JOB_COMPLETION_INDEX']}, but no WORLD_SIZE: each pod "
            "of this Indexed Job trains alone; to train together, set WORLD_SIZE and MASTER_ADDR "
            "in its manifest"
        )
    return None
