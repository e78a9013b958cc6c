"""The MPI that `keras-dtk[mpi]` puts beside this Python, others, and why one cannot start."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from dtk.cluster.place import has_gpu
from dtk.cluster.pmix import find_library
from dtk.cluster.variables import MPI_SERVER
from dtk.errors import CommunicatorError, at_rank
from dtk.version import pip_install

# Bytes: Open MPI 5 makes a file of this size for each rank, if one fits, and fills a part of it.
_SEGMENT, _USED = 17 << 20, 4 << 20
_OTHER_MEMORY = (
    "OMPI_MCA_btl",
    "OMPI_MCA_btl_sm_backing_directory",
    "OMPI_MCA_btl_sm_segment_size",
)


def mpirun() -> Path | None:
    """Return the mpirun beside this Python, if dtk can be the server of its MPI."""
    path = Path(sys.executable).parent / "mpirun"
    is_there = path.is_file() and find_library(sys.prefix).is_file()
    return path if is_there and importlib.util.find_spec("mpi4py") else None


def required_mpirun() -> Path:
    """Return the mpirun beside this Python, or say what installs it."""
    if (path := mpirun()) is None:
        raise CommunicatorError(
            f"communicator mpi: no mpi4py, no mpirun beside {sys.executable}, or no Open MPI 5 "
            f"({find_library(sys.prefix)}); run `{pip_install('mpi')}`"
        )
    return path


def unasked() -> Path | None:
    """Return the mpirun beside Python, where dtk joins ranks by MPI that nobody told how.

    None where they may have GPUs: MPI sends their gradients through host memory.
    """
    return None if has_gpu() else mpirun()


def mpirun_of_python_started(environ: Mapping[str, str]) -> bool:
    """Return whether the mpirun of keras-dtk[mpi] started the process with these variables."""
    return os.path.realpath(environ.get("OPAL_PREFIX", "/")) == os.path.realpath(sys.prefix)


def find_other(tool: str) -> str | None:
    """Find a tool such as "mpirun" of the MPI that Horovod is built with; None where there is none.

    `keras-dtk[mpi]` puts `mpirun` and `mpicxx` beside Python, and an activated environment
    puts them first. Horovod loads the MPI of the system.
    """
    return shutil.which(tool, path=path_of_others())


def path_of_others() -> str:
    """Return PATH without the directory of the MPI beside this Python, where there is one."""
    path = os.environ.get("PATH", os.defpath)
    if mpirun() is None and not mpirun_of_python_started(os.environ):
        return path
    beside = os.path.realpath(Path(sys.executable).parent)
    kept = [one for one in path.split(os.pathsep) if os.path.realpath(one or ".") != beside]
    return os.pathsep.join(kept)


# What MPI and Horovod do not say themselves where they cannot start, and what helps.


def shared_memory_needed(ranks: int) -> int:
    """Return the bytes of shared memory that Open MPI 5 needs for so many ranks of a machine."""
    return max(_SEGMENT, ranks * _USED)


def shared_memory_free(folder: str = "/dev/shm") -> int:
    """Return the free bytes of shared memory; as many as may be where MPI was told of another."""
    by_user = MPI_SERVER not in os.environ
    if by_user and any(name in os.environ for name in _OTHER_MEMORY):
        return sys.maxsize
    return shutil.disk_usage(folder).free


def shared_memory_missing(ranks: int, folder: str = "/dev/shm") -> str:
    """Return what Open MPI 5 lacks, and what helps, for a sentence; "" where nothing is missing.

    It says nothing of that itself: a rank ends with exit code 14.
    """
    needed = shared_memory_needed(ranks)
    with contextlib.suppress(OSError):  # there is none
        free = shared_memory_free(folder)
        if free < needed:
            return (
                f"{folder} has {free / 2**20:.0f} MB free, and MPI needs {needed / 2**20:.0f} MB "
                f"there for {ranks} rank(s); give it more (docker run --shm-size 256m; elsewhere, "
                f"as root: mount -o remount,size=256m {folder}), or use the communicator collective"
            )
    return ""


def horovod_refused(said: str = "") -> CommunicatorError:
    """Return the error of Horovod under an mpirun of another MPI than it was built with."""
    mpirun = shlex.quote(find_other("mpirun") or "/path/of/that/mpirun")
    script = shlex.join(sys.argv) if any(sys.argv) else "train.py"
    size = os.environ.get("OMPI_COMM_WORLD_SIZE", "2")
    return CommunicatorError(
        at_rank(
            int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)),
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
