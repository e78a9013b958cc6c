"""Does the installed Horovod really reduce? Two processes say so, or say why not.

Rank r contributes r + 1, so both of two ranks must read 3. A Horovod that never left its process
reads 1 or 2, one that averages reads 1.5. No TensorFlow is imported here, only in the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

import psutil

from dtk.horovod_build.requirements import HorovodBuildError
from dtk.launch import plan
from dtk.launch.rendezvous import Rendezvous

TIMEOUT = 120.0

# another job's variables would make the ranks join that job, or start through its scheduler
_FOREIGN = ("HOROVOD_", "OMPI_", "PMI", "MPI_", "SLURM_", "HYDI_", "TF_CONFIG")

_DESCRIBE = """
import json, pathlib
import horovod, tensorflow as tf, horovod.tensorflow as hvd
built = json.loads(pathlib.Path(horovod.__file__).with_name("metadata.json").read_text())
print(json.dumps({
    "version": horovod.__version__, "mpi": bool(hvd.mpi_built()), "gloo": bool(hvd.gloo_built()),
    "nccl": bool(hvd.nccl_built()), "built_for": built.get("tensorflow", ""),
    "tensorflow": tf.__version__,
}))
"""

_RANK = """
import json, pathlib, sys
import tensorflow as tf, horovod.tensorflow as hvd
hvd.init()
total = hvd.allreduce(tf.constant(float(hvd.rank() + 1)), op=hvd.Sum)
answer = {"size": hvd.size(), "sum": float(total), "mpi": bool(hvd.mpi_enabled())}
pathlib.Path(sys.argv[1], f"rank{hvd.rank()}.json").write_text(json.dumps(answer))
hvd.shutdown()
"""


@dataclasses.dataclass(frozen=True)
class Horovod:
    """Facts that the installed Horovod states about itself.

    Attributes:
        version: Such as "0.28.1".
        mpi: Compiled with MPI.
        gloo: Compiled with Gloo.
        nccl: Compiled with NCCL.
        built_for: The TensorFlow version it was compiled against.
        tensorflow: The TensorFlow version that is installed.
    """

    version: str
    mpi: bool
    gloo: bool
    nccl: bool
    built_for: str
    tensorflow: str

    def controllers(self) -> str:
        """Return what it was built with, such as "MPI and Gloo"."""
        names = {"MPI": self.mpi, "Gloo": self.gloo, "NCCL": self.nccl}
        return " and ".join(name for name, built in names.items() if built) or "no transport"


def installed() -> Horovod:
    """Import the installed Horovod in a subprocess.

    Returns:
        What it says about itself.

    Raises:
        HorovodBuildError: When it is missing, cannot be imported, or was built for another
            TensorFlow.
    """
    probe = subprocess.run(
        [sys.executable, "-c", _DESCRIBE],
        capture_output=True,
        text=True,
        check=False,
        env=_environ({}),
    )
    if probe.returncode:
        lines = probe.stderr.strip().splitlines() or ["no message"]
        if "No module named 'horovod'" in lines[-1]:
            raise HorovodBuildError("Horovod is not installed. Next: dtk install-horovod")
        raise HorovodBuildError(
            f"Horovod cannot be imported ({lines[-1]}). Next: dtk install-horovod --rebuild"
        )
    found = Horovod(**json.loads(probe.stdout.strip().splitlines()[-1]))
    if found.built_for and found.built_for != found.tensorflow:
        raise HorovodBuildError(
            f"Horovod was built for TensorFlow {found.built_for}, but {found.tensorflow} is "
            "installed. Next: dtk install-horovod"
        )
    return found


def check_gloo(timeout: float = TIMEOUT) -> float:
    """Let two processes reduce over Gloo.

    Args:
        timeout: Seconds they get.

    Returns:
        Seconds they took.

    Raises:
        HorovodBuildError: When they do not both read 3 in time.
    """
    with tempfile.TemporaryDirectory(prefix="dtk-") as folder:
        ranks = plan([sys.executable, "-c", _RANK, folder], workers=2, communicator="horovod")
        importlib.invalidate_caches()  # Horovod may have been installed a moment ago
        server = Rendezvous(ranks)
        try:
            commands = [(rank.argv, {**rank.env, **server.env}) for rank in ranks]
            return _both_read_three("Gloo", commands, folder, timeout, mpi=False)
        finally:
            server.close()


def check_mpi(timeout: float = TIMEOUT) -> float:
    """Let two processes reduce under a real `mpirun -np 2`.

    Args:
        timeout: Seconds they get.

    Returns:
        Seconds they took.

    Raises:
        HorovodBuildError: When `mpirun` is missing, or they do not both read 3 in time.
    """
    if shutil.which("mpirun") is None:
        raise HorovodBuildError("mpirun is not on PATH. Next: apt-get install openmpi-bin")
    with tempfile.TemporaryDirectory(prefix="dtk-") as folder:
        command = ["mpirun", "-np", "2"]
        if _is_open_mpi():
            command += ["--host", "localhost:2", "--oversubscribe", "--bind-to", "none"]
            command += ["--allow-run-as-root"] * (os.geteuid() == 0)
        command += [sys.executable, "-c", _RANK, folder]
        environ = {
            "HOROVOD_CONTROLLER": "mpi",
            "HOROVOD_CPU_OPERATIONS": "mpi",
            # containers often forbid one process reading another's memory; Open MPI then warns
            "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
        }
        return _both_read_three("MPI", [(command, environ)], folder, timeout, mpi=True)


def _is_open_mpi() -> bool:
    probe = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in probe.stdout


def _environ(extra: Mapping[str, str]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    # on CPU: two ranks on one GPU would each take all of its memory
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    return {**own, **quiet, "TF_NUM_INTRAOP_THREADS": "1", **extra}


def _both_read_three(
    name: str,
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    folder: str,
    timeout: float,
    mpi: bool,
) -> float:
    """Run the commands to their end and read what each rank wrote."""
    started = time.monotonic()
    log = pathlib.Path(folder, "output.log")
    cure = "Next: dtk install-horovod --rebuild"
    ended = run_bounded(commands, log, timeout)
    answers = {
        rank: json.loads(file.read_text())
        for rank in range(2)
        if (file := pathlib.Path(folder, f"rank{rank}.json")).exists()
    }
    expected = {"size": 2, "sum": 3.0, "mpi": mpi}
    if ended is True and answers == {0: expected, 1: expected}:
        return time.monotonic() - started
    if ended is None:
        problem = f"two processes over {name} did not finish within {timeout:.0f} s"
    elif ended is False:
        problem = f"a process over {name} failed"
    else:
        read = {rank: answer["sum"] for rank, answer in answers.items()}
        problem = f"two processes over {name} read {read}, expected 3 on both ({answers})"
    last = log.read_text(errors="replace").splitlines()[-15:]
    raise HorovodBuildError("\n".join([f"{problem}. {cure}", *last]))


def run_bounded(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], log: pathlib.Path, timeout: float
) -> bool | None:
    """Run commands side by side and leave none of their processes behind.

    Args:
        commands: Pairs of arguments and variables to add.
        log: File that gets all output.
        timeout: Seconds after which all are ended.

    Returns:
        True when all ended well, False when one failed, None when time ran out.
    """
    deadline = time.monotonic() + timeout
    processes: list[subprocess.Popen[bytes]] = []
    with log.open("ab") as out:
        try:
            for command, environ in commands:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        env=_environ(environ),
                    )
                )
            while time.monotonic() < deadline:
                codes = [process.poll() for process in processes]
                if any(codes):
                    return False
                if None not in codes:
                    return True
                time.sleep(0.05)
            return None
        finally:
            for process in processes:
                _end_tree(process)


def _end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process and all it started: mpirun puts its ranks in process groups of their own."""
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        tree = [*root.children(recursive=True), root]
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
