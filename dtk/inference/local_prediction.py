"""Predict a batch in this process alone, whatever strategy the model was trained under."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from dtk.cluster.detect import detect
from dtk.communicators import LocalCommunicator
from dtk.communicators.base import Communicator
from dtk.compat import keras_models
from dtk.errors import NotDistributedError, at_rank
from dtk.nests import Array, Nest
from dtk.strategies.base import DtkStrategy
from dtk.trainer import model_scope
from dtk.trainer.ranks.rank_checks import compare


def strategy_of(model: keras.Model) -> DtkStrategy | None:
    """Return the strategy a model was built or compiled under; None if it was none of dtk's."""
    trainer = model_scope.trainer_of(model)
    owner = keras_models.owner_of(model) if trainer is None else trainer.strategy
    return owner if isinstance(owner, DtkStrategy) else None


def ranks_of(model: keras.Model, given: DtkStrategy | Communicator | None) -> Communicator:
    """Return the ranks that share work on a model."""
    given = strategy_of(model) if given is None else given
    if isinstance(given, DtkStrategy):
        return given.communicator
    if isinstance(given, Communicator):
        return given
    if given is not None:
        raise TypeError(
            f"strategy={given!r} is none of dtk's; give what dtk.auto_strategy() returned"
        )
    place = detect()
    if place.size > 1 and place.role in ("worker", "chief"):
        raise NotDistributedError(
            at_rank(
                place.rank,
                f"model {model.name!r} belongs to no strategy, in a job of {place.size} processes: "
                "each would do all of the work. Give strategy=..., or load the model inside "
                "strategy.scope()",
            )
        )
    return LocalCommunicator()


def check_ready(model: keras.Model, communicator: Communicator) -> str:
    """Make a model's weights final and equal on all ranks. Every rank calls this."""
    if not model.built:
        raise ValueError(
            at_rank(
                communicator.rank,
                f"model {model.name!r} has no weights yet: fit it, load it from a file, or call it "
                "on one batch first",
            )
        )
    trainer = model_scope.trainer_of(model)
    if trainer is not None:
        trainer.flush()
    found = digest_of(model)
    compare(
        [("model's weights (their hash)", found)],
        communicator,
        "load the same file on every rank, or train the model in strategy.scope()",
    )
    return found


def digest_of(model: keras.Model) -> str:
    """Compute a hash of a model's weights."""
    digest = hashlib.blake2b(type(model).__name__.encode(), digest_size=16)
    for variable in model.weights:
        digest.update(f"{tuple(variable.shape)} {variable.dtype}".encode())
        digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable)).tobytes())
    return digest.hexdigest()


def predictor(model: keras.Model) -> Callable[[Nest], Nest]:
    """Make a function that predicts a batch without asking other processes.

    `Model.predict` of a distributed model is a collective of all ranks. This is not: each rank may
    predict other batches, and as many as it likes. Where one process holds several devices, or has
    workers behind parameter servers, all of them compute.
    """
    strategy = strategy_of(model)
    if strategy is not None and _has_several_replicas(strategy):
        return lambda data: model.predict_on_batch(keras.utils.unpack_x_y_sample_weight(data)[0])

    @tf.autograph.experimental.do_not_convert
    def predict(data: Nest) -> Nest:
        return model.predict_step(data)

    compiled = predict if model.run_eagerly else tf.function(predict, reduce_retracing=True)
    return lambda data: tf.nest.map_structure(_as_array, compiled(data))


def _has_several_replicas(strategy: DtkStrategy) -> bool:
    """Return whether this process computes with more than itself, or than one device."""
    return len(strategy.local_ranks()) > 1 or strategy.processes != strategy.communicator.size


def _as_array(output: tf.Tensor | tf.RaggedTensor | tf.SparseTensor) -> Array:
    if isinstance(output, tf.RaggedTensor | tf.SparseTensor):
        raise ValueError(
            f"an output is a {type(output).__name__}, which files of rows cannot hold; end the "
            "model with to_tensor() or tf.sparse.to_dense"
        )
    return keras.ops.convert_to_numpy(output)
