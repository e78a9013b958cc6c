"""Measuring: contenders take turns, so that whatever else the machine does falls on all alike."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dtk.communicators import Communicator
from dtk.strategies import AllReduceStrategy
from dtk.tuning.bench.contender import Alone, Contender, Together
from dtk.tuning.bench.models import PROBLEMS
from dtk.tuning.bench.setting import Setting
from dtk.version import __version__

# Bytes of the all-reduces: of a few, what a message takes; of many, what a byte does.
_SIZES = (4 << 10, 4 << 20)
_REPEATS = 11


def measure(setting: Setting, strategy: AllReduceStrategy) -> Iterator[dict[str, Any]]:
    """Measure everything. Every rank calls it, and iterates to the end.

    Args:
        setting: What to measure.
        strategy: Of all ranks.

    Yields:
        What `results.line` takes, the same on every rank, as it is measured.
    """
    yield {"setting": describe(setting, strategy.communicator)}
    for size in _SIZES:
        yield {"allreduce": size, "seconds": allreduces(size, strategy.communicator)}
    for model in setting.models:
        problem = PROBLEMS[model]
        limit = Alone(problem, setting, strategy)
        others = [Together(problem, setting, strategy, name) for name in setting.exchanges]
        yield {"model": model, "parameters": limit.model.count_params()}
        for turn in take_turns([limit, *others], setting.rounds, strategy.communicator):
            yield {"model": model, **turn}
        del limit, others
        keras.utils.clear_session()


def allreduces(size: int, communicator: Communicator) -> list[float]:
    """Seconds of each of some all-reduces, on this rank. Every rank calls it.

    Args:
        size: Bytes.
        communicator: Between the ranks. All begin together.
    """
    reduce = tf.function(lambda flat: tf.reduce_sum(communicator.allreduce(flat)))
    flat = tf.ones([size // tf.float32.size])
    seconds = []
    for number in range(_REPEATS + 1):
        communicator.barrier()
        began = time.perf_counter()
        reduce(flat).numpy()
        if number:  # in the first one it is traced
            seconds.append(time.perf_counter() - began)
    return seconds


def take_turns(
    contenders: Sequence[Contender], rounds: int, communicator: Communicator
) -> Iterator[dict[str, Any]]:
    """Let each have a turn, so many times, and begin at the other end every other time.

    Args:
        contenders: The same on all ranks.
        rounds: Turns of each. One more goes before them, in which they trace their functions.
        communicator: Lets all ranks begin a turn at the same time.

    Yields:
        The contender, and what each rank read.
    """
    for number in range(rounds + 1):
        for contender in contenders if number % 2 else reversed(contenders):
            communicator.barrier()
            turn = communicator.allgather_object(dataclasses.asdict(contender.turn()))
            if number:
                yield {"contender": contender.name, "turn": turn}


def describe(setting: Setting, communicator: Communicator) -> dict[str, Any]:
    """What is measured, on what, with which versions. Every rank calls it."""
    mine = {
        "host": communicator.hosts[communicator.rank],
        "cores": len(os.sched_getaffinity(0)),
        # `dtk run` gives every rank its share of the cores, unless the user has said otherwise.
        "threads": int(os.environ["TF_NUM_INTRAOP_THREADS"]),
    }
    return {
        **dataclasses.asdict(setting),
        "workers": communicator.size,
        "ranks": communicator.allgather_object(mine),
        "communicator": communicator.name,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "dtk": __version__,
    }
