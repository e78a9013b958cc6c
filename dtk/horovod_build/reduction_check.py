"""Does the installed Horovod really reduce? Two processes say so, or say why not.

Rank r contributes r + 1, so both of two ranks must read 3. A Horovod that never left its process
reads 1 or 2, one that averages reads 1.5. No TensorFlow is imported here, only in the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence

from dtk.cluster import mpi_installs
from dtk.cluster.variables import is_foreign
from dtk.horovod_build.build import HorovodBuildError, ask, reason_of
from dtk.launch import JobSpec, Process, assign
from dtk.launch.job_run import JobRun

TIMEOUT = 120.0

# another job's variables would make the ranks join that job, or start through its scheduler
_OF_JOBS = ("HOROVOD_", "OMPI_", "PMI", "MPI_", "SLURM_", "HYDI_", "TF_CONFIG")
# on CPU: two ranks on one GPU would each take all of its memory
_ON_CPU = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "TF_NUM_INTRAOP_THREADS": "1"}

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
    """Facts that the installed Horovod states about itself."""

    version: str
    mpi: bool  # compiled with MPI
    gloo: bool  # compiled with Gloo
    nccl: bool  # compiled with NCCL
    built_for: str  # the TensorFlow version it was compiled against
    tensorflow: str  # the TensorFlow version that is installed

    def __str__(self) -> str:
        """Say what it is, such as "0.28.1 with MPI and Gloo, for TensorFlow 2.21.0"."""
        names = {"MPI": self.mpi, "Gloo": self.gloo, "NCCL": self.nccl}
        built = " and ".join(name for name, there in names.items() if there) or "no transport"
        return f"{self.version} with {built}, for TensorFlow {self.built_for}"


def installed() -> Horovod:
    """Import the installed Horovod in a subprocess."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_JOBS)}
    probe = ask([sys.executable, "-c", _DESCRIBE], environ={**own, **_ON_CPU})
    if probe.returncode:
        reason = reason_of(probe)
        if "No module named 'horovod'" in reason:
            raise HorovodBuildError("Horovod is not installed. Next: dtk install-horovod")
        message = f"Horovod cannot be imported ({reason})"
        raise HorovodBuildError(f"{message}. Next: dtk install-horovod --rebuild")
    horovod = Horovod(**json.loads(probe.stdout.strip().splitlines()[-1]))
    if horovod.built_for and horovod.built_for != horovod.tensorflow:
        raise HorovodBuildError(
            f"Horovod was built for TensorFlow {horovod.built_for}, but {horovod.tensorflow} is "
            "installed. Next: dtk install-horovod"
        )
    return horovod


def check_gloo(timeout: float = TIMEOUT) -> float:
    """Let two processes reduce over Gloo."""
    with tempfile.TemporaryDirectory(prefix="dtk-") as folder:
        ranks = assign([sys.executable, "-c", _RANK, folder], workers=2, communicator="horovod")
        importlib.invalidate_caches()  # Horovod may have been installed a moment ago
        return _both_read_three("Gloo", ranks, folder, timeout, mpi=False)


def check_mpi(timeout: float = TIMEOUT) -> float:
    """Let two processes reduce under a real `mpirun -np 2`."""
    path = mpi_installs.find_other("mpirun")
    if path is None:
        raise HorovodBuildError("mpirun is not on PATH. Next: apt-get install openmpi-bin")
    with tempfile.TemporaryDirectory(prefix="dtk-") as folder:
        command = [path, "-np", "2"]
        if "Open MPI" in ask([path, "--version"]).stdout:
            command += ["--host", "localhost:2", "--oversubscribe", "--bind-to", "none"]
            command += ["--allow-run-as-root"] * (os.geteuid() == 0)
        command += [sys.executable, "-c", _RANK, folder]
        environ = {
            "HOROVOD_CONTROLLER": "mpi",
            "HOROVOD_CPU_OPERATIONS": "mpi",
            # containers often forbid one process reading another's memory; Open MPI then warns
            "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
        }
        mpirun = Process("mpirun", "worker", 0, "localhost", tuple(command), environ)
        return _both_read_three("MPI", [mpirun], folder, timeout, mpi=True)


def _both_read_three(
    name: str, processes: Sequence[Process], folder: str, timeout: float, mpi: bool
) -> float:
    """Run the processes to their end and read what each rank wrote."""
    started = time.monotonic()
    code, output = run(processes, timeout)
    files = {rank: pathlib.Path(folder, f"rank{rank}.json") for rank in range(2)}
    answers = {rank: json.loads(f.read_text()) for rank, f in files.items() if f.exists()}
    if code == 0 and answers == dict.fromkeys(range(2), {"size": 2, "sum": 3.0, "mpi": mpi}):
        return time.monotonic() - started
    if code is None:
        problem = f"two processes over {name} did not finish within {timeout:.0f} s"
    elif code:
        problem = f"a process over {name} failed"
    else:
        read = {rank: answer["sum"] for rank, answer in answers.items()}
        problem = f"two processes over {name} read {read}, expected 3 on both ({answers})"
    cure = "Next: dtk install-horovod --rebuild"
    raise HorovodBuildError("\n".join([f"{problem}. {cure}", *output.splitlines()[-15:]]))


def run(processes: Sequence[Process], timeout: float) -> tuple[int | None, str]:
    """Run processes on this machine's CPU, and leave nothing of them behind."""
    output = io.StringIO()
    spec = JobSpec(processes=tuple(map(_alone, processes)), grace=1.0, stall_timeout=0.0)
    running = JobRun(spec, stdout=output, stderr=output)
    with running.start() as job, contextlib.suppress(TimeoutError):
        return job.wait(timeout), output.getvalue()
    return None, output.getvalue()


def _alone(process: Process) -> Process:
    """Return a process that takes no variables of other jobs beyond what `Job` leaves out."""
    inherited = [n for n in os.environ if n.startswith(_OF_JOBS) and not is_foreign(n)]
    unset = [f"--unset={name}" for name in inherited if name not in process.env]
    argv = ("env", *unset, *process.argv)
    return dataclasses.replace(process, argv=argv, env={**process.env, **_ON_CPU})
