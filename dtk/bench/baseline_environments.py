"""Libraries that dtk is measured against, and the environments they run in.

~/.cache/dtk/bench/<baseline>/      python -m venv, with pinned packages
<baseline>/dtk-bench.json           what is in it; written last, so that half an environment is none
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from dtk import cache
from dtk.bench.measure import WorldLost
from dtk.bench.setting import BenchError

_COMPLETE = "dtk-bench.json"
_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install")


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Another library that trains on several processes.

    Attributes:
        module: In `dtk.bench.baselines`.
        launcher: "collective", "horovod" or "horovod-mpi", see `dtk.bench.places`.
        about: What it is, for the help.
        packages: Pinned; none runs in this Python's own environment.
        size: What they take, for whoever must wait for them.
        borrows: Whether it also uses this Python's packages, such as TensorFlow.
        trains: Whether it does; or else it measures sizes alone.
        busy: Whether it computes while nothing is asked of it.
    """

    module: str
    launcher: str
    about: str
    packages: tuple[str, ...] = ()
    size: str = ""
    borrows: bool = False
    trains: bool = True
    busy: bool = False


_LOOP = "a loop by hand over hvd.allreduce"
BASELINES = {
    "horovod-loop": Baseline("horovod_loop", "horovod", f"{_LOOP}, Gloo", busy=True),
    "horovod-mpi-loop": Baseline("horovod_loop", "horovod-mpi", f"{_LOOP}, MPI", busy=True),
    "tf_keras": Baseline(
        "tf_keras_mwms",
        "collective",
        "legacy Keras under MultiWorkerMirroredStrategy",
        ("tf_keras==2.21.0",),
        "2 MB",
        borrows=True,
    ),
    "torch": Baseline(
        "torch_ddp",
        "collective",
        "PyTorch's DistributedDataParallel over Gloo",
        ("torch==2.13.0", "numpy==2.4.6"),
        "200 MB, or several GB where the package index brings CUDA along",
    ),
    "mpi4py": Baseline(
        "mpi4py_allreduce",
        "horovod-mpi",
        "MPI's own all-reduce; needs --allreduce",
        ("mpi4py==4.1.2", "numpy==2.4.6"),
        "25 MB",
        trains=False,
    ),
}


def check(names: Sequence[str]) -> None:
    """Refuse a name that is none of BASELINES.

    Args:
        names: As given with --peer.

    Raises:
        BenchError: There is no such baseline.
    """
    for name in names:
        if name not in BASELINES:
            *others, last = BASELINES
            raise BenchError(f"--peer {name}: unknown, expected {', '.join(others)} or {last}")


def python_of(name: str, say: Callable[[str], None]) -> str:
    """Return the interpreter of a baseline's environment, which is made where there is none.

    Args:
        name: One of BASELINES.
        say: Told what will be done, before it is.

    Returns:
        Its path.

    Raises:
        WorldLost: It cannot be made; says why, and what to do.
    """
    baseline, folder = BASELINES[name], cache.folder() / "bench" / name
    if not baseline.packages:
        return sys.executable
    python = folder / "bin" / "python"
    if not _is_complete(folder, baseline):
        say(
            f"{name}: makes an environment in {folder} and installs {' '.join(baseline.packages)} "
            f"({baseline.size})"
        )
        _make(folder, baseline, python)
    return str(python)


def _is_complete(folder: Path, baseline: Baseline) -> bool:
    try:
        return bool(json.loads((folder / _COMPLETE).read_text()) == _contents(baseline))
    except (OSError, ValueError):
        return False


def _contents(baseline: Baseline) -> dict[str, object]:
    """Return what must be the same for an environment to be used again."""
    borrowed = sysconfig.get_path("purelib") if baseline.borrows else ""
    return {"packages": list(baseline.packages), "python": sys.version, "borrowed": borrowed}


def _make(folder: Path, baseline: Baseline, python: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    options = []
    if baseline.borrows:
        (packages,) = folder.glob("lib/python*/site-packages")
        borrowed = sysconfig.get_path("purelib")
        (packages / "borrowed.pth").write_text(f"import site; site.addsitedir({borrowed!r})\n")
        options = ["--no-deps"]
    _run([str(python), *_PIP, *options, *baseline.packages])
    (folder / _COMPLETE).write_text(json.dumps(_contents(baseline)) + "\n")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise WorldLost(f"its environment cannot be made: {told[-1]}; try `{shlex.join(command)}`")
