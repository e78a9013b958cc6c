"""What MPI and Horovod do not say themselves where they cannot start, and what helps."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator

from dtk.cluster import mpi_installs
from dtk.cluster.mpi import OPEN_MPI
from dtk.errors import CommunicatorError, at_rank

# Bytes: Open MPI 5 makes a file of this size for each rank, if one fits, and fills a part of it.
_SEGMENT, _USED = 17 << 20, 4 << 20
_OTHER_MEMORY = (
    "OMPI_MCA_btl",
    "OMPI_MCA_btl_sm_backing_directory",
    "OMPI_MCA_btl_sm_segment_size",
)


def shared_memory_missing(ranks: int, folder: str = "/dev/shm") -> str:
    """Return what Open MPI 5 lacks, and what helps, for a sentence; "" where nothing is missing.

    It says nothing of that itself: a rank ends with exit code 14.
    """
    needed = max(_SEGMENT, ranks * _USED)
    if any(name in os.environ for name in _OTHER_MEMORY):
        return ""
    with contextlib.suppress(OSError):  # there is none
        free = shutil.disk_usage(folder).free
        if free < needed:
            return (
                f"{folder} has {free / 2**20:.0f} MB free, and MPI needs {needed / 2**20:.0f} MB "
                f"there for {ranks} rank(s); give it more (docker run --shm-size 256m; elsewhere, "
                f"as root: mount -o remount,size=256m {folder}), or use the communicator collective"
            )
    return ""


def horovod_refused(said: str = "") -> CommunicatorError:
    """Return the error of Horovod under an mpirun of another MPI than it was built with."""
    mpirun = shlex.quote(mpi_installs.find_other("mpirun") or "/path/of/that/mpirun")
    script = shlex.join(sys.argv) if any(sys.argv) else "train.py"
    size = os.environ.get(OPEN_MPI.size, "2")
    return CommunicatorError(
        at_rank(
            int(os.environ.get(OPEN_MPI.rank, 0)),
            f"Horovod cannot be loaded under the mpirun of {sys.prefix}, which shows it another "
            f"MPI than it was built with{f' ({said})' if said else ''}: start with that one's, "
            f"`{mpirun} -np {size} python {script}`, or with `dtk run -n {size} --communicator "
            f"horovod {script}`, or use communicator='mpi' and do not import Horovod",
        )
    )


@contextlib.contextmanager
def horovod_import() -> Iterator[None]:
    """Say what to do where Horovod does not load, in place of what the loader says."""
    try:
        yield
    except Exception as error:  # of TensorFlow, for what the loader says
        if "symbol" not in str(error):
            raise
        raise horovod_refused(str(error).strip()) from None
