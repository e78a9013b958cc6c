"""The start of a strategy: ranks agree on a script and a seed, and will end together."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import random
import sys
import traceback
from types import TracebackType

import keras
import tensorflow as tf

from dtk.cluster import progress
from dtk.cluster.environment import instructions
from dtk.cluster.variables import FUSED_ADAM, FUSED_BATCH_NORM, JIT_COMPILE
from dtk.communicators import determinism
from dtk.communicators.base import Communicator
from dtk.communicators.cost_cache import calibrate
from dtk.compat import tf_replicas
from dtk.errors import advice_on_files
from dtk.strategies import devices, watching
from dtk.trainer.ranks import rank_checks
from dtk.version import __version__, is_tested, requirement

# Variables that choose kernels; ranks must agree on them to compute the same sums.
_KERNELS = ("TF_ENABLE_ONEDNN_OPTS", JIT_COMPILE, FUSED_BATCH_NORM, FUSED_ADAM)


def agree(
    communicator: Communicator, device: str, stall_timeout: float, **chosen: str
) -> int | None:
    """Check that all ranks run the same program; share a seed; end together on an exception.

    Afterwards the communicator knows whether processors are alike, and what messages cost.
    """
    if communicator.size == 1:
        return None
    end_together(communicator)
    watching.watch(communicator, stall_timeout)
    asked = str(determinism.is_asked_for())
    check_same_program(communicator, **chosen, **{"deterministic ops": asked})
    gathered = communicator.allgather_object((processor(), devices.given(device)))
    processors = [kind for kind, _ in gathered]
    devices.warn_of_shared([name for _, name in gathered], communicator)
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
    for package, found in (("tensorflow", tf.__version__), ("keras", keras.__version__)):
        if not is_tested(package, found):
            print(
                f"dtk: was not tested with {package} {found}: pip install "
                f"'{requirement(package)}', or compare with one process by `dtk check`",
                file=sys.stderr,
            )


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
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:8]


def share_seed(communicator: Communicator) -> int | None:
    """Give all ranks one seed, unless the script has set one, so that all shuffle alike.

    Every rank reads the same global batches and keeps a slice of each, so the order of rows must be
    the same on all ranks. `fit` derives the seeds that must differ by rank, such as for dropout.
    """
    proposal = random.SystemRandom().randrange(2**31)
    gathered = communicator.allgather_object((tf_replicas.global_seed(), proposal))
    seeds = [seed for seed, _ in gathered]
    if all(seed is None for seed in seeds):
        chosen = gathered[0][1]
        keras.utils.set_random_seed(chosen)
        return chosen
    what = "random seed (every rank must shuffle alike)"
    mine = [(what, seeds[communicator.rank])]
    for rank, seed in enumerate(seeds):
        rank_checks.raise_first_difference(mine, [(what, seed)], communicator.rank, rank)
    return None


def end_together(communicator: Communicator) -> None:
    """On an uncaught exception, name this rank and end the process at once."""
    host = communicator.hosts[communicator.rank] if communicator.hosts else "this host"
    end_at_once(f"rank {communicator.rank} on {host}", communicator.rank)


def end_at_once(name: str, rank: int = 0) -> None:
    """On an uncaught exception, name the failed task and end the process abruptly.

    An orderly shutdown would wait for the other tasks, which wait for this one. An abrupt end lets
    the launcher (dtk run, mpirun, srun) see the failure and stop the rest. The previous hook,
    Python's or the script's, runs first.
    """
    before = sys.excepthook

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.stdout.flush()
        before(kind, error, trace)
        advice = advice_on_files(traceback.format_exception_only(error), rank)
        if advice and not progress.is_launched():  # `dtk run` prints the advice itself, at the end
            print(advice, file=sys.stderr)
        print(f"dtk: {name} failed; ending the job", file=sys.stderr)
        sys.stderr.flush()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = fail
