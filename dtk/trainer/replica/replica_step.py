"""One replica's step, from its rows to the update, so that all replicas equal one process.

run_step             this replica's rows of the global batch, and their share of it
  Keras's own step     forward pass, loss (`traced_step` weighs it), backward pass
    apply_gradients      the gradients' sum over all replicas, then the optimizer's update
  `step_metrics`       metrics, moving statistics and logs of the global batch
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from dtk import placement
from dtk.cluster import progress
from dtk.compat import keras_data, keras_models, keras_steps, keras_variables, tf_replicas
from dtk.errors import NotDistributedError, UncompilableError, at_rank
from dtk.input import slicing
from dtk.nests import Leaf, Tree
from dtk.patches import temporarily
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.replica import compiled_step, step_metrics, whole_batch
from dtk.trainer.strategy import StepFunction, Strategy
from dtk.trainer.tracing import lookups, traced_step


@contextlib.contextmanager
def patched(model: keras.Model, gathered: Sequence[keras.Metric]) -> Iterator[None]:
    """Return the context in which replicas trace `run_step`, or run it eagerly."""
    with (
        traced_step.weighing_by_rows(),
        keras_steps.patch_metrics(keras_models.metrics_of(model), "result", step_metrics.result_of),
        keras_steps.patch_moments(step_metrics.moments_of_all_replicas),
        whole_batch.losses_of_all_rows(model),
        keras_steps.patch_sums_of_losses(whole_batch.summed_by_losses),
        lookups.in_place(),
        whole_batch.counted_on_all_rows(gathered),
    ):
        yield


def run_step(
    step_function: StepFunction,
    batch: slicing.Slices,
    model: keras.Model,
    strategy: Strategy,
    kinds: Mapping[str, str],
    tried: bool = False,
) -> Tree:
    """Run Keras's own train or test step on this replica's slice, then make its logs global.

    This Python runs while the step is traced, or eagerly, and waits for no rank by itself: code
    that does wait reports so.
    """
    data, step = begin_step(step_function, batch, model, strategy, kinds)
    step.tried = tried
    trains = step_function.__name__ == "train_step"
    world = step_metrics.WorldState(step)
    if not (trains and any(e.local for e in shared_optimizer.gradient_exchanges_of(model))):
        step.result_of = world.result_of
    tracing = progress.alone("the Python of")
    # A step after the last rows is to change nothing.
    after = tf.control_dependencies([] if slicing.is_known(batch.rows) else [step.rows])
    with (
        tracing,
        after,
        traced_step.tracing(step),
        tf_replicas.counted_if(step.present),
        taking_turns(model, strategy),
    ):
        # Forward pass, loss and backward pass; Keras hands the gradients to `apply_gradients`.
        logs = _compute(step_function, data, step, strategy)
        world.forget_padding()
        if trains:
            check_reduced(step, strategy)
            if step_metrics.average_after_block(step):
                return logs
            step_metrics.warn_unsynchronized_norms(step, strategy)
        world.average()
        return step_metrics.of_all_replicas(step, logs)


@contextlib.contextmanager
def taking_turns(model: keras.Model, strategy: Strategy) -> Iterator[None]:
    """Return a context of a replica's step, in which it counts as if it ran alone.

    Eager replicas of one process take turns, and a step may count in attributes of its model: each
    begins with the numbers with which the first one began.
    """
    if not tf.executing_eagerly() or len(strategy.local_ranks()) == 1:
        yield
        return
    kept = functools.partial(keras_models.numbers_kept, model)
    with temporarily(tf_replicas.running, while_others_run=kept):
        whole_batch.sum_over_replicas(tf.zeros([]))  # waits, so that all others begin, too
        yield


def begin_step(
    step_function: StepFunction,
    batch: slicing.Slices,
    model: keras.Model,
    strategy: Strategy,
    kinds: Mapping[str, str],
) -> tuple[Tree, traced_step.Step]:
    """Return this replica's rows, and its step."""
    index = strategy.local_index()
    data = slicing.forget_rows(batch.parts[index])
    with tf.device(placement.host()):
        mine = batch.counts[index]
        known = slicing.is_known(batch.rows)
        rows = batch.rows if known else _or_end(whole_batch.sum_over_replicas(mine))
        share = tf.math.divide_no_nan(tf.cast(mine, tf.float64), tf.cast(rows, tf.float64))
        rows, present = tf.cast(rows, tf.int64), mine > 0
    step = traced_step.Step(
        share=share,
        model=model,
        sum_over_replicas=whole_batch.sum_over_replicas,
        rows=rows,
        kinds=kinds,
        weighs_loss=traced_step.takes_own_step(step_function, model),
        present=present,
    )
    return data, step


def _or_end(rows: tf.Tensor) -> tf.Tensor:
    """Return the rows of a step; without any, end as a dataset ends, on all ranks at once."""

    def end() -> tf.Tensor:
        return next(iter(tf.data.Dataset.range(0)))

    return tf.cond(rows > 0, lambda: rows, end)


def _compute(
    step_function: StepFunction, data: Tree, step: traced_step.Step, strategy: Strategy
) -> Tree:
    """Run Keras's own step, compiled by XLA where the model asks for it."""
    compiles = bool(step.model.jit_compile) and not tf.executing_eagerly()
    compiled_step.compile_updates(step.model, compiles)
    if not compiles:
        return step_function(data)
    compiled = compiled_step.CompiledStep(
        step_function, step, factors=strategy.communicator.size > 1
    )
    try:
        run = compiled.trace(data)
    except UncompilableError as why:
        compiled_step.fall_back_to_graph(step.model, strategy, str(why))
        return step_function(data)
    return run()


def check_reduced(step: traced_step.Step, strategy: Strategy) -> None:
    """Check that a train step gave its gradients to an optimizer that reduces them."""
    if step.reductions or not step.model.trainable_variables:
        return
    message = (
        f"the first training step of model {step.model.name!r} finished without reducing any "
        f"gradient over {strategy.num_replicas_in_sync} replicas, so each would train "
        "alone. Its train_step must hand gradients to an optimizer that is an attribute of the "
        "model (self.optimizer.apply(gradients, self.trainable_variables))."
    )
    raise NotDistributedError(at_rank(strategy.rank, message))


def without_optionals(data: Tree) -> Tree:
    """Replace values that Keras marks as absent (`Optional`) by None."""
    return keras.tree.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )


# Prediction: every rank gets every row, in order.


def make_predict_function(model: keras.Model, strategy: Strategy) -> Callable[[list[Tree]], Tree]:
    """Make a function that predicts batches; each replica predicts its part."""
    sequence = strategy.new_sequence("predict")

    @tf.autograph.experimental.do_not_convert
    def one_step(data: Tree) -> Tree:
        with strategy.sequence(sequence):
            with progress.alone("the Python of"):
                outputs = predict_rows(data, model)
            return strategy.gather_outputs(outputs)

    @tf.autograph.experimental.do_not_convert
    def every_step(batches: list[Tree]) -> Tree:
        with lookups.in_place():
            outputs = [
                strategy.join_outputs(strategy.run(one_step, args=(data,))) for data in batches
            ]
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

    predict = every_step if model.run_eagerly else tf.function(every_step, reduce_retracing=True)

    @functools.wraps(every_step)
    def watched(batches: list[Tree]) -> Tree:
        with progress.inside("predict step"):
            return predict(batches)

    return watched


def build_by_predicting(model: keras.Model, batch: Tree, strategy: Strategy) -> None:
    """Build the layers of a model by the prediction of one replica, which is not run."""
    rows = tf.nest.map_structure(lambda leaf: keras_variables.components(leaf)[0], batch)

    def predict() -> Tree:
        with tf_replicas.as_one_replica(strategy):
            return predict_rows(rows, model)

    with strategy.scope(), keras_variables.created_at_once(lambda made: None):
        if model.run_eagerly:
            predict()
        else:
            tf.function(predict, autograph=False).get_concrete_function()


def predict_on_batch(predict: Callable[[list[Tree]], Tree], x: Tree, strategy: Strategy) -> Tree:
    """Predict one global batch."""
    ranks, size = strategy.local_ranks(), strategy.num_replicas_in_sync
    batch = slicing.cut_batch(keras_data.as_tensors((x,)), ranks, size)
    outputs = predict([strategy.per_replica(slicing.without_padding(batch))])
    return tf.nest.map_structure(
        lambda leaf: leaf if isinstance(leaf, tf.RaggedTensor) else leaf.numpy(), outputs
    )


def predict_rows(data: Tree, model: keras.Model) -> Tree:
    """Run Keras's predict step on this replica's rows; there may be none."""
    data = slicing.forget_rows(without_optionals(data))
    predict = model.predict_step
    if model.jit_compile and not tf.executing_eagerly():
        predict = tf.function(predict, autograph=False, jit_compile=True, reduce_retracing=True)
    rows = slicing.count_rows(data)
    with tf_replicas.counted_if(rows > 0):
        outputs = predict(slicing.padding_row(data))
    return keras.tree.map_structure(lambda output: _rows_of(output, rows), outputs)


def _rows_of(output: Leaf, rows: tf.Tensor) -> Leaf:
    if isinstance(output, tf.SparseTensor):
        raise ValueError(
            "predict cannot put sparse outputs of several workers together; end the model with "
            "tf.sparse.to_dense"
        )
    taken, made = tf.maximum(rows, 1), slicing.count_rows(output)
    fits = tf.debugging.Assert(
        made % taken == 0,
        [
            "predict: a worker's",
            taken,
            "rows give an output of",
            made,
            "rows; they must give one "
            "row each, or several, since workers' outputs are joined in the order of their rows",
        ],
    )
    with tf.control_dependencies([] if fits is None else [fits]):
        return output[: made // taken * rows]  # none of a padding row
