"""Training from a notebook: a function that runs in processes of its own.

The function goes to the ranks as bytes in a file. Each rank is this module, started as a program.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dtk.cluster import detect
from dtk.errors import ClusterError, RankError
from dtk.launch.job import Job
from dtk.launch.job_run import JobRun
from dtk.launch.plan import JobSpec
from dtk.version import pip_install

Result = TypeVar("Result")

_FUNCTION, _END = "function.pickle", "rank-{}.pickle"  # what the function returns, or raises


def notebook_launcher(fn: Callable[[], Result], n: int = 2, communicator: str = "auto") -> Result:
    """Run a function on several new processes of this machine, and wait for their end.

    This is `dtk run -n` for a notebook. The processes start afresh, so the notebook may have used
    TensorFlow, except on GPUs, whose memory it holds until the kernel is started again. What
    `fn` uses of the notebook is copied to the processes: make strategy, model and datasets in `fn`.

    The cell shows what ranks print, each line behind its rank. Interrupting it ends all processes.

    Args:
        fn: Function without arguments; `functools.partial` gives it some.
        n: Number of processes.
        communicator: As of `dtk run`: "auto", "collective", "horovod" or "mpi".

    Returns:
        What `fn` returns on rank 0, copied from there: numbers or arrays such as
        `model.history.history` or `model.get_weights()`.

    Raises:
        ClusterError: It was called on a rank of a job, `n` is below 1, or `fn` cannot be copied.
        RankError: A rank has failed, or rank 0 has ended before `fn` has. The message names it, its
            traceback is in the cell, and `__cause__` is its exception, where that can be copied.
        ModuleNotFoundError: cloudpickle is not installed.

    Example:
        >>> import dtk
        >>> dtk.notebook_launcher(lambda: dtk.cluster.detect().size, n=2)
        2
    """
    if (here := detect()).size > 1:
        raise ClusterError(
            f"rank {here.rank}: notebook_launcher was called on a rank of a job, expected one "
            "process; call the function itself"
        )
    with tempfile.TemporaryDirectory(prefix="dtk-") as folder:
        Path(folder, _FUNCTION).write_bytes(_packed(fn))
        command = [sys.executable, "-m", __name__, folder]
        spec = JobSpec(command=command, workers=n, communicator=communicator)
        running = JobRun(spec)
        if code := running.wait():
            job = running.jobs[-1]
            raise RankError(_reason(job, code)) from _exception(job, folder)
        end = Path(folder, _END.format(0))
        if not end.exists():
            raise RankError(
                "rank 0 ended with exit code 0 before the function returned, as by sys.exit; "
                "return in place of that"
            )
        result: Result = pickle.loads(end.read_bytes())
        return result


def _packed(fn: Callable[[], object]) -> bytes:
    """Return the function as bytes, with where its imports are found."""
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        message = f"notebook_launcher needs cloudpickle: {pip_install('notebook')}"
        raise ModuleNotFoundError(message, name=error.name) from None
    try:
        return pickle.dumps((sys.path, cloudpickle.dumps(fn)))
    except Exception as error:  # whatever the values of the notebook raise
        raise ClusterError(
            f"{fn!r} cannot be copied to other processes ({error}); make models, datasets and open "
            "files inside it"
        ) from error


def _reason(job: Job, code: int) -> str:
    if job.failure is None:
        return f"the processes ended with exit code {code}; see what they printed"
    process, code, words = job.failure
    last = (words.splitlines() or ["it printed nothing"])[-1]
    return f"{process.name} failed with exit code {code}: {last}"


def _exception(job: Job, folder: str) -> BaseException | None:
    """Return what the function has raised on the rank that failed; None if that is not known."""
    error: object = None
    if job.failure is not None:
        with contextlib.suppress(Exception):  # none is there, or its class is not here
            file = Path(folder, _END.format(job.failure[0].rank))
            error = pickle.loads(file.read_bytes())
    return error if isinstance(error, BaseException) else None


def _run_rank(folder: str) -> None:
    """Run the function, and leave its result if this is rank 0, or what it raises."""
    paths, packed = pickle.loads(Path(folder, _FUNCTION).read_bytes())
    sys.path[:] = paths
    import cloudpickle

    rank = detect().rank
    end = Path(folder, _END.format(rank))
    try:
        result = pickle.loads(packed)()
    except Exception as error:
        with contextlib.suppress(Exception):  # the launcher knows its text
            end.write_bytes(cloudpickle.dumps(error))
        raise
    if rank == 0:
        end.write_bytes(cloudpickle.dumps(result))


if __name__ == "__main__":
    _run_rank(sys.argv[1])
