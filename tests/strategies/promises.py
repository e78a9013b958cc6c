"""Bodies for what dtk promises besides equality; see test_promises.py."""

from __future__ import annotations

import sys
import warnings

import keras
import numpy as np
import tensorflow as tf

from dtk.strategies import undistributed
from dtk.trainer.model_scope import trainer_of
from dtk.trainer.shuffle_seed import ShuffleSeed

from strategies import bodies, cases


class Recorder(cases.Subclassed):
    """Remembers which rows each step saw; x holds the row's number."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def call(self, x):
        return self.outer(self.inner(tf.repeat(x, 64, axis=1)))

    def train_step(self, data):
        self.seen.append(np.ravel(data[0]).astype(int).tolist())
        return super().train_step(data)


def order_of_rows(seed, devices=0):
    """Rows this process saw, per epoch and step; with a seed of the script's own, or none."""
    strategy = bodies.strategy(devices)
    keras.utils.set_random_seed(seed or 123)
    if not seed:  # as dtk does at its start when the script has set none
        strategy.shuffle_seed = ShuffleSeed(123)
    model = cases.compiled(strategy, Recorder, run_eagerly=True)
    # It would remember the rows of a trial, too.
    trainer_of(model).kinds["train"] = {}
    x = np.arange(23, dtype="float32")[:, None]
    model.fit(x, x[:, 0] % 10, batch_size=5, epochs=2, verbose=0)
    return model.seen[:5], model.seen[5:]


def differing(model):
    """Indices of the variables that are not the same on all ranks."""
    from dtk.trainer.ranks import shared_weights

    trainer = trainer_of(model)
    return shared_weights.differing(trainer.shared_variables(), trainer.strategy)


def starts_apart():
    """Ranks build different weights and train; returns the paths that differ afterwards."""
    strategy = bodies.strategy()
    x, y = cases.rows(16)
    model = cases.compiled(strategy, lambda: cases.small(seed=strategy.rank))
    keras.utils.set_random_seed(1)  # the rows must come in one order, whatever the weights
    before = differing(model)
    model.fit(x, y, batch_size=8, verbose=0)
    return before, differing(model), model.get_weights()


def weights_of_rank_0_alone():
    """Rank 0 alone is given other weights, then single batches: who trains from which?"""
    strategy = bodies.strategy()
    x, y = cases.rows(16)
    trained = []
    for under, given in ((strategy, strategy.is_chief), (None, True)):
        model = cases.compiled(under)
        if given:
            model.set_weights([weight + 0.1 for weight in model.get_weights()])
        with undistributed():
            for rows in (16, 16, 7):
                model.train_on_batch(x[:rows], y[:rows])
        trained.append(model)
    return differing(trained[0]), *(bodies.flat(model.get_weights()) for model in trained)


def one_model_more_on_rank_0():
    """Keras then names all later ones differently; returns names and weights."""
    strategy = bodies.strategy()
    if strategy.is_chief:
        cases.small()
    x, y = cases.rows(16)
    model = cases.compiled(strategy)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    return [v.path for v in model.variables], bodies.flat(model.get_weights())


def dropout_masks(devices=0):
    """What dropout lets through, on every replica, and again from the same seed."""
    strategy = bodies.strategy(devices)

    def once():
        keras.utils.set_random_seed(1)
        model = cases.compiled(strategy, lambda: keras.Sequential([
            keras.Input((64,)), keras.layers.Dropout(0.5, seed=7), keras.layers.Dense(2)
        ]))  # fmt: skip
        model.fit(np.ones((4, 64), "float32"), np.ones(4), batch_size=4, verbose=0)

        @tf.function
        def masks():
            return strategy.run(lambda: model.layers[0](tf.ones([1, 64]), training=True))

        values = strategy.experimental_local_results(masks())
        return [v.numpy().ravel().tolist() for v in values]

    return once(), once()


def local_normalisation():
    """Moving statistics of a BatchNormalization that is not synchronized, with an empty slice."""
    strategy = bodies.strategy()
    x, y = cases.rows(9)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)  # the last batch has one row
    model = cases.compiled(strategy, lambda: cases.small(sync=False))
    model.fit(dataset, epochs=2, verbose=0, shuffle=False)
    return [v.numpy() for v in model.layers[2].non_trainable_variables], model.get_weights()


def half_precision():
    """mixed_float16 with dynamic loss scaling: weights with and without the strategy."""
    strategy = bodies.strategy()

    def train(under):
        keras.mixed_precision.set_global_policy("mixed_float16")
        try:
            x, y = cases.rows(75)
            # A scale that never overflows: whether a sum of float16 overflows depends on its parts.
            inner = keras.optimizers.SGD(0.05, momentum=0.9)
            optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**8)
            model = cases.compiled(under, optimizer=optimizer)
            with undistributed():
                model.fit(x, y, batch_size=16, epochs=4, verbose=0)
        finally:
            keras.mixed_precision.set_global_policy("float32")
        return bodies.flat(model.get_weights())

    return train(strategy), train(None)


def own_loop(devices=0):
    """A custom loop as tf.distribute documents it; returns the weights and the reduced loss."""
    return _loop(bodies.strategy(devices))


def own_loop_plain():
    """The same under TensorFlow's default strategy, which is one process without any."""
    return _loop(tf.distribute.get_strategy())


def _loop(strategy):
    x, y = cases.rows(48)
    with strategy.scope():
        model = cases.small()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
    dataset = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    )

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            per_row = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            loss = tf.reduce_sum(per_row) / 16
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def step(x, y):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    losses = [float(step(*batch)) for batch in dataset]
    return bodies.flat(model.get_weights()), losses, strategy.num_replicas_in_sync


def own_loop_in_a_function(pipelines, devices=0):
    """The same, with the loop over an epoch inside one `tf.function` that gets the dataset.

    With `pipelines` every worker makes a dataset of its own, of rows that together are the same.
    Returns the weights, the loss of both epochs, and how often the function was traced.
    """
    return _loop_in_a_function(pipelines, bodies.strategy(devices))


def own_loop_in_a_function_plain(pipelines):
    """The same under TensorFlow's default strategy, which is one process without any."""
    return _loop_in_a_function(pipelines, tf.distribute.get_strategy())


def _loop_in_a_function(pipelines, strategy):
    x, y = cases.rows(45)
    with strategy.scope():
        model = cases.small()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def pipeline(context):
        # Worker 0 reads ten rows of every fifteen, worker 1 the other five; alone it reads all.
        mine = np.arange(45) % 15
        chosen = (mine < 10) == (context.input_pipeline_id == 0)
        alone = context.num_input_pipelines == 1
        size = 15 if alone else int(chosen[:15].sum())
        rows = slice(None) if alone else chosen
        return tf.data.Dataset.from_tensor_slices((x[rows], y[rows])).batch(size)

    if pipelines:
        dataset = strategy.distribute_datasets_from_function(pipeline)
    else:
        # The last batch has one row: the second worker has none.
        whole = tf.data.Dataset.from_tensor_slices((x[:31], y[:31])).batch(15)
        dataset = strategy.experimental_distribute_dataset(whole)
    traced = []

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            per_row = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            loss = tf.reduce_sum(per_row) / 15
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def epoch(batches):
        traced.append(1)
        total = tf.zeros(())
        for x, y in batches:
            losses = strategy.run(replica_step, args=(x, y))
            total += strategy.reduce("SUM", losses, axis=None)
        return total

    losses = [float(epoch(dataset)) for _ in range(2)]
    return bodies.flat(model.get_weights()), losses, len(traced)


def own_pipelines():
    """`fit` on a dataset made per worker: rows of the global batch are known only by summing."""
    strategy = bodies.strategy()
    x, y = cases.rows(30)

    def pipeline(context):
        # Worker 0 reads two rows of every three, worker 1 the third.
        mine = np.arange(30) % 3
        chosen = mine < 2 if context.input_pipeline_id == 0 else mine == 2
        size = 10 if context.input_pipeline_id == 0 else 5
        return tf.data.Dataset.from_tensor_slices((x[chosen], y[chosen])).batch(size)

    model = cases.compiled(strategy, metrics=["accuracy"])
    dataset = strategy.distribute_datasets_from_function(pipeline)
    history = model.fit(dataset, epochs=3, verbose=0, shuffle=False)
    return bodies.flat(model.get_weights()), history.history


def own_pipelines_plain():
    """The same global batches in one process."""
    x, y = cases.rows(30)
    order = np.concatenate([np.arange(30).reshape(2, 5, 3)[i].T.ravel() for i in range(2)])
    model = cases.compiled(None, metrics=["accuracy"])
    dataset = tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(15)
    history = model.fit(dataset, epochs=3, verbose=0, shuffle=False)
    return bodies.flat(model.get_weights()), history.history


def nothing_left_patched():
    """Keras as it was, after a scope and a fit."""
    from keras.src.losses import loss
    from keras.src.trainers.trainer import Trainer

    def patched():
        of_losses = loss.reduce_weighted_values, loss.scale_loss_for_distribution
        return Trainer.compile, keras.metrics.Mean.update_state, *of_losses

    x, y = cases.rows(8)
    before = patched()
    cases.compiled(bodies.strategy()).fit(x, y, verbose=0)
    after = patched()
    plain = cases.compiled(None)
    return before == after, "fit" in vars(plain)


def one_reduction_per_window():
    """Bytes sent in an epoch of 4 steps, without and with a window of 4."""
    strategy = bodies.strategy()
    x, y = cases.rows(32)
    sent = []
    for steps in (None, 4):
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps)
        model = cases.compiled(strategy, cases.Subclassed, optimizer=optimizer)
        model.fit(x, y, batch_size=8, verbose=0)
        before = strategy.communicator.bytes_sent
        model.fit(x, y, batch_size=8, verbose=0)
        sent.append(strategy.communicator.bytes_sent - before)
    return sent, 4 * sum(int(np.prod(v.shape)) for v in model.trainable_variables)


class Stop(keras.callbacks.Callback):
    """Wants to stop after a batch, and counts the batches it sees."""

    def __init__(self, after):
        super().__init__()
        self.after, self.batches = after, 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == self.after:
            self.model.stop_training = True


def stopped_by(given):
    """`fit` of 2 epochs of 5 steps, which the last rank wants to stop after 3 steps.

    Returns the batches seen (None without a callback), the optimizer's count, the epochs logged,
    and the weights.
    """
    strategy = bodies.strategy()
    wishes = strategy.rank == strategy.size - 1
    x, y = cases.rows(40)
    stop = Stop(after=3 if wishes else None)
    kinds = {
        "a callback of the script's own": [stop],
        "a callback on one rank alone": [stop] if wishes else [],
        "a function": [keras.callbacks.LambdaCallback(on_train_batch_end=stop.on_train_batch_end)],
    }
    model = cases.compiled(strategy)
    stop.set_model(model)
    fitted = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=kinds[given])
    seen = stop.batches if kinds[given] else None
    steps, epochs = int(model.optimizer.iterations.numpy()), len(fitted.history["loss"])
    return seen, steps, epochs, bodies.flat(model.get_weights())


def mirrored_in_this_job():
    """What MirroredStrategy warns of: class, text and file of each warning."""
    from dtk.strategies import MirroredStrategy

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MirroredStrategy(devices=1)
    return [(w.category.__name__, str(w.message), w.filename) for w in caught]


def output_of_fit():
    """What rank prints during a fit with a progress bar."""
    import contextlib
    import io

    x, y = cases.rows(16)
    model = cases.compiled(bodies.strategy())
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        model.fit(x, y, batch_size=8)
        model.evaluate(x, y)
        model.predict(x)
    sys.stdout.flush()
    return text.getvalue()
