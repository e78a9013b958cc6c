"""Turn the published Horovod source into a wheel that works on this TensorFlow.

    sdist -> patch -> pip wheel -> cache/<key>/horovod-*.whl

The tools its build needs at older versions (setuptools, cmake) live in a directory of their own for
as long as the build lasts, so that the user's environment keeps the versions it has. No TensorFlow
is imported here; what must be asked of it is asked in a subprocess.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import NamedTuple

from dtk import cache
from dtk.cluster import mpi_installs
from dtk.errors import DtkError

HOROVOD_VERSION = "0.28.1"
# Of horovod-0.28.1.tar.gz on the Python Package Index.
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
PATCH = pathlib.Path(__file__).with_name(f"horovod-{HOROVOD_VERSION}.patch")
PATCH_VERSION = 3  # goes up with each change of the patch, so that cached wheels are made anew
_TOOLKIT = "/usr/local/cuda"  # where NVIDIA's installer puts it
_WHEELS_OF_CUDA = (
    "nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-cccl nvidia-cuda-runtime "
    "nvidia-nccl-cu12"
)
# A module that tells an installed Horovod with these patches from one without.
_MARK = "horovod/dtk_patches.py"
MIN_PYTHON, MIN_TENSORFLOW, MIN_CMAKE, MAX_CMAKE = (3, 11), (2, 21), (3, 13), (4, 0)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
# what Horovod imports when it runs, and its setup.py when it builds
RUNTIME_REQUIREMENTS = ("cloudpickle", "pyyaml", "psutil", "packaging")
# These run while it is built, so it is these versions alone, and none that pip would have to build.
BUILD_REQUIREMENTS = (
    "setuptools==80.9.0",
    "wheel==0.45.1",
    "cloudpickle==3.1.2",
    "pyyaml==6.0.3",
    "psutil==7.1.3",
    "packaging==25.0",
)
CMAKE = "cmake==3.31.10"
# Horovod's own switch for what sums on GPUs; it makes another library.
_GPU_OPERATIONS = "HOROVOD_GPU_OPERATIONS"

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


class Mpi(NamedTuple):
    """The MPI that the C++ wrapper compiles against."""

    vendor: str  # "openmpi", "mpich" or "mpi" (another one)
    version: str  # as its header states it, such as "4.1.4"


# --- what is here ---------------------------------------------------------------------------------


def ask(
    command: Sequence[str], text: str = "", environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that tells something about this machine."""
    return subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, env=environ
    )


def probe(script: str) -> tuple[bool, str]:
    """Run Python; return whether it succeeded, and the last line that it wrote."""
    ended = ask([sys.executable, "-c", script], environ={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
    lines = (ended.stderr if ended.returncode else ended.stdout).strip().splitlines()
    return not ended.returncode, (lines or [f"exit code {ended.returncode}"])[-1]


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
        message = f"{sys.executable} has no pip, which fetches and installs Horovod. Next: "
        raise HorovodBuildError(f"{message}{sys.executable} -m ensurepip")


def tensorflow_version() -> str:
    """Import TensorFlow in a subprocess and return its version."""
    good, version = probe("import tensorflow as tf; print(tf.__version__)")
    wanted = ".".join(map(str, MIN_TENSORFLOW))
    cure = f"Next: {sys.executable} -m pip install 'tensorflow>={wanted}'"
    if not good:
        raise HorovodBuildError(f"TensorFlow cannot be imported ({version}). {cure}")
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
    match = re.search(r'^dtk (\w+) ([\d" .]+)$', probe.stdout, re.MULTILINE)
    if probe.returncode or match is None:
        raise HorovodBuildError(f"mpicxx cannot read mpi.h ({reason_of(probe, 0)}). {cure}")
    return Mpi(match[1], ".".join(re.findall(r"\d+", match[2])))


def check_compiler() -> str:
    """Compile one line of C++17 and return the compiler's name."""
    compiler, cure = os.environ.get("CXX", "g++"), "Next: apt-get install g++ make"
    if shutil.which(compiler.split()[0]) is None:
        raise HorovodBuildError(f"the C++ compiler {compiler} is not on PATH. {cure}")
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "probe.cc")
        source.write_text("#include <optional>\nstd::optional<int> x;\n")
        probe = ask([*compiler.split(), "-std=c++17", "-c", str(source), "-o", os.devnull])
    if probe.returncode:
        raise HorovodBuildError(f"{compiler} cannot compile C++17 ({reason_of(probe)}). {cure}")
    if shutil.which("make") is None:
        raise HorovodBuildError("make is not on PATH. Next: apt-get install make")
    return compiler


def usable_cmake() -> str | None:
    """Return the path of a cmake from 3.13 up to, not including, 4; None without one."""
    path = shutil.which("cmake")
    version = numbers_in(ask([path, "--version"]).stdout) if path else ()
    return path if MIN_CMAKE <= version[:2] < MAX_CMAKE else None


def numbers_in(version: str) -> tuple[int, ...]:
    """Return the first dotted number in a text."""
    match = re.search(r"\d+(\.\d+)+", version)
    return tuple(map(int, match[0].split("."))) if match else ()


# --- where wheels are kept ------------------------------------------------------------------------


def cache_key(tensorflow: str, mpi: Mpi | None) -> str:
    """Return a name made of everything a compiled Horovod depends on.

    >>> cache_key("2.21.0", Mpi("openmpi", "4.1.4"))  # doctest: +SKIP
    'horovod-0.28.1-dtk2-cp311-tf2.21.0-openmpi4.1.4-linux_x86_64-glibc2.36'
    """
    parts = [
        f"horovod-{HOROVOD_VERSION}-dtk{PATCH_VERSION}",
        f"cp{sys.version_info.major}{sys.version_info.minor}",
        f"tf{tensorflow}",
        f"{mpi.vendor}{mpi.version}" if mpi else "nompi",
        re.sub(r"[^\w.]", "_", sysconfig.get_platform()),
        "".join(platform.libc_ver()) or "libc",
        re.sub(r"\W", "_", gpu_switches().get(_GPU_OPERATIONS, "").lower()),
    ]
    return "-".join(filter(None, parts))


def gpu_switches() -> dict[str, str]:
    """Return the switches for sums between GPUs: the user's, or NCCL where its parts are here."""
    if _GPU_OPERATIONS in os.environ:
        return {_GPU_OPERATIONS: os.environ[_GPU_OPERATIONS]}
    told = [os.environ.get(f"{name}_HOME") for name in ("HOROVOD_CUDA", "CUDA", "HOROVOD_NCCL")]
    wheel = importlib.util.find_spec("nvidia")
    wheels = (wheel and wheel.submodule_search_locations) or []
    own = [f"{one}/cu13" for one in wheels]  # of nvidia-cuda-nvcc and what it needs
    cuda = _folder_with("bin/nvcc", [*told[:2], _TOOLKIT, *own])
    places = [told[2], cuda, "/usr", *(f"{one}/nccl" for one in wheels)]
    nccl = _folder_with("include/nccl.h", places)
    if cuda is None or nccl is None:
        return {}
    named = {"HOROVOD_CUDA_HOME": cuda, "HOROVOD_NCCL_HOME": nccl}
    return {_GPU_OPERATIONS: "NCCL", "HOROVOD_NCCL_LINK": "SHARED", **named}


def told_of_gpus() -> str | None:
    """Say how GPUs of this machine will sum; None without GPUs."""
    switches = gpu_switches()
    if "HOROVOD_CUDA_HOME" in switches:
        homes = [switches[f"HOROVOD_{name}_HOME"] for name in ("CUDA", "NCCL")]
        return f"found: CUDA in {homes[0]}, NCCL in {homes[1]}: GPUs will sum by NCCL"
    if switches or shutil.which("nvidia-smi") is None:
        return None
    return (
        "no nvcc or no NCCL here: GPUs will sum through the host's memory. If they should not, "
        f"install {_WHEELS_OF_CUDA} with pip. Next: dtk install-horovod"
    )


def _folder_with(file: str, folders: Iterable[str | None]) -> str | None:
    return next((one for one in folders if one and pathlib.Path(one, file).is_file()), None)


def cached_wheel(folder: pathlib.Path) -> pathlib.Path | None:
    """Return the wheel kept in `folder`, if there is one and it is whole."""
    return next(filter(has_tensorflow_ops, folder.glob(f"horovod-{HOROVOD_VERSION}*.whl")), None)


def keep(wheel: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Copy `wheel` into `folder` so that a reader never sees half of it."""
    with cache.replacing(folder / wheel.name) as draft:
        shutil.copyfile(wheel, draft)
        draft.chmod(0o644)
    return folder / wheel.name


def has_tensorflow_ops(wheel: pathlib.Path) -> bool:
    """Return whether `wheel` is an archive that holds the compiled TensorFlow library."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return any(name.startswith("horovod/tensorflow/mpi_lib") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


# --- source and build -----------------------------------------------------------------------------


class Build:
    """One build: a scratch directory, the tools in it, and one log of all that ran."""

    def __init__(self, scratch: pathlib.Path, log: pathlib.Path, echo: bool = False) -> None:
        self.scratch, self.tools = scratch, scratch / "tools"
        self.run = functools.partial(run_logged, log, echo)

    def fetch_tools(self) -> None:
        """Install the build's tools into a directory of its own; cmake only if none here fits."""
        tools, failed = [*BUILD_REQUIREMENTS], "the build tools could not be fetched. Next: check "
        failed += "the network and pip's configuration"
        if not usable_cmake():
            tools.append(CMAKE)
            failed += ", or: apt-get install cmake (3.13 or later, below 4)"
        install = [*PIP, "install", "--only-binary", ":all:", "--no-deps"]
        self.run([*install, "--target", str(self.tools), *tools], failed)

    def fetch_source(self) -> pathlib.Path:
        """Download Horovod's source archive from the configured package index.

        pip runs its setup.py to learn what it needs, so pip is told the digest: it runs nothing of
        another archive.
        """
        folder, wanted = self.scratch / "sdist", self.scratch / "horovod.txt"
        self.scratch.mkdir(parents=True, exist_ok=True)
        wanted.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n")
        download = [*PIP, "download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
        self.run(
            [*download, "--require-hashes", "--requirement", str(wanted), "--dest", str(folder)],
            f"horovod {HOROVOD_VERSION} could not be downloaded, or what came is not the "
            f"published source (SHA-256 {HOROVOD_SHA256}). Next: check the network and which "
            "package index pip is configured for, or: dtk install-horovod --sdist FILE, for an "
            "archive that you trust",
            self.environ(),
        )
        return next(folder.glob("horovod-*.tar.gz"))

    def unpack(self, sdist: pathlib.Path) -> pathlib.Path:
        """Unpack the archive, check that it is the right one, patch the source."""
        check_sdist(sdist)
        folder = self.scratch / "source"
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, **safely)  # type: ignore[arg-type]
        apply_patch(source := folder / f"horovod-{HOROVOD_VERSION}")
        return source

    def compile(self, source: pathlib.Path, mpi: Mpi | None) -> pathlib.Path:
        """Build the wheel; every core is used, for about two minutes on two of them."""
        folder, failed = self.scratch / "wheel", "Horovod did not compile"
        command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-v"]
        command += ["--wheel-dir", str(folder), str(source)]
        switches = {**self.environ(), **build_variables(mpi), **gpu_switches()}
        # Wheels have their libraries under the names that programs load, not the linker's.
        links, folders = self.scratch / "libraries", []
        for name, part in {"NCCL": "libnccl.so", "CUDA": "libcudart.so"}.items():
            libraries = pathlib.Path(switches.get(f"HOROVOD_{name}_HOME", ""), "lib")
            library = next(libraries.glob(f"{part}.*"), None)
            if library is not None and not (libraries / part).exists():
                links.mkdir(exist_ok=True)
                (links / part).symlink_to(library)
                folders.append(str(libraries))
        if folders:
            switches |= {"HOROVOD_NCCL_LIB": str(links), "CMAKE_LIBRARY_PATH": str(links)}
            switches["LIBRARY_PATH"] = os.pathsep.join(folders)  # of nvcc's linker
            switches["LDFLAGS"] = " ".join(f"-Wl,-rpath,{folder}" for folder in folders)
        self.run(command, failed, switches)
        wheel = next(folder.glob("horovod-*.whl"))
        if not has_tensorflow_ops(wheel):
            raise HorovodBuildError(f"{failed}: {wheel.name} holds no TensorFlow library")
        return wheel

    def environ(self) -> dict[str, str]:
        """Return this process's variables with the private tools in front.

        Inherited `HOROVOD_WITH...` switches would contradict `build_variables`; they are dropped.
        So is the MPI of `keras-dtk[mpi]`, whose compiler an activated environment finds first.
        """
        environ = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_WITH")}
        environ["PATH"] = mpi_installs.path_of_others()
        for name, path in {"PYTHONPATH": self.tools, "PATH": self.tools / "bin"}.items():
            environ[name] = os.pathsep.join(filter(None, [str(path), environ.get(name)]))
        return environ


def apply_patch(source: pathlib.Path) -> None:
    """Make the changes of PATCH; each must fit the source in one place."""
    for change in PATCH.read_text().split("--- a/")[1:]:
        name, _, rest = change.partition("\n")
        file = source / name
        text = file.read_text() if file.exists() else ""
        for hunk in re.split(r"^@@.*\n", rest, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            before, after = ("".join(x[1:] for x in lines if x[0] in f" {k}") for k in "-+")
            if (count := text.count(before)) != 1:
                raise HorovodBuildError(
                    f"{name} has {count} places for a change of {PATCH.name}, expected 1: this is "
                    f"not the published horovod {HOROVOD_VERSION}. "
                    "Next: dtk install-horovod without --sdist"
                )
            text = text.replace(before, after)
        file.write_text(text)
    (source / _MARK).write_text(f"VERSION = {PATCH_VERSION}\n")


def run_logged(
    log: pathlib.Path,
    echo: bool,
    command: Sequence[str],
    failed: str,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Run a command, append its output to `log`, and on failure show how the log ends.

    Interrupted or told to end, it ends all that the command has started, such as compilers.
    """
    with log.open("a") as out, _exiting():
        out.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environ,
            start_new_session=True,
        )
        assert process.stdout is not None
        with process:
            try:
                for line in process.stdout:
                    out.write(line)
                    if echo:
                        print(line, end="", flush=True)
            except BaseException:
                os.killpg(process.pid, signal.SIGTERM)
                raise
    if process.returncode:
        last = log.read_text(errors="replace").splitlines()[-15:]
        raise HorovodBuildError("\n".join([failed, f"the log ends with ({log}):", *last]))


@contextlib.contextmanager
def _exiting() -> Iterator[None]:
    """Return a context in which SIGTERM and a closed terminal raise SystemExit."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    asked = [signal.SIGTERM, signal.SIGHUP]
    before = {n: signal.signal(n, end) for n in asked if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    """Refuse an archive that is not the source of this Horovod, by its own statement."""
    cure = f"Next: dtk install-horovod without --sdist, which downloads horovod {HOROVOD_VERSION}"
    try:
        with tarfile.open(sdist) as archive:
            names = [name for name in archive.getnames() if re.fullmatch("[^/]+/PKG-INFO", name)]
            members = [archive.extractfile(name) for name in names]
            text = "".join(member.read().decode() for member in members if member)
    except (OSError, tarfile.TarError) as error:
        raise HorovodBuildError(f"{sdist} is not a source archive ({error}). {cure}") from error
    fields = dict(re.findall(r"^(Name|Version): (.*)$", text, re.MULTILINE))
    release = f"{fields.get('Name', 'no name')} {fields.get('Version', 'no version')}"
    if release != f"horovod {HOROVOD_VERSION}":
        raise HorovodBuildError(
            f"{sdist} holds {release}, expected horovod {HOROVOD_VERSION}. {cure}"
        )
