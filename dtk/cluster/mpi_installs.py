"""The MPI that `keras-dtk[mpi]` puts beside this Python, and others that PATH leads to."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path


def mpirun() -> Path | None:
    """Return the mpirun beside this Python, if it is Open MPI's and mpi4py is there too."""
    beside = Path(sys.executable).parent
    # Ranks can take the places of processes that PRRTE has started; other MPIs do not use it.
    if not (beside / "prterun").is_file() or importlib.util.find_spec("mpi4py") is None:
        return None
    found = beside / "mpirun"
    return found if found.is_file() else None


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
