"""Tasks of workers and parameter servers: serve until the chief is gone. Public TensorFlow only."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

import tensorflow as tf

from dtk.cluster import TFConfig, progress
from dtk.cluster.startup_barrier import Wait
from dtk.communicators import startup
from dtk.errors import ClusterError

# A worker computes one step at a time, but a server answers every worker.
_FEWEST_THREADS = 8

# The chief is gone when this many looks in a row, with so many seconds between, do not find it.
_LOOKS = 3
_LOOK_SECONDS = 0.9


def cluster_of(config: TFConfig) -> tf.train.ClusterSpec:
    """Return the tasks that TensorFlow connects: all but the evaluator, which works beside them."""
    return tf.train.ClusterSpec(
        {role: list(addresses) for role, addresses in config.cluster.items() if role != "evaluator"}
    )


def threads_to_wait_with() -> int:
    """Return the inter-op threads of a task: as user or launcher say, but not too few to wait with.

    A step that waits for another task holds one. With a single one, as a launcher may set it where
    processes share cores, a worker that waits for weights cannot receive them. 0: TensorFlow's
    choice, one per core.
    """
    asked = int(os.environ.get("TF_NUM_INTEROP_THREADS", "0")) or (os.cpu_count() or 1)
    return max(asked, _FEWEST_THREADS)


class Chief:
    """Chief of the job, as the tasks that serve it see it: there, or gone."""

    def __init__(self, config: TFConfig):
        self._name = f"{config.role} {config.index}"
        self._address = config.cluster["chief"][0]
        self._missed = 0
        self._looked = 0.0

    def await_(self) -> None:
        """Wait until the chief is there."""
        wait = Wait(self._name, startup.limit())
        while not startup.answers(self._address):
            if not wait.left:
                raise ClusterError(
                    f"{self._name}: no chief at {self._address} within {wait.limit:g} s; did it "
                    "start, and can this host reach it? (DTK_START_TIMEOUT sets the limit)"
                )
            wait.say(f"the chief, which does not answer at {self._address}")
            time.sleep(0.5)

    def is_gone(self) -> bool:
        """Return whether several looks in a row, a second apart, have found no chief."""
        if self._missed < _LOOKS and time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            self._missed = 0 if startup.answers(self._address) else self._missed + 1
        return self._missed >= _LOOKS


def serve(config: TFConfig) -> NoReturn:
    """Serve as this task, and end the process with the job: with 0 once the chief is gone."""
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
    progress.start(serves=True)
    chief = Chief(config)
    chief.await_()
    while not chief.is_gone():
        time.sleep(1.0)
    del server
    sys.stdout.flush()
    sys.stderr.flush()
    # TensorFlow's server has no orderly end.
    os._exit(0)
