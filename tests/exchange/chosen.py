"""What the tests of exchange="auto" run, on every rank at once."""

from __future__ import annotations

import time

import keras
import numpy as np

import dtk
from dtk.communicators.costs import Costs
from exchange import exchanged

from strategies import bodies, cases


class SlowBefore(keras.callbacks.Callback):
    """Lets every other rank wait in its collectives, as on a slow link."""

    def on_train_batch_begin(self, batch, logs=None):
        if self.rank:
            time.sleep(0.06)


def fit(byte, epochs, directory=None, value="auto", options=None, window=None):
    """Train where a byte is said to take so many seconds.

    Returns weights, bytes per step of each epoch, and rank 0's words are in its log.
    """
    x, y = cases.rows(128)
    strategy = bodies.strategy()
    communicator, before = strategy.communicator, strategy.communicator.costs
    communicator.costs = Costs(communicator.size, 1e-4, byte, 1e-11)
    slow = SlowBefore()
    slow.rank = strategy.rank
    callbacks = [slow, dtk.callbacks.CommunicationStats()]
    if directory is not None:
        callbacks.append(dtk.callbacks.Checkpoint(directory, resume=True))
    try:
        with exchanged.exchanging(value):
            optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=window)
            model = exchanged.perceptron(strategy, optimizer, **options or {})
            history = model.fit(
                x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=callbacks
            ).history
    finally:
        communicator.costs = before
    return bodies.flat(model.get_weights()), np.array(history["comm_bytes"]), history["loss"]
