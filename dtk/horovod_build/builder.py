"""Turn the published Horovod source into a wheel that works on this TensorFlow.

    sdist -> patches -> pip wheel -> cache/<key>/horovod-*.whl

Horovod 0.28.1 does not compile against TensorFlow 2.21 as published; `patches` says what is
changed. The tools its build needs at older versions (setuptools, cmake) live in a directory of
their own for as long as the build lasts, so that the user's environment keeps the versions it has.

No TensorFlow is imported here; what must be asked of it is asked in a subprocess.
"""

from __future__ import annotations

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping, Sequence

from dtk import cache
from dtk.cluster import mpi_installs
from dtk.horovod_build import patches
from dtk.horovod_build.requirements import (
    HOROVOD_SHA256,
    HOROVOD_VERSION,
    PIP,
    HorovodBuildError,
    Mpi,
    usable_cmake,
)

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


# --- where wheels are kept ------------------------------------------------------------------------


def cache_key(tensorflow: str, mpi: Mpi | None) -> str:
    """Return a name made of everything a compiled Horovod depends on.

    >>> cache_key("2.21.0", Mpi("openmpi", "4.1.4"))  # doctest: +SKIP
    'horovod-0.28.1-dtk2-cp311-tf2.21.0-openmpi4.1.4-linux_x86_64-glibc2.36'
    """
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    with_mpi = f"{mpi.vendor}{mpi.version}" if mpi else "nompi"
    machine = re.sub(r"[^\w.]", "_", sysconfig.get_platform())
    libc = "".join(platform.libc_ver()) or "libc"
    # Horovod's own switch for reducing on GPUs (NCCL) makes another library
    gpu = os.environ.get("HOROVOD_GPU_OPERATIONS", "").lower()
    source = f"horovod-{HOROVOD_VERSION}-dtk{patches.VERSION}"
    parts = [source, python, f"tf{tensorflow}", with_mpi, machine, libc]
    return "-".join([*parts, *filter(None, [re.sub(r"\W", "_", gpu)])])


def cache_root() -> pathlib.Path:
    """Return the folder that keeps wheels."""
    return cache.folder() / "wheels"


def cached_wheel(folder: pathlib.Path) -> pathlib.Path | None:
    """Return the wheel kept in `folder`, if there is one and it is whole."""
    for wheel in sorted(folder.glob(f"horovod-{HOROVOD_VERSION}*.whl")):
        if has_tensorflow_ops(wheel):
            return wheel
    return None


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
        self.scratch = scratch
        self.log = log
        self.echo = echo
        self.tools = scratch / "tools"

    def fetch_tools(self) -> None:
        """Install the build's tools into a directory of its own; cmake only if none here fits."""
        cmake = () if usable_cmake() else (CMAKE,)
        cure = "check the network and pip's configuration"
        if cmake:
            cure += ", or: apt-get install cmake (3.13 or later, below 4)"
        self._run(
            [
                *(*PIP, "install", "--only-binary", ":all:", "--no-deps"),
                *("--target", str(self.tools), *BUILD_REQUIREMENTS, *cmake),
            ],
            failed=f"the build tools could not be fetched. Next: {cure}",
            environ=dict(os.environ),
        )

    def fetch_source(self) -> pathlib.Path:
        """Download Horovod's source archive from the configured package index.

        pip runs its setup.py to learn what it needs, so pip is told the digest: it runs nothing of
        another archive.
        """
        folder, wanted = self.scratch / "sdist", self.scratch / "horovod.txt"
        self.scratch.mkdir(parents=True, exist_ok=True)
        wanted.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n")
        download = [*PIP, "download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
        self._run(
            [*download, "--require-hashes", "--requirement", str(wanted), "--dest", str(folder)],
            failed=f"horovod {HOROVOD_VERSION} could not be downloaded, or what came is not the "
            f"published source (SHA-256 {HOROVOD_SHA256}). Next: check the network and which "
            "package index pip is configured for, or: dtk install-horovod --sdist FILE, for an "
            "archive that you trust",
        )
        return next(folder.glob("horovod-*.tar.gz"))

    def unpack(self, sdist: pathlib.Path) -> pathlib.Path:
        """Unpack the archive, check that it is the right one, patch the source."""
        check_sdist(sdist)
        folder = self.scratch / "source"
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, **safely)  # type: ignore[arg-type]
        source = folder / f"horovod-{HOROVOD_VERSION}"
        patches.apply(source)
        return source

    def compile(self, source: pathlib.Path, mpi: Mpi | None) -> pathlib.Path:
        """Build the wheel; every core is used, for about two minutes on two of them."""
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
        """Return this process's variables with the private tools in front.

        Inherited `HOROVOD_WITH...` switches would contradict `build_variables`; they are dropped.
        So is the MPI of `keras-dtk[mpi]`, whose compiler an activated environment finds first.
        """
        environ = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_WITH")}
        environ["PATH"] = mpi_installs.path_of_others()
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
    """Run a command, append its output to `log`, and on failure show how the log ends."""
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
    """Refuse an archive that is not the source of this Horovod, by its own statement."""
    cure = f"Next: dtk install-horovod without --sdist, which downloads horovod {HOROVOD_VERSION}"
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
