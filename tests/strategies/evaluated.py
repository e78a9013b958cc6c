"""Trains behind parameter servers with an evaluator beside it.

dtk run -n 1 --ps 1 --evaluator evaluated.py DIRECTORY [kill]
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
from sklearn.datasets import load_digits

import dtk

directory, *kill = sys.argv[1:]
pids = Path(directory) / "pids"
if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "evaluator" and kill:
    with open(pids, "a") as file:
        print(os.getpid(), file=file)
config = dtk.strategies.EvaluatorConfig(
    steps=8,
    exporters=[
        dtk.inference.LatestExporter(keep=2),
        dtk.inference.BestExporter("most right", "keras", monitor="accuracy", mode="max"),
    ],
)
strategy = dtk.strategies.ParameterServerStrategy("async", evaluator=None if kill else config)
images, labels = load_digits(return_X_y=True)
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


class KillEvaluator(keras.callbacks.Callback):
    """Kills the evaluator after each epoch, and after the first waits until it is back."""

    def on_epoch_end(self, epoch, logs=None):
        os.kill(int(pids.read_text().split()[epoch]), signal.SIGKILL)
        while epoch == 0 and len(pids.read_text().split()) < 2:
            time.sleep(0.1)


callbacks = [
    *([KillEvaluator()] if kill else []),
    dtk.callbacks.Checkpoint(directory, save_freq=30),
    keras.callbacks.TensorBoard(Path(directory) / "events"),
]
history = model.fit(
    images[:1280],
    labels[:1280],
    batch_size=32,
    epochs=2,
    verbose=0,
    validation_data=(images[1280:], labels[1280:]),
    callbacks=callbacks,
).history
print("the chief logged", *sorted(history))
print("final", *model.evaluate(images[1280:], labels[1280:], 32, steps=8, verbose=0))
