"""What the tests of callbacks that choose batch sizes run, on every rank at once."""

from __future__ import annotations

import keras
import tensorflow as tf

from callbacks.bodies import compiled, data, everything

ROWS, BATCH = 96, 8


def recorder(steps, rates):
    """Notes for every epoch how many steps it had, and the rate of its first."""

    class Recorder(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.inside = False

        def on_train_batch_begin(self, batch, logs=None):
            if not self.inside:
                self.inside = True
                rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

                steps.append(0)

        def on_train_batch_end(self, batch, logs=None):
            # Not optimizer.iterations: Keras counts the attempt to read beyond the end.
            steps[-1] += 1

    return Recorder()


def train(callbacks, optimizer, epochs=4, form="arrays", kind="world", **options):
    """Returns steps of each epoch, their rates, weights and history."""
    keras.utils.set_random_seed(3)
    model = compiled(optimizer, kind, **options)
    x, y = data(ROWS)
    given = {"x": x, "y": y, "batch_size": BATCH}
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    if form == "dataset":
        given = {"x": rows.batch(BATCH)}
    if form == "shuffled":
        given = {"x": rows.shuffle(ROWS).batch(BATCH)}
    steps, rates = [], []
    model.fit(
        **given,
        epochs=epochs,
        verbose=0,
        callbacks=[*callbacks, recorder(steps, rates)],
    )
    return steps, rates, everything(model), model.history.history
