"""Ranks on Apache Spark: a barrier stage with one task for each.

    driver           run         ships the function; waits for rank 0's result, or for a failure
    task of rank k   _task       meets the others, starts the rank, passes on what it prints
    rank k           _run_rank   the function, in a process of its own: this module as a program

Spark uses a Python process for one task after another, and TensorFlow's collectives start only once
in a process: hence the process of its own. It ends with its task, however that ends.

If a task fails, Spark ends the others and starts the whole stage again, as often as
`spark.stage.maxConsecutiveAttempts` says. It does so with stages that write a shuffle only: hence
the `partitionBy` behind the barrier.
"""

from __future__ import annotations

import functools
import os
import pickle
import re
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from dtk import importing, quiet
from dtk.cluster import detect, failures
from dtk.cluster.place import THREADS
from dtk.cluster.stall import STUCK
from dtk.engines import variables_of, without_place
from dtk.errors import ClusterError, RankError, at_rank
from dtk.launch import job_processes
from dtk.launch.agent import reserve
from dtk.launch.plan import HUGE_PAGES
from dtk.launch.ssh import Guard
from dtk.trainer import undistributed_jobs
from dtk.version import pip_install

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext, SparkContext

Result = TypeVar("Result")
Args = TypeVarTuple("Args")

_FUNCTION, _RESULT, _FAILURE = "function.pickle", "result.pickle", "failure.txt"
_TAIL = 40  # lines shown of a rank that could not say why it ended
_LAST_WORDS = 2.0  # seconds in which what a rank has printed is read, once it has ended
_END = "(the end of that rank)"  # behind a failure, among the words of Spark
_SPARK_SAYS = re.compile(r"\[SPARK-\d+\][^\n]*")


def run(
    train_fn: Callable[[*Args], Result],
    num_workers: int = 2,
    args: tuple[*Args] = (),  # type: ignore[assignment]
) -> Result:
    """Run a function on several tasks of Spark at once, each of them a rank of one job.

    The function goes to the executors as notebooks' functions do: make strategy, model and datasets
    in it. It runs in a new process, with `spark.task.cpus` threads. What a rank prints is in its
    executor's stderr, each line behind its rank. When a task fails or an executor is lost, Spark
    starts all of them again, four times by default (`spark.stage.maxConsecutiveAttempts`): give
    `fit` a `dtk.callbacks.Checkpoint` in a folder that all executors share.

    Args:
        train_fn: Function that every rank calls.
        num_workers: Number of ranks; Spark must have as many slots free at once.
        args: Arguments of the function.

    Returns:
        What the function returns on rank 0, copied from there: numbers or arrays such as
        `model.history.history` or `model.get_weights()`.

    Raises:
        ClusterError: Spark cannot run so many tasks at once, or the function cannot be copied.
        RankError: A rank has failed in the last attempt. The message names it and its line.
        ModuleNotFoundError: pyspark is not installed.
    """
    try:
        from py4j.protocol import Py4JJavaError
        from pyspark import SparkContext, cloudpickle
    except ModuleNotFoundError as error:
        message = f"dtk.engines.spark needs pyspark 4: {pip_install('spark')}"
        raise ModuleNotFoundError(message, name=error.name) from None
    if (here := detect()).size > 1:
        message = "dtk.engines.spark.run was called on a rank of a job, expected Spark's driver"
        raise ClusterError(at_rank(here.rank, message))
    context = SparkContext.getOrCreate()
    _check_slots(context, num_workers)
    try:
        packed = cloudpickle.dumps((train_fn, args))
    except Exception as error:  # whatever the values of the script raise
        raise ClusterError(
            f"{train_fn!r} cannot be copied to other processes ({error}); make models, datasets "
            "and open files inside it"
        ) from error
    task = functools.partial(_task, packed, f"spark-{secrets.token_hex(8)}", secrets.token_hex(32))
    ranks = context.parallelize(range(num_workers), num_workers).barrier().mapPartitions(task)
    try:
        (result,) = ranks.partitionBy(1).values().collect()
    except Py4JJavaError as error:
        raise _told(str(error), context.pythonExec) or error from None
    returned: Result = pickle.loads(result)
    return returned


def _check_slots(context: SparkContext, wanted: int) -> None:
    """Refuse what can never start, where the number of slots is fixed: Spark waits 10 minutes."""
    if not isinstance(wanted, int) or wanted < 1:
        raise ClusterError(f"num_workers={wanted!r}: expected a number, 1 or more")
    conf, master = context.getConf(), context.master.replace(" ", "")
    executors, cores = conf.get("spark.executor.instances"), conf.get("spark.executor.cores")
    per_task = float(conf.get("spark.task.cpus", "1"))
    if asked := re.fullmatch(r"local-cluster\[(\d+),(\d+),\d+\]", master):
        executors, cores = asked.groups()
    elif asked := re.fullmatch(r"local(?:\[(\d+|\*)(?:,\d+)?\])?", master):
        executors, cores = "1", (asked[1] or "1").replace("*", str(os.cpu_count()))
    if executors and cores and (slots := int(executors) * int(float(cores) / per_task)) < wanted:
        raise ClusterError(
            f"num_workers={wanted}, but Spark has {slots} slots (master {context.master}: "
            f"{executors} executors of {cores} cores, {per_task:g} a task) and all ranks must run "
            f"at once; use num_workers={slots}, or give Spark more executors or cores"
        )


def _told(message: str, python: str) -> Exception | None:
    """Return what Spark's error is about: a rank's failure, or what Spark itself refuses."""
    if "ModuleNotFoundError: No module named 'dtk'" in message:
        return ClusterError(
            f"Spark's executors run {python}, which has no dtk: set PYSPARK_PYTHON to a Python "
            f"that has, such as {sys.executable} where that is theirs, too, or install it there"
        )
    of_rank = message.rpartition(f"{RankError.__name__}: ")[2].partition(_END)
    if of_rank[1]:
        return RankError(of_rank[0].strip())
    refused = _SPARK_SAYS.search(message)
    return ClusterError(f"Spark does not start the ranks: {refused[0]}") if refused else None


def _task(packed: bytes, job: str, secret: str, rows: object) -> Iterator[tuple[int, bytes]]:
    """Be the task of one rank: start it, see it to its end, and yield rank 0's result."""
    del rows
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    rank = context.partitionId()
    # Ranks of an attempt that has failed may still wait here for Spark to end them.
    job_processes.end(job, 0.0)
    with reserve("0.0.0.0") as held, tempfile.TemporaryDirectory(prefix="dtk-") as folder:
        meeting, *_ = context.allGather(str(held.getsockname()[1]))
        environ = _variables(context, meeting, secret)
        Path(folder, _FUNCTION).write_bytes(packed)
        mark = f"{job}/{context.taskAttemptId()}"
        guard = Guard(mark, 0.0, folder=folder)
        try:
            code, tail = _see_to_its_end(folder, environ, mark, rank)
        finally:
            job_processes.end(mark, 0.0)
            guard.close()
        is_complete = rank > 0 or Path(folder, _RESULT).is_file()  # not so after os._exit(0)
        if code or not is_complete or Path(folder, _FAILURE).is_file():  # such as of sys.exit(0)
            if code == STUCK and rank:
                time.sleep(_LAST_WORDS)  # Spark tells the first failure, and rank 0 knows more
            host = context.getTaskInfos()[rank].address
            raise RankError(f"rank {rank} on {host} {_why(folder, code, tail)}\n{_END}")
        if rank == 0:
            yield 0, Path(folder, _RESULT).read_bytes()


def _variables(context: BarrierTaskContext, port: str, secret: str) -> dict[str, str]:
    """Return the environment of this task's rank, without what has started the executor."""
    rank = context.partitionId()
    hosts = [info.address.rpartition(":")[0].strip("[]") for info in context.getTaskInfos()]
    variables = {
        **variables_of(rank, hosts, hosts[0], port, secret),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONFAULTHANDLER": "1",
        **dict.fromkeys(THREADS, str(max(1, context.cpus()))),
    }
    if gpus := context.resources().get("gpu"):
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)
    return HUGE_PAGES | without_place(os.environ) | variables


def _see_to_its_end(
    folder: str, environ: Mapping[str, str], mark: str, rank: int
) -> tuple[int, Sequence[str]]:
    """Run a rank; return its exit code and the last lines of what it has printed."""
    tail: deque[str] = deque(maxlen=_TAIL)
    read, written = os.pipe()
    command = [sys.executable, "-u", "-m", __name__, folder]
    process = job_processes.start(command, environ, mark, (), output=written)
    os.close(written)

    def pass_on() -> None:
        with os.fdopen(read, errors="replace") as lines:
            for line in lines:
                tail.append(line)
                sys.stderr.write(f"[{rank}] {line}")
                sys.stderr.flush()

    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()
    code = process.wait()
    reader.join(_LAST_WORDS)
    return code, tail


def _why(folder: str, code: int, tail: Sequence[str]) -> str:
    """Return why a rank has ended: its own words where it could write them."""
    failure = Path(folder, _FAILURE)
    if failure.is_file():
        return failure.read_text()
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        how += " (by the system, if spark.executor.memoryOverhead is too small)"
    return f"{how}; it printed last:\n{''.join(tail)}"


def _run_rank(folder: str) -> None:
    """Be the rank: run the function, and leave its result or what it has failed of."""
    from pyspark import cloudpickle

    importing.inside("tensorflow", quiet.filtered)
    importing.inside("keras", undistributed_jobs.training_refused)
    try:
        train_fn, args = pickle.loads(Path(folder, _FUNCTION).read_bytes())
        result = train_fn(*args)
        if os.environ["RANK"] == "0":
            Path(folder, _RESULT).write_bytes(cloudpickle.dumps(result))
    except BaseException as error:
        failure = failures.of(error)
        first = failures.tell(failure) if isinstance(error, Exception) else ""
        told = f"failed{failure.place}: {failure.text}\n{traceback.format_exc()}"
        told += f"dtk: {first}\n" if first else ""  # Spark tells one failure, maybe not that one
        Path(folder, _FAILURE).write_text(told)
        raise


if __name__ == "__main__":
    _run_rank(sys.argv[1])
