"""Ways to run dtk's ranks in the processes of other engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtk.cluster.variables import JOB_SECRET, is_foreign

# What has started the engine itself, as by `srun`, may have left these, too.
_OF_STARTERS = ("DTK_RUN", "MV2_COMM_WORLD_", "SLURM_PROCID", "SLURM_STEP_ID", "TORCHELASTIC_")


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an engine's process that do not tell what place it has itself."""
    by_mpirun = "OMPI_COMM_WORLD_RANK" in environ  # and not by the user
    others = (*_OF_STARTERS, "OMPI_MCA_") if by_mpirun else _OF_STARTERS
    return {
        name: value
        for name, value in environ.items()
        if not is_foreign(name) and not name.startswith(others)
    }


def variables_of(
    rank: int, nodes: Sequence[str], address: str, port: int | str, secret: str
) -> dict[str, str]:
    """Return what tells a rank its place, by torch's convention.

    Args:
        rank: Its number.
        nodes: Where each rank is.
        address: Where rank 0 is reached.
        port: At which port.
        secret: The job's.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(nodes)),
        "LOCAL_RANK": str(nodes[:rank].count(nodes[rank])),
        "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        JOB_SECRET: secret,
    }
