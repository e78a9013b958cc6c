"""Trains behind parameter servers; kills one of its own tasks in the middle, if one is named.

dtk run -n 2 --ps 2 losing_tasks.py DIRECTORY [ps:1]
"""

import sys
import time

import keras

import dtk

from support.bodies import digits
from support.served_bodies import task

directory, *victims = sys.argv[1:]
strategy = dtk.strategies.ParameterServerStrategy("async")


class Kill(keras.callbacks.Callback):
    steps = 0
    killed = 0.0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 90 and victims:
            role, _, index = victims[0].partition(":")
            task(role, int(index)).kill()
            self.killed = time.monotonic()


images, labels = digits()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
kill = Kill()
saver = dtk.callbacks.Checkpoint(directory, resume=True)
data = {"x": images[:640].reshape(-1, 64), "y": labels[:640], "batch_size": 16}
try:
    model.fit(**data, epochs=4, verbose=0, callbacks=[saver, kill])
except dtk.errors.ClusterError:
    print(f"noticed after {time.monotonic() - kill.killed:.1f} s", flush=True)
    raise
print(f"iterations {int(model.optimizer.iterations.numpy())}")
