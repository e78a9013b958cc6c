"""Find what building Horovod needs: Python, TensorFlow, MPI, a compiler and CMake."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

from dtk.errors import DtkError

HOROVOD_VERSION = "0.28.1"


MIN_PYTHON = (3, 11)


MIN_TENSORFLOW = (2, 21)


MIN_CMAKE = (3, 13)


MAX_CMAKE = (4, 0)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


_TENSORFLOW_PROBE = "import json, tensorflow as tf; print(json.dumps([tf.__version__]))"


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
    """The MPI that the C++ wrapper compiles against.

    Attributes:
        vendor: "openmpi", "mpich" or "mpi" (another one).
        version: As its header states it, such as "4.1.4".
    """

    vendor: str
    version: str


# --- what is here ---------------------------------------------------------------------------------


def check_python() -> None:
    """Refuse an interpreter dtk does not support, or one that has no pip.

    Raises:
        HorovodBuildError: With the command that cures it.
    """
    if sys.version_info[:2] < MIN_PYTHON:
        raise HorovodBuildError(
            f"Python {platform.python_version()} is too old: dtk needs 3.11 or later. "
            "Next: python3.11 -m venv .venv"
        )
    if subprocess.run([*PIP, "--version"], capture_output=True, check=False).returncode:
        raise HorovodBuildError(
            f"{sys.executable} has no pip, which fetches and installs Horovod. "
            f"Next: {sys.executable} -m ensurepip"
        )


def tensorflow_version() -> str:
    """Import TensorFlow in a subprocess and return its version.

    Raises:
        HorovodBuildError: When it is missing, fails to import or is older than 2.21.
    """
    probe = subprocess.run(
        [sys.executable, "-c", _TENSORFLOW_PROBE],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    wanted = ".".join(map(str, MIN_TENSORFLOW))
    cure = f"Next: {sys.executable} -m pip install 'tensorflow>={wanted}'"
    if probe.returncode:
        reason = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        raise HorovodBuildError(f"TensorFlow cannot be imported ({reason}). {cure}")
    version = str(json.loads(probe.stdout.strip().splitlines()[-1])[0])
    if numbers_in(version)[:2] < MIN_TENSORFLOW:
        raise HorovodBuildError(f"TensorFlow {version} is too old: need {wanted} or later. {cure}")
    return version


def find_mpi() -> Mpi:
    """Preprocess `mpi.h` with the C++ wrapper and read who made it.

    Returns:
        Vendor and version.

    Raises:
        HorovodBuildError: When `mpicxx`, its header or `mpirun` is missing.
    """
    cure = (
        "Next: apt-get install libopenmpi-dev openmpi-bin, "
        "or dtk install-horovod --without-mpi for Gloo only"
    )
    for tool, purpose in (("mpicxx", "compiles against MPI"), ("mpirun", "starts the processes")):
        if shutil.which(tool) is None:
            raise HorovodBuildError(f"{tool}, which {purpose}, is not on PATH. {cure}")
    probe = subprocess.run(
        ["mpicxx", "-E", "-P", "-x", "c++", "-"],
        input=_MPI_PROBE,
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r'^dtk (\w+) ([\d" .]+)$', probe.stdout, re.MULTILINE)
    if probe.returncode or found is None:
        reason = (probe.stderr.strip().splitlines() or ["no message"])[0]
        raise HorovodBuildError(f"mpicxx cannot read mpi.h ({reason}). {cure}")
    return Mpi(found[1], ".".join(re.findall(r"\d+", found[2])))


def check_compiler() -> str:
    """Compile one line of C++17 and return the compiler's name.

    Raises:
        HorovodBuildError: When there is no compiler, it fails, or `make` is missing.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler.split()[0]) is None:
        raise HorovodBuildError(
            f"the C++ compiler {compiler} is not on PATH. Next: apt-get install g++ make"
        )
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "probe.cc")
        source.write_text("#include <optional>\nstd::optional<int> x;\n")
        command = [*compiler.split(), "-std=c++17", "-c", str(source), "-o", os.devnull]
        probe = subprocess.run(command, capture_output=True, text=True, check=False)
    if probe.returncode:
        reason = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        raise HorovodBuildError(
            f"{compiler} cannot compile C++17 ({reason}). Next: apt-get install g++ make"
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
    probe = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    version = numbers_in(probe.stdout)
    return path if MIN_CMAKE <= version[:2] < MAX_CMAKE else None


def numbers_in(version: str) -> tuple[int, ...]:
    """Return the first dotted number in a text.

    Args:
        version: The text.

    Returns:
        Its parts; empty when there is none.

    >>> numbers_in("cmake version 3.25.1")
    (3, 25, 1)
    """
    found = re.search(r"\d+(\.\d+)+", version)
    return tuple(map(int, found[0].split("."))) if found else ()
