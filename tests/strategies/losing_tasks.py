"""Trains behind parameter servers, and kills one of its own tasks in the middle.

dtk run -n 2 --ps 2 losing_tasks.py worker:1 DIRECTORY [pipelines | downpour]
"""

import contextlib
import json
import os
import sys
import time

import keras
import psutil
import tensorflow as tf
from sklearn.datasets import load_digits

import dtk

role, _, index = sys.argv[1].partition(":")
how = (sys.argv[3:] or ["plain"])[0]
strategy = dtk.strategies.ParameterServerStrategy(
    # Synchronous workers that read for themselves take turns, which must not wait for the lost.
    "sync" if how == "pipelines" else "async",
    exchange=dtk.exchange.Downpour(2, significant=1e-4) if how == "downpour" else None,
)
cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]


def victim():
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError):
            config = json.loads(process.environ().get("TF_CONFIG", "{}"))
            mine = config.get("cluster") == cluster and process.status() != "zombie"
            if mine and config["task"] == {"type": role, "index": int(index)}:
                return process
    raise LookupError(sys.argv[1])


class Kill(keras.callbacks.Callback):
    steps = 0
    seen_again = False

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps > 90:
            time.sleep(0.02)  # a task needs seconds to come back, whatever is trained meanwhile
        if self.steps == 90 and role != "nobody":
            before = strategy.traffic[int(index)]["steps"]
            victim().kill()
            self.before, self.killed = before, time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        if role == "worker" and self.steps > 90:
            # Some steps were under way; many more mean that it takes part again.
            if strategy.traffic[int(index)]["steps"] > self.before + 10:
                self.seen_again = self.model.stop_training = True
            self.model.stop_training |= time.monotonic() - self.killed > 60


images, labels = load_digits(return_X_y=True)
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
kill = Kill()
data = {"x": images[:640] / 16, "y": labels[:640], "batch_size": 16}
if how == "pipelines":
    arrays = data["x"], data["y"]

    def rows(context):
        return tf.data.Dataset.from_tensor_slices(arrays).batch(8, drop_remainder=True)

    data = {"x": strategy.distribute_datasets_from_function(rows)}
    data |= {"steps_per_epoch": 40, "shuffle": False}
try:
    history = model.fit(
        **data,
        epochs=10_000 if role == "worker" else 4,
        verbose=0,
        callbacks=[dtk.callbacks.Checkpoint(sys.argv[2], resume=True), kill],
    ).history
except dtk.errors.ClusterError:
    print(f"noticed after {time.monotonic() - kill.killed:.1f} s", flush=True)
    raise
iterations = int(model.optimizer.iterations.numpy())
print(f"epochs {len(history['loss'])} iterations {iterations} seen again {kill.seen_again}")
