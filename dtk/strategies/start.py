"""The start of a strategy: ranks agree on a script and a seed, watch each other, end together."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import platform
import random
import socket
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

import keras
import numpy as np
import psutil
import tensorflow as tf

from dtk.cluster import alone, failures, heartbeats, progress
from dtk.cluster.place import instructions
from dtk.cluster.variables import FUSED_BATCH_NORM, JIT_COMPILE
from dtk.communicators import determinism, has_mpi_launcher, startup
from dtk.communicators.base import Communicator
from dtk.communicators.cost_measurement import calibrate
from dtk.compat import tf_replicas
from dtk.errors import TRY_AGAIN, ClusterError, advice_on_files, exit_code
from dtk.trainer.ranks import rank_checks
from dtk.version import __version__, is_tested, requirement

# Variables that choose kernels; ranks must agree on them to compute the same sums.
_KERNELS = ("TF_ENABLE_ONEDNN_OPTS", JIT_COMPILE, FUSED_BATCH_NORM)


def agree(
    communicator: Communicator, device: str, stall_timeout: float, **chosen: str
) -> int | None:
    """Check that all ranks run the same program; share a seed; end together on an exception.

    Afterwards the communicator knows whether processors are alike, and what messages cost.
    """
    if communicator.size == 1:
        return None
    host = communicator.hosts[communicator.rank] if communicator.hosts else "this host"
    end_at_once(f"rank {communicator.rank} on {host}", communicator.rank)
    _end_with_thread(communicator)
    with startup.at_most(startup.limit()):
        _watch(communicator, stall_timeout)
    asked = str(determinism.is_asked_for())
    check_same_program(communicator, **chosen, **{"deterministic ops": asked})
    processors = communicator.allgather_object(processor())
    costs = communicator.costs
    # The null communicator sends nothing, so there is nothing to measure.
    measures = communicator.name != "null" and not determinism.is_asked_for()
    if measures and costs is None:
        costs = calibrate(communicator, device, processors)
    communicator.learn(alike=len(set(processors)) == 1, costs=costs)
    return share_seed(communicator)


@functools.cache  # once in a process
def tell_untested_versions() -> None:
    """Print a warning if dtk was not tested with this TensorFlow or Keras."""
    for package, version in (("tensorflow", tf.__version__), ("keras", keras.__version__)):
        if not is_tested(package, version):
            print(
                f"dtk: was not tested with {package} {version}: pip install "
                f"'{requirement(package)}', or compare with one process by `dtk check`",
                file=sys.stderr,
            )


@functools.cache  # once in a process
def tell_of_idle_tasks() -> None:
    """Print a warning if Slurm has room for more tasks than the one process that trains."""
    if (told := alone.idle_tasks(os.environ)) is not None:
        print(f"dtk: {told}", file=sys.stderr, flush=True)


def check_same_program(communicator: Communicator, **chosen: str) -> None:
    """Compare dtk, TensorFlow, Keras, the script and the given values over all ranks."""
    mine = [
        ("dtk version", __version__),
        ("TensorFlow version", tf.__version__),
        ("Keras version", keras.__version__),
        ("script", os.path.basename(sys.argv[0])),
        ("script's text (its hash)", _text_hash(sys.argv[0])),
        *((f"variable {name}", os.environ.get(name)) for name in _KERNELS),
        *chosen.items(),
    ]
    rank_checks.compare(mine, communicator)


def processor() -> str:
    """Describe this process's processor, threads and GPU.

    If two processes have equal descriptions, equal operations give equal bits.
    """
    threads = os.environ.get("TF_NUM_INTRAOP_THREADS") or len(os.sched_getaffinity(0))
    gpus = tf.config.get_visible_devices("GPU")
    names = [tf.config.experimental.get_device_details(gpu).get("device_name") for gpu in gpus[:1]]
    return f"{platform.machine()} {instructions()} {threads} {names}"


def _text_hash(path: str) -> str | None:
    """Return a hash of the script; None without a file, as in an interactive session."""
    file = Path(path)
    return hashlib.blake2b(file.read_bytes()).hexdigest()[:8] if file.is_file() else None


def share_seed(communicator: Communicator) -> int | None:
    """Give all ranks one seed, unless the script has set one, so that all shuffle alike.

    NumPy and Python draw on as on rank 0: a script may have seeded them.

    Every rank reads the same global batches and keeps a slice of each, so the order of rows must be
    the same on all ranks. What a step draws for rows differs, see `random_draws.apart`.
    """
    proposal = random.SystemRandom().randrange(2**31)
    gathered = communicator.allgather_object((tf_replicas.global_seed(), proposal))
    seeds = [seed for seed, _ in gathered]
    if all(seed is None for seed in seeds):
        chosen = gathered[0][1]
        states = communicator.broadcast_object((np.random.get_state(), random.getstate()))
        keras.utils.set_random_seed(chosen)
        np.random.set_state(states[0])
        random.setstate(states[1])
        return chosen
    what = "random seed (every rank must shuffle alike)"
    rank_checks.compare([(what, seeds[communicator.rank])], communicator)
    return None


def end_at_once(name: str, rank: int = 0) -> None:
    """On an uncaught exception, name the failed task and end the process abruptly.

    An orderly shutdown would wait for the other tasks, which wait for this one. An abrupt end lets
    the launcher (dtk run, mpirun, srun) see the failure and stop the rest; the exit code tells an
    engine whether to start it again. The previous hook, Python's or the script's, runs first; then
    rank 0 says which rank failed first, where no launcher of dtk's does.
    """
    before, process = sys.excepthook, os.getpid()

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != process:  # a child by `os.fork`
            before(kind, error, trace)
            return
        failure = failures.of(error)
        sys.stdout.flush()
        before(kind, error, trace)
        advice = advice_on_files(traceback.format_exception_only(error), rank)
        if advice and not progress.is_launched():  # `dtk run` prints the advice itself, at the end
            print(advice, file=sys.stderr)
        print(f"dtk: {name} failed; ending the job", file=sys.stderr)
        sys.stderr.flush()
        if not isinstance(error, KeyboardInterrupt):  # which is nobody's failure
            failures.tell(failure)
        code = exit_code(error)
        # `dtk run` knows who failed first, and starts jobs again itself.
        os._exit(1 if code == TRY_AGAIN and progress.is_launched() else code)

    sys.excepthook = fail


def _end_with_thread(communicator: Communicator) -> None:
    """End the process as above at an exception that ends the thread that trains."""
    before = threading.excepthook

    def fail(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and communicator.is_kept_to(args.thread):
            sys.excepthook(args.exc_type, args.exc_value, args.exc_traceback)
        before(args)

    threading.excepthook = fail


# Stalls, in jobs that `dtk run` has not started; see `dtk.cluster.heartbeats`.

# Seconds for all ranks to reach rank 0; some of its addresses may be unreachable.
_REACH = 30.0


def checked_timeout(stall_timeout: float | None) -> float:
    """Return the stall timeout in seconds: the argument, DTK_STALL_TIMEOUT, or 300."""
    if stall_timeout is not None:
        if not progress.is_timeout(stall_timeout):
            raise ValueError(f"stall_timeout={stall_timeout!r}: expected {progress.TIMEOUTS}")
        return float(stall_timeout)
    text = os.environ.get(progress.VARIABLE) or str(progress.DEFAULT_TIMEOUT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not progress.is_timeout(seconds):
        raise ClusterError(f"{progress.VARIABLE}={text!r}: expected {progress.TIMEOUTS}")
    return seconds


def _watch(communicator: Communicator, timeout: float) -> None:
    """Make all ranks of a job watch each other; only the first call counts. All ranks call it."""
    progress.start()
    place, name = communicator.place, communicator.name
    rank, hosts = communicator.rank, communicator.hosts
    if place is None or name == "null":
        return
    if progress.is_launched():
        tasks = communicator.allgather_object(progress.is_task())
        if any(tasks):
            if not all(tasks) and rank == 0:
                print(
                    f"dtk: stalls will not be detected: rank {tasks.index(False)} trains in a "
                    "process that its own has started, and others do not",
                    file=sys.stderr,
                )
            return
    if progress.is_reporting():
        return
    # Here no launcher sees that a rank is gone, and TensorFlow's runtime not always.
    ends_at_loss = not has_mpi_launcher(place)
    timeout = timeout or (math.inf if ends_at_loss else 0.0)
    listener = None
    # How to reach rank 0's listener; the secret proves that a client is a rank of this job.
    addresses, port, secret = _addresses(communicator), 0, b""
    if rank == 0 and timeout:
        listener = heartbeats.Listener(addresses[0] if addresses == ("127.0.0.1",) else "")
        port, secret = listener.port, listener.secret
    told = communicator.broadcast_object((timeout, addresses, port, secret), 0)
    timeout, addresses, port, secret = told
    if not timeout:
        return
    lines: dict[int, heartbeats.Line] = {}
    if listener is not None:
        lines = listener.accept_clients(communicator.size, _REACH)
    else:
        line = heartbeats.connect(rank, addresses, port, secret)
        lines = {} if line is None else {0: line}
    # A rank that reached another listener by mistake is not among rank 0's clients.
    there, *others = communicator.allgather_object(sorted(lines))
    if len(there) < communicator.size - 1 or not all(others):
        for line in lines.values():
            line.end.close()
        if rank == 0:
            reached = [one for one, own in enumerate(others, 1) if own and one in there]
            missing = [str(one) for one in range(1, communicator.size) if one not in reached]
            print(
                f"dtk: stalls{' and lost ranks' * ends_at_loss} will not be detected: rank "
                f"{', '.join(missing)} cannot reach port "
                f"{port} of rank 0 ({', '.join(addresses)})"
            )
    else:
        watcher = heartbeats.Client if rank else heartbeats.Table
        watcher(heartbeats.Watched(rank, hosts, lines, timeout, ends_at_loss, name == "mpi"))


def _addresses(communicator: Communicator) -> tuple[str, ...]:
    """Return the addresses at which others may reach this rank, the likeliest first."""
    if len(set(communicator.hosts)) == 1:
        return ("127.0.0.1",)
    place = communicator.place
    told = [] if place is None else [one.rpartition(":")[0] for one in place.addresses]
    own = [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
    return tuple(dict.fromkeys([*told[:1], *own, communicator.hosts[0]]))
