"""All-reduce by mpi4py alone: what MPI itself takes, without a framework around it."""

from __future__ import annotations

from typing import Any

import mpi4py
import numpy as np
from mpi4py import MPI


class Worker:
    """See `dtk.bench.worker.BenchWorker`."""

    def __init__(self, setting: dict[str, Any]):
        self.rank = MPI.COMM_WORLD.rank
        library = MPI.Get_library_version().split(",")[0]
        self.versions = {"mpi4py": mpi4py.__version__, "MPI": library}
        self._steps = setting["steps"]

    def build(self, task: str) -> tuple[int, dict[str, Any]]:
        """See `dtk.bench.worker.BenchWorker`."""
        kind, _, size = task.partition(" ")
        if kind != "allreduce":
            return 0, {}
        given = np.zeros(int(size) // 4, "float32")
        found = np.empty_like(given)

        def measure(tick: Any) -> None:
            for _ in range(self._steps + 1):
                MPI.COMM_WORLD.Allreduce(given, found)
                tick()

        return 0, {"Allreduce": measure}
