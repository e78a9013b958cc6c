"""What ssh does, by srun, in an allocation of Slurm's.

    python -m dtk.cluster.srun_shell --jobid=JOB HOST COMMAND
"""

from __future__ import annotations

import os
import sys

# Beside other steps of the job, on all cores of the host, and not as a rank of an MPI.
_STEP = ("--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--mpi=none", "--quiet")

if __name__ == "__main__":
    job, host, *command = sys.argv[1:]
    shell = ("sh", "-c", " ".join(command))
    os.execvp("srun", ["srun", job, *_STEP, f"--nodelist={host}", *shell])
