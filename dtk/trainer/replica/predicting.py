"""Predict with all replicas and gather the rows: every rank gets every row, in order."""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from dtk.cluster import progress
from dtk.input import slicing
from dtk.nests import Leaf, Nest
from dtk.trainer import feed
from dtk.trainer.replica import replica_step
from dtk.trainer.strategy import Strategy
from dtk.trainer.tracing import lookups


def make_predict_function(model: keras.Model, strategy: Strategy) -> Callable[[list[Nest]], Nest]:
    """Make a function that predicts batches; each replica predicts its part."""
    sequence = strategy.new_sequence("predict")

    @tf.autograph.experimental.do_not_convert
    def one_step(data: Nest) -> Nest:
        with strategy.sequence(sequence):
            with progress.alone("the Python of"):
                outputs = predict_rows(data, model)
            return strategy.gather_outputs(outputs)

    @tf.autograph.experimental.do_not_convert
    def every_step(batches: list[Nest]) -> Nest:
        with lookups.in_place():
            outputs = [
                strategy.join_outputs(strategy.run(one_step, args=(data,))) for data in batches
            ]
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

    predict = every_step if model.run_eagerly else tf.function(every_step, reduce_retracing=True)

    @functools.wraps(every_step)
    def watched(batches: list[Nest]) -> Nest:
        with progress.inside("predict step"):
            return predict(batches)

    return watched


def predict_on_batch(predict: Callable[[list[Nest]], Nest], x: Nest, strategy: Strategy) -> Nest:
    """Predict one global batch."""
    ranks, size = strategy.local_ranks(), strategy.num_replicas_in_sync
    batch = slicing.cut_exactly(feed.as_tensors((x,)), ranks, size)
    outputs = predict([strategy.per_replica(batch)])
    return tf.nest.map_structure(
        lambda leaf: leaf if isinstance(leaf, tf.RaggedTensor) else leaf.numpy(), outputs
    )


def predict_rows(data: Nest, model: keras.Model) -> Nest:
    """Run Keras's predict step on this replica's rows; there may be none."""
    data = slicing.forget_rows(replica_step.without_optionals(data))
    predict = model.predict_step
    if model.jit_compile and not tf.executing_eagerly():
        predict = tf.function(predict, autograph=False, jit_compile=True, reduce_retracing=True)
    outputs = predict(slicing.padding_row(data))
    rows = slicing.count_rows(data)
    return keras.tree.map_structure(lambda output: _rows_of(output, rows), outputs)


def _rows_of(output: Leaf, rows: tf.Tensor) -> Leaf:
    if isinstance(output, tf.SparseTensor):
        raise ValueError(
            "predict cannot put sparse outputs of several workers together; end the model with "
            "tf.sparse.to_dense"
        )
    return output[:rows]
