"""One process on its own: what every script is until a launcher says otherwise."""

from __future__ import annotations

from dtk.cluster.environment import Environment


def read() -> Environment:
    """Return the place of a process on its own: a world of one.

    >>> read().size
    1
    """
    return Environment(
        kind="single",
        rank=0,
        size=1,
        hosts=("localhost",),
        reason="no variable of a launcher is set (HOROVOD_RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, "
        "PMIX_RANK, SLURM_STEP_ID, TF_CONFIG): one process on its own",
    )
