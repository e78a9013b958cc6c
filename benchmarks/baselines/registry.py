"""Baselines of `dtk bench`, and the environments they run in; read by `dtk.bench.bench_jobs`.

~/.cache/dtk/bench/<baseline>/      python -m venv, with pinned packages
<baseline>/dtk-bench.json           what is in it; written last, so that half an environment is none

Each is a `Worker` in a file of its own. It runs where dtk need not be, and trains the models of
`dtk.bench.models`, with plain SGD at the same batch size and on rows of the same shape, as its own
documentation would.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from dtk import cache
from dtk.bench.bench_jobs import Baseline, JobLost

_COMPLETE = "dtk-bench.json"
_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install")


@dataclasses.dataclass(frozen=True)
class PinnedPackages:
    """An environment of a baseline's own.

    Attributes:
        name: Of the baseline.
        packages: What is installed there.
        size: What they take, for whoever must wait for them.
        borrows: Whether this Python's packages are there, too, such as TensorFlow.
    """

    name: str
    packages: tuple[str, ...]
    size: str
    borrows: bool = False

    @property
    def folder(self) -> Path:
        """The directory of the environment."""
        return cache.folder() / "bench" / self.name

    def python(self, say: Callable[[str], None]) -> str:
        """Return the interpreter of the environment; if there is none, say so and make it."""
        python = self.folder / "bin" / "python"
        if not self._is_complete():
            say(
                f"{self.name}: makes an environment in {self.folder} and installs "
                f"{' '.join(self.packages)} ({self.size})"
            )
            self._make(python)
        return str(python)

    def contents(self) -> dict[str, object]:
        """Return what must be the same for the environment to be used again."""
        borrowed = sysconfig.get_path("purelib") if self.borrows else ""
        return {"packages": list(self.packages), "python": sys.version, "borrowed": borrowed}

    def _is_complete(self) -> bool:
        try:
            return bool(json.loads((self.folder / _COMPLETE).read_text()) == self.contents())
        except (OSError, ValueError):
            return False

    def _make(self, python: Path) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(self.folder)])
        options = []
        if self.borrows:
            (packages,) = self.folder.glob("lib/python*/site-packages")
            borrowed = sysconfig.get_path("purelib")
            (packages / "borrowed.pth").write_text(f"import site; site.addsitedir({borrowed!r})\n")
            options = ["--no-deps"]
        _run([str(python), *_PIP, *options, *self.packages])
        (self.folder / _COMPLETE).write_text(json.dumps(self.contents()) + "\n")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise JobLost(f"its environment cannot be made: {told[-1]}; try `{shlex.join(command)}`")


def _worker(module: str) -> Path:
    return Path(__file__).with_name(f"{module}.py")


_HOROVOD, _LOOP = _worker("horovod_loop"), "a loop by hand over hvd.allreduce"
BASELINES = (
    Baseline("horovod-loop", f"{_LOOP}, Gloo", _HOROVOD, "horovod"),
    Baseline("horovod-mpi-loop", f"{_LOOP}, MPI", _HOROVOD, "horovod-mpi"),
    Baseline(
        "tf_keras",
        "legacy Keras under MultiWorkerMirroredStrategy",
        _worker("tf_keras_mwms"),
        "collective",
        PinnedPackages("tf_keras", ("tf_keras==2.21.0",), "2 MB", borrows=True).python,
    ),
    Baseline(
        "torch",
        "PyTorch's DistributedDataParallel over Gloo",
        _worker("torch_ddp"),
        "collective",
        PinnedPackages(
            "torch",
            ("torch==2.13.0", "numpy==2.4.6"),
            "200 MB, or several GB where the package index brings CUDA along",
        ).python,
    ),
    Baseline(
        "mpi4py",
        "MPI's own all-reduce; needs --allreduce",
        _worker("mpi4py_allreduce"),
        "horovod-mpi",
        PinnedPackages("mpi4py", ("mpi4py==4.1.2", "numpy==2.4.6"), "25 MB").python,
        trains=False,
    ),
)
