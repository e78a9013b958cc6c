"""Find what building Horovod needs: Python, TensorFlow, MPI, a compiler and CMake."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from dtk.cluster import mpi_installs
from dtk.errors import DtkError

HOROVOD_VERSION = "0.28.1"
# Of horovod-0.28.1.tar.gz on the Python Package Index.
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
MIN_PYTHON = (3, 11)
MIN_TENSORFLOW = (2, 21)
MIN_CMAKE = (3, 13)
MAX_CMAKE = (4, 0)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")

_MPI_PROBE = """
#include <mpi.h>
#if defined(OMPI_MAJOR_VERSION)
dtk openmpi OMPI_MAJOR_VERSION OMPI_MINOR_VERSION OMPI_RELEASE_VERSION
#elif defined(MPICH_VERSION)
dtk mpich MPICH_VERSION
#else
dtk mpi MPI_VERSION MPI_SUBVERSION
#endif
"""


class HorovodBuildError(DtkError, RuntimeError):
    """Horovod cannot be built or installed here; the message ends with what to do."""


@dataclasses.dataclass(frozen=True)
class Mpi:
    """The MPI that the C++ wrapper compiles against."""

    vendor: str  # "openmpi", "mpich" or "mpi" (another one)
    version: str  # as its header states it, such as "4.1.4"


def ask(
    command: Sequence[str], text: str = "", environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that tells something about this machine."""
    return subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, env=environ
    )


def reason_of(ended: subprocess.CompletedProcess[str], line: int = -1) -> str:
    """Return a line of what a command that failed wrote on standard error."""
    return (ended.stderr.strip().splitlines() or ["no message"])[line]


def check_python() -> None:
    """Refuse an interpreter dtk does not support, or one that has no pip."""
    if sys.version_info[:2] < MIN_PYTHON:
        raise HorovodBuildError(
            f"Python {platform.python_version()} is too old: dtk needs 3.11 or later. "
            "Next: python3.11 -m venv .venv"
        )
    if ask([*PIP, "--version"]).returncode:
        raise HorovodBuildError(
            f"{sys.executable} has no pip, which fetches and installs Horovod. "
            f"Next: {sys.executable} -m ensurepip"
        )


def tensorflow_version() -> str:
    """Import TensorFlow in a subprocess and return its version."""
    code = "import tensorflow as tf; print(tf.__version__)"
    probe = ask([sys.executable, "-c", code], environ={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
    wanted = ".".join(map(str, MIN_TENSORFLOW))
    cure = f"Next: {sys.executable} -m pip install 'tensorflow>={wanted}'"
    if probe.returncode:
        raise HorovodBuildError(f"TensorFlow cannot be imported ({reason_of(probe)}). {cure}")
    version = probe.stdout.split()[-1]
    if numbers_in(version)[:2] < MIN_TENSORFLOW:
        raise HorovodBuildError(f"TensorFlow {version} is too old: need {wanted} or later. {cure}")
    return version


def find_mpi() -> Mpi:
    """Preprocess `mpi.h` with the C++ wrapper and read who made it."""
    cure = (
        "Next: apt-get install libopenmpi-dev openmpi-bin, "
        "or dtk install-horovod --without-mpi for Gloo only"
    )
    beside = "" if mpi_installs.mpirun() is None else " (that of keras-dtk[mpi] is another)"
    for tool, purpose in (("mpicxx", "compiles against MPI"), ("mpirun", "starts the processes")):
        if mpi_installs.find_other(tool) is None:
            raise HorovodBuildError(f"{tool}, which {purpose}, is not on PATH{beside}. {cure}")
    probe = ask([str(mpi_installs.find_other("mpicxx")), "-E", "-P", "-x", "c++", "-"], _MPI_PROBE)
    found = re.search(r'^dtk (\w+) ([\d" .]+)$', probe.stdout, re.MULTILINE)
    if probe.returncode or found is None:
        raise HorovodBuildError(f"mpicxx cannot read mpi.h ({reason_of(probe, 0)}). {cure}")
    return Mpi(found[1], ".".join(re.findall(r"\d+", found[2])))


def check_compiler() -> str:
    """Compile one line of C++17 and return the compiler's name."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler.split()[0]) is None:
        raise HorovodBuildError(
            f"the C++ compiler {compiler} is not on PATH. Next: apt-get install g++ make"
        )
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "probe.cc")
        source.write_text("#include <optional>\nstd::optional<int> x;\n")
        command = [*compiler.split(), "-std=c++17", "-c", str(source), "-o", os.devnull]
        probe = ask(command)
    if probe.returncode:
        raise HorovodBuildError(
            f"{compiler} cannot compile C++17 ({reason_of(probe)}). Next: apt-get install g++ make"
        )
    if shutil.which("make") is None:
        raise HorovodBuildError("make is not on PATH. Next: apt-get install make")
    return compiler


def usable_cmake() -> str | None:
    """Return the path of a cmake that Horovod accepts, or None.

    That is one on PATH from 3.13 up to, not including, 4.
    """
    path = shutil.which("cmake")
    if path is None:
        return None
    version = numbers_in(ask([path, "--version"]).stdout)
    return path if MIN_CMAKE <= version[:2] < MAX_CMAKE else None


def numbers_in(version: str) -> tuple[int, ...]:
    """Return the first dotted number in a text.

    >>> numbers_in("cmake version 3.25.1")
    (3, 25, 1)
    """
    found = re.search(r"\d+(\.\d+)+", version)
    return tuple(map(int, found[0].split("."))) if found else ()
