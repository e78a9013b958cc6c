"""Tasks of workers and parameter servers: they serve until the chief is gone.

This file uses public TensorFlow only.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import NoReturn

import tensorflow as tf

from dtk.cluster import TFConfig, progress
from dtk.cluster.startup_barrier import Wait
from dtk.communicators import startup
from dtk.errors import ClusterError, as_passing

# A worker computes one step at a time, but a server answers every worker.
_FEWEST_THREADS = 8

# The chief is gone if it does not answer this many times in a row, so many seconds apart.
_LOOKS = 3
_LOOK_SECONDS = 0.9


def cluster_of(config: TFConfig) -> tf.train.ClusterSpec:
    """Return the tasks that TensorFlow connects: all but the evaluator."""
    return tf.train.ClusterSpec(
        {role: list(addresses) for role, addresses in config.cluster.items() if role != "evaluator"}
    )


def threads_to_wait_with() -> int:
    """Return the inter-op threads of a task: the number that is set, else one per core, at least 8.

    A step that waits for another task holds a thread. With a single one, which a launcher may set
    if processes share cores, a worker that waits for weights could not receive them.
    """
    asked = int(os.environ.get("TF_NUM_INTEROP_THREADS", "0")) or (os.cpu_count() or 1)
    return max(asked, _FEWEST_THREADS)


def await_tasks(name: str, tasks: Mapping[str, str]) -> None:
    """Wait, as the task `name`, until other tasks answer: name -> address."""
    wait = Wait(name, startup.limit())
    missing = dict(tasks)
    while missing := {task: at for task, at in missing.items() if not startup.answers(at)}:
        tasks_missing = ", ".join(f"{task} ({at})" for task, at in missing.items())
        if not wait.left:
            message = (
                f"{name}: not there after {wait.limit:g} s: {tasks_missing}. Did they start, and "
                "can this host reach them? (DTK_START_TIMEOUT sets the limit)"
            )
            raise as_passing(ClusterError(message))
        wait.say(tasks_missing)
        time.sleep(0.1)


class Chief:
    """Tells the tasks that serve the chief whether it is there."""

    def __init__(self, config: TFConfig):
        self._name = f"{config.role} {config.index}"
        self._address = config.cluster["chief"][0]
        self._missed = 0
        self._looked = 0.0

    def await_(self) -> None:
        """Wait until the chief answers."""
        await_tasks(self._name, {"chief": self._address})

    def is_gone(self) -> bool:
        """Return whether the chief has not answered several times in a row, a second apart."""
        if self._missed < _LOOKS and time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            self._missed = 0 if startup.answers(self._address) else self._missed + 1
        return self._missed >= _LOOKS


def serve(config: TFConfig, gpu: str | None) -> NoReturn:
    """Serve as this task, on that GPU or none; end the process with 0 once the chief is gone."""
    startup.check_free(config.index, config.cluster[config.role][config.index], config.training)
    # The server's devices ask for memory by its own options, not by those of `tf.config`.
    grows = [
        tf.config.experimental.get_memory_growth(one)
        for one in tf.config.get_visible_devices("GPU")
        if one.name == gpu
    ]
    with startup.quiet():
        server = tf.distribute.Server(
            cluster_of(config),
            job_name=config.role,
            task_index=config.index,
            config=tf.compat.v1.ConfigProto(
                inter_op_parallelism_threads=threads_to_wait_with(),
                intra_op_parallelism_threads=int(os.environ.get("TF_NUM_INTRAOP_THREADS", "0")),
                device_count={"GPU": 0 if gpu is None else 1},
                gpu_options=tf.compat.v1.GPUOptions(
                    visible_device_list="" if gpu is None else gpu.rpartition(":")[2],
                    allow_growth=any(grows),
                ),
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
    # TensorFlow's server cannot be stopped.
    os._exit(0)
