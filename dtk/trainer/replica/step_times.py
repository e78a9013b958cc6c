"""Time a script's training step on its first batch, for `dtk tune`.

The timed step is the traced one over all ranks, reductions included. It runs on the first batch
again and again, to leave out reading data; then the script ends, before it can save any trained
weights.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import NoReturn

import keras
import tensorflow as tf

from dtk.cluster.variables import FUSED_BATCH_NORM, STEP_SETTINGS, TIME_STEPS
from dtk.communicators import determinism
from dtk.compat import keras_models
from dtk.errors import at_rank
from dtk.input import slicing
from dtk.trainer.replica import self_test
from dtk.trainer.strategy import Loop, Strategy, tell

_WARM_UP = 3  # the first run traces, the second may still allocate memory
_SECONDS = 3.0
_LEAST, _MOST = 5, 50


def described(model: keras.Model, first: slicing.Slices) -> str:
    """Describe the sizes that a step's time depends on: parameters, rows and shapes."""
    rows = sum(int(count) for count in first.counts)
    shapes = [tuple(leaf.shape[1:]) for leaf in tf.nest.flatten(first.parts[0])]
    return f"{model.count_params()} parameters, {rows} rows of {shapes}"


def before_training(
    function: Loop, first: slicing.Slices, model: keras.Model, strategy: Strategy
) -> None:
    """Under `dtk tune`, time the step and end the script; else check the step's settings."""
    if TIME_STEPS in os.environ:
        _end_after_timing(function, first, model, strategy)
    _check_settings(model, first, strategy)


def _end_after_timing(
    function: Loop, first: slicing.Slices, model: keras.Model, strategy: Strategy
) -> NoReturn:
    steps = model.steps_per_execution
    batches = iter(tf.data.Dataset.from_tensors(first).repeat())
    world = strategy.world

    def run() -> float:
        began = time.perf_counter()
        tf.nest.map_structure(lambda log: log.numpy(), function(batches))
        return (time.perf_counter() - began) / steps

    warm = [run() for _ in range(_WARM_UP)][-1] * steps
    count = world.broadcast_object(min(_MOST, max(_LEAST, int(_SECONDS / warm))))
    seconds = statistics.median(run() for _ in range(count))
    of_all = world.allgather_object(seconds)
    if strategy.is_chief:
        timing = {
            "milliseconds": 1000 * max(of_all),
            "model": described(model, first),
            "deterministic": determinism.is_asked_for(),
            "idle": _idle(model),
        }
        with open(os.environ[TIME_STEPS], "w") as file:
            json.dump(timing, file)
    self_test.end_script()


def _idle(model: keras.Model) -> list[str]:
    """Return the settings that change nothing for a model, since it lacks their layer."""
    norm = keras.layers.BatchNormalization
    normalizes = any(isinstance(layer, norm) for layer in keras_models.layers_of(model))
    return [] if normalizes else [FUSED_BATCH_NORM]


def _check_settings(model: keras.Model, first: slicing.Slices, strategy: Strategy) -> None:
    measured_with = os.environ.get(STEP_SETTINGS, "0")
    if measured_with == "0":
        return
    if determinism.is_asked_for():
        message = (
            "op determinism is on, but `dtk run` has set options that `dtk tune` has measured, "
            "and another measurement may choose others; run `dtk tune --forget "
            f"{sys.argv[0]}`, or set {STEP_SETTINGS}=0"
        )
        raise ValueError(at_rank(strategy.rank, message))
    mine = described(model, first)
    if mine != measured_with:
        message = f"the settings of this step were measured with {measured_with}, and it has {mine}"
        tell(strategy, f"{message}; `dtk tune` measures them anew")
