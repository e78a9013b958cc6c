"""Turn the published Horovod source into a wheel that works on this TensorFlow.

    sdist -> leave out the XLA ops -> pip wheel -> cache/<key>/horovod-*.whl

Horovod 0.28.1 does not compile against TensorFlow 2.21 as published: `xla_mpi_ops.cc`, optional
ops for XLA on GPUs, includes headers that have moved. Without that one file it does. The tools its
build needs at older versions (setuptools, cmake) live in a directory of their own for as long as
the build lasts, so that the user's environment keeps the versions it has.

No TensorFlow is imported here; what must be asked of it is asked in a subprocess.
"""

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
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence

from dtk import cache
from dtk.errors import DtkError

HOROVOD_VERSION = "0.28.1"
MIN_PYTHON = (3, 11)
MIN_TENSORFLOW = (2, 21)
MIN_CMAKE = (3, 13)
MAX_CMAKE = (4, 0)

CMAKE_LISTS = "horovod/tensorflow/CMakeLists.txt"
XLA_SOURCE = "horovod/tensorflow/xla_mpi_ops.cc"

# what Horovod imports when it runs, and its setup.py when it builds
RUNTIME_REQUIREMENTS = ("cloudpickle", "pyyaml", "psutil", "packaging")
BUILD_REQUIREMENTS = ("setuptools<81", "wheel", *RUNTIME_REQUIREMENTS)

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
    if _numbers(version)[:2] < MIN_TENSORFLOW:
        raise HorovodBuildError(f"TensorFlow {version} is too old: need {wanted} or later. {cure}")
    return version


def find_mpi() -> Mpi:
    """Preprocess `mpi.h` with the C++ wrapper and read who made it.

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
    """Path of a cmake on PATH that Horovod accepts (3.13 up to, not including, 4), or None."""
    path = shutil.which("cmake")
    if path is None:
        return None
    probe = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    version = _numbers(probe.stdout)
    return path if MIN_CMAKE <= version[:2] < MAX_CMAKE else None


# --- where wheels are kept ------------------------------------------------------------------------


def cache_key(tensorflow: str, mpi: Mpi | None) -> str:
    """Name everything a compiled Horovod depends on.

    >>> cache_key("2.21.0", Mpi("openmpi", "4.1.4"))  # doctest: +SKIP
    'horovod-0.28.1-cp311-tf2.21.0-openmpi4.1.4-linux_x86_64-glibc2.36'
    """
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    with_mpi = f"{mpi.vendor}{mpi.version}" if mpi else "nompi"
    machine = re.sub(r"[^\w.]", "_", sysconfig.get_platform())
    libc = "".join(platform.libc_ver()) or "libc"
    # Horovod's own switch for reducing on GPUs (NCCL) makes another library
    gpu = os.environ.get("HOROVOD_GPU_OPERATIONS", "").lower()
    parts = [f"horovod-{HOROVOD_VERSION}", python, f"tf{tensorflow}", with_mpi, machine, libc]
    return "-".join([*parts, *filter(None, [re.sub(r"\W", "_", gpu)])])


def cache_root() -> pathlib.Path:
    """Where wheels are kept."""
    return cache.folder() / "wheels"


def cached_wheel(folder: pathlib.Path) -> pathlib.Path | None:
    """Return the wheel kept in `folder`, if there is one and it is whole."""
    for wheel in sorted(folder.glob(f"horovod-{HOROVOD_VERSION}*.whl")):
        if has_tensorflow_ops(wheel):
            return wheel
    return None


def keep(wheel: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Copy `wheel` into `folder` so that nobody ever sees half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / wheel.name
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".", suffix=".tmp", delete=False) as part:
        temporary = pathlib.Path(part.name)
    try:
        shutil.copyfile(wheel, temporary)
        temporary.chmod(0o644)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def has_tensorflow_ops(wheel: pathlib.Path) -> bool:
    """Whether `wheel` is a readable archive that holds the compiled TensorFlow library."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return any(name.startswith("horovod/tensorflow/mpi_lib") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


# --- source and build -----------------------------------------------------------------------------


class Build:
    """One build: a scratch directory, the tools in it, and one log of all that ran.

    Attributes:
        scratch: Directory that the caller makes and deletes.
        log: File every command's output is appended to.
        echo: Whether that output goes to the screen as well.
    """

    def __init__(self, scratch: pathlib.Path, log: pathlib.Path, echo: bool = False) -> None:
        self.scratch = scratch
        self.log = log
        self.echo = echo
        self.tools = scratch / "tools"

    def fetch_tools(self) -> None:
        """Install what the build needs into a directory of its own, cmake only if none here fits.

        Raises:
            HorovodBuildError: When the package index cannot be reached or lacks one of them.
        """
        cmake = () if usable_cmake() else ("cmake<4",)
        cure = "check the network and pip's configuration"
        if cmake:
            cure += ", or: apt-get install cmake (3.13 or later, below 4)"
        self._run(
            [*PIP, "install", "--target", str(self.tools), *BUILD_REQUIREMENTS, *cmake],
            failed=f"the build tools could not be fetched. Next: {cure}",
            environ=dict(os.environ),
        )

    def fetch_source(self) -> pathlib.Path:
        """Download Horovod's source archive from the configured package index.

        Raises:
            HorovodBuildError: When that fails.
        """
        folder = self.scratch / "sdist"
        download = [*PIP, "download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
        self._run(
            [*download, f"horovod=={HOROVOD_VERSION}", "--dest", str(folder)],
            failed=f"horovod {HOROVOD_VERSION} could not be downloaded. Next: check the network, "
            "or: dtk install-horovod --sdist FILE",
        )
        return next(folder.glob("horovod-*.tar.gz"))

    def unpack(self, sdist: pathlib.Path) -> pathlib.Path:
        """Unpack the archive, check that it is the right one, leave out the XLA ops.

        Returns:
            The source directory.

        Raises:
            HorovodBuildError: When it is no archive, another version, or lacks the line to drop.
        """
        check_sdist(sdist)
        folder = self.scratch / "source"
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, **safely)  # type: ignore[arg-type]
        source = folder / f"horovod-{HOROVOD_VERSION}"
        leave_out_xla(source / CMAKE_LISTS)
        return source

    def compile(self, source: pathlib.Path, mpi: Mpi | None) -> pathlib.Path:
        """Build the wheel; every core is used, for about two minutes on two of them.

        Raises:
            HorovodBuildError: When it fails, or makes a wheel without TensorFlow's library.
        """
        folder = self.scratch / "wheel"
        command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-v"]
        failed = "Horovod did not compile"
        self._run(
            [*command, "--wheel-dir", str(folder), str(source)],
            failed=failed,
            environ={**self.environ(), **build_variables(mpi)},
        )
        wheel = next(folder.glob("horovod-*.whl"))
        if not has_tensorflow_ops(wheel):
            raise HorovodBuildError(f"{failed}: {wheel.name} holds no TensorFlow library")
        return wheel

    def environ(self) -> dict[str, str]:
        """Put the private tools in front, for Python and for the shell.

        Inherited `HOROVOD_WITH...` switches would contradict `build_variables`; they are dropped.
        """
        environ = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_WITH")}
        for name, path in {"PYTHONPATH": self.tools, "PATH": self.tools / "bin"}.items():
            environ[name] = os.pathsep.join(filter(None, [str(path), environ.get(name)]))
        return environ

    def _run(
        self, command: Sequence[str], failed: str, environ: Mapping[str, str] | None = None
    ) -> None:
        environ = self.environ() if environ is None else environ
        run_logged(command, self.log, failed, environ, self.echo)


def run_logged(
    command: Sequence[str],
    log: pathlib.Path,
    failed: str,
    environ: Mapping[str, str] | None = None,
    echo: bool = False,
) -> None:
    """Run a command, append its output to `log`, and on failure show how the log ends.

    Args:
        command: Program and arguments.
        log: The file to append to.
        failed: First line of the error.
        environ: All variables of the command; this process's own when None.
        echo: Whether to show the output as it comes.

    Raises:
        HorovodBuildError: When the command fails; it names the log and holds its last lines.
    """
    with log.open("a") as out:
        out.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environ,
        )
        assert process.stdout is not None
        with process:
            for line in process.stdout:
                out.write(line)
                if echo:
                    print(line, end="", flush=True)
    if process.returncode:
        last = log.read_text(errors="replace").splitlines()[-15:]
        raise HorovodBuildError("\n".join([failed, f"the log ends with ({log}):", *last]))


def build_variables(mpi: Mpi | None) -> dict[str, str]:
    """Return the switches Horovod's build reads: TensorFlow and Gloo, MPI where there is one."""
    return {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI": "1",
        # make's default here would be eight compilers, 1 GB each, whatever the machine
        "MAKEFLAGS": os.environ.get("MAKEFLAGS", f"-j{len(os.sched_getaffinity(0))}"),
    }


def check_sdist(sdist: pathlib.Path) -> None:
    """Read the archive's own statement of what it is.

    Raises:
        HorovodBuildError: When it is missing, no archive, or not horovod 0.28.1.
    """
    cure = f"Next: pip download --no-deps --no-binary horovod horovod=={HOROVOD_VERSION}"
    try:
        with tarfile.open(sdist) as archive:
            depth = [name for name in archive.getnames() if re.fullmatch("[^/]+/PKG-INFO", name)]
            member = archive.extractfile(depth[0]) if depth else None
            text = member.read().decode() if member else ""
    except (OSError, tarfile.TarError) as error:
        raise HorovodBuildError(f"{sdist} is not a source archive ({error}). {cure}") from error
    fields = dict(re.findall(r"^(Name|Version): (.*)$", text, re.MULTILINE))
    given = f"{fields.get('Name', 'no name')} {fields.get('Version', 'no version')}"
    if given != f"horovod {HOROVOD_VERSION}":
        raise HorovodBuildError(
            f"{sdist} holds {given}, expected horovod {HOROVOD_VERSION}. {cure}"
        )


def leave_out_xla(cmake_lists: pathlib.Path) -> None:
    """Delete the one line that compiles the XLA ops.

    Raises:
        HorovodBuildError: When the line is not there exactly once: this is some other source.
    """
    lines = cmake_lists.read_text().splitlines(keepends=True)
    kept = [line for line in lines if XLA_SOURCE not in line]
    if len(lines) - len(kept) != 1:
        raise HorovodBuildError(
            f"{CMAKE_LISTS} names {XLA_SOURCE} on {len(lines) - len(kept)} lines, expected 1: "
            f"this is not the published horovod {HOROVOD_VERSION}. "
            "Next: dtk install-horovod without --sdist"
        )
    cmake_lists.write_text("".join(kept))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first dotted number in a text.

    >>> _numbers("cmake version 3.25.1")
    (3, 25, 1)
    """
    found = re.search(r"\d+(\.\d+)+", version)
    return tuple(map(int, found[0].split("."))) if found else ()
