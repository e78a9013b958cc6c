"""Facts that one process knows about the job it belongs to. No TensorFlow here."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Environment:
    """The place of this process in the job.

    Attributes:
        kind: "single", "mpi", "horovod", "slurm" or "tf_config".
        rank: Index of this process among the training processes (chief first), `0 <= rank < size`.
        size: Number of training processes.
        local_rank: Index among those on the same host.
        local_size: How many are on the same host.
        hosts: Host name (no port) of every rank in rank order; empty when the launcher does not
            tell.
        addresses: "host:port" of every rank in rank order; empty when the launcher does not tell.
        role: "worker", "chief", "ps" or "evaluator".
        reason: One sentence saying which variables were read and why this kind won.
        roles: Role of every rank in rank order, where TF_CONFIG gives them; else empty, and all are
            workers.
        tells_local_rank: False where the launcher does not say which ranks share a host, so that
            `local_rank` and `local_size` are those of a host with one rank.
    """

    kind: str
    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    hosts: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    role: str = "worker"
    reason: str = ""
    roles: tuple[str, ...] = ()
    tells_local_rank: bool = True
