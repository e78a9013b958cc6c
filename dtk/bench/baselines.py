"""Who dtk is measured against, and the environments they run in.

~/.cache/dtk/bench/<peer>/      python -m venv, with pinned packages
<peer>/dtk-bench.json           what is in it; written last, so that half an environment is none
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
class Peer:
    """Something else that trains on several processes.

    Attributes:
        module: In `dtk.bench.peers`.
        launcher: "collective", "horovod" or "horovod-mpi", see `bench_places`.
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
PEERS = {
    "horovod-loop": Peer("horovod_loop", "horovod", f"{_LOOP}, Gloo", busy=True),
    "horovod-mpi-loop": Peer("horovod_loop", "horovod-mpi", f"{_LOOP}, MPI", busy=True),
    "tf_keras": Peer(
        "tf_keras_mwms",
        "collective",
        "legacy Keras under MultiWorkerMirroredStrategy",
        ("tf_keras==2.21.0",),
        "2 MB",
        borrows=True,
    ),
    "torch": Peer(
        "torch_ddp",
        "collective",
        "PyTorch's DistributedDataParallel over Gloo",
        ("torch==2.13.0", "numpy==2.4.6"),
        "200 MB, or several GB where the package index brings CUDA along",
    ),
    "mpi4py": Peer(
        "mpi4py_allreduce",
        "horovod-mpi",
        "MPI's own all-reduce; needs --allreduce",
        ("mpi4py==4.1.2", "numpy==2.4.6"),
        "25 MB",
        trains=False,
    ),
}


def check(names: Sequence[str]) -> None:
    """Raise BenchError for a name that is none of PEERS."""
    for name in names:
        if name not in PEERS:
            *others, last = PEERS
            raise BenchError(f"--peer {name}: unknown, expected {', '.join(others)} or {last}")


def python_of(name: str, say: Callable[[str], None]) -> str:
    """The interpreter of a peer's environment, which is made where there is none.

    Args:
        name: One of PEERS.
        say: Told what will be done, before it is.

    Raises:
        WorldLost: It cannot be made; says why, and what to do.
    """
    peer, folder = PEERS[name], cache.folder() / "bench" / name
    if not peer.packages:
        return sys.executable
    python = folder / "bin" / "python"
    if not _is_complete(folder, peer):
        say(
            f"{name}: makes an environment in {folder} and installs {' '.join(peer.packages)} "
            f"({peer.size})"
        )
        _make(folder, peer, python)
    return str(python)


def _is_complete(folder: Path, peer: Peer) -> bool:
    try:
        return bool(json.loads((folder / _COMPLETE).read_text()) == _contents(peer))
    except (OSError, ValueError):
        return False


def _contents(peer: Peer) -> dict[str, object]:
    """What must be the same for an environment to be used again."""
    borrowed = sysconfig.get_path("purelib") if peer.borrows else ""
    return {"packages": list(peer.packages), "python": sys.version, "borrowed": borrowed}


def _make(folder: Path, peer: Peer, python: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    options = []
    if peer.borrows:
        (packages,) = folder.glob("lib/python*/site-packages")
        borrowed = sysconfig.get_path("purelib")
        (packages / "borrowed.pth").write_text(f"import site; site.addsitedir({borrowed!r})\n")
        options = ["--no-deps"]
    _run([str(python), *_PIP, *options, *peer.packages])
    (folder / _COMPLETE).write_text(json.dumps(_contents(peer)) + "\n")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise WorldLost(f"its environment cannot be made: {told[-1]}; try `{shlex.join(command)}`")
