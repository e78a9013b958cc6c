"""What workers and parameter servers do: serve until the chief is gone. Public TensorFlow only."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

import tensorflow as tf

from dtk.cluster import TFConfig
from dtk.communicators import startup
from dtk.errors import ClusterError

# A worker computes one step at a time, but a server answers every worker.
_FEWEST_THREADS = 8

# The chief is gone when this many looks in a row, a second apart, find nobody.
_LOOKS = 3


def cluster_of(config: TFConfig) -> tf.train.ClusterSpec:
    """The tasks that TensorFlow connects: all but the evaluator, who works beside them."""
    return tf.train.ClusterSpec(
        {role: list(addresses) for role, addresses in config.cluster.items() if role != "evaluator"}
    )


def threads_to_wait_with() -> int:
    """Inter-op threads of a task: as the user or launcher says, but not too few to wait with.

    A step that waits for another task holds one. With a single one, as a launcher may set it where
    processes share cores, a worker that waits for weights cannot receive them. 0: TensorFlow's
    choice, one per core.
    """
    asked = int(os.environ.get("TF_NUM_INTEROP_THREADS", "0")) or (os.cpu_count() or 1)
    return max(asked, _FEWEST_THREADS)


def serve(config: TFConfig) -> NoReturn:
    """Serve as this task, and end the process with the job: with 0 once the chief is gone.

    Raises:
        ClusterError: Its address cannot be listened on, or no chief comes.
    """
    name = f"{config.role} {config.index}"
    startup.check_free(config.index, config.cluster[config.role][config.index])
    with startup.quiet():
        server = tf.distribute.Server(
            cluster_of(config),
            job_name=config.role,
            task_index=config.index,
            config=tf.compat.v1.ConfigProto(
                inter_op_parallelism_threads=threads_to_wait_with(),
                intra_op_parallelism_threads=int(os.environ.get("TF_NUM_INTRAOP_THREADS", "0")),
            ),
            start=True,
        )
    chief = config.cluster["chief"][0]
    limit = startup.limit()
    deadline = time.monotonic() + limit
    while not startup.answers(chief):
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{name}: no chief at {chief} within {limit:g} s; did it start, and can this host "
                "reach it? (DTK_START_TIMEOUT sets the limit)"
            )
        time.sleep(0.5)
    missed = 0
    while missed < _LOOKS:
        time.sleep(1.0)
        missed = 0 if startup.answers(chief) else missed + 1
    del server
    sys.stdout.flush()
    sys.stderr.flush()
    # TensorFlow's server has no orderly end.
    os._exit(0)
