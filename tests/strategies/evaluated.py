"""Trains behind parameter servers with an evaluator beside it.

dtk run -n 1 --ps 1 --evaluator evaluated.py DIRECTORY [what is wrong]
"""

import sys
from pathlib import Path

import keras
from sklearn.datasets import load_digits

import dtk

directory, *wrong = sys.argv[1:]
strategy = dtk.strategies.ParameterServerStrategy("async")
images, labels = load_digits(return_X_y=True)
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
callbacks = [
    dtk.callbacks.Checkpoint(directory, save_freq=30),
    keras.callbacks.TensorBoard(Path(directory) / "events"),
]
history = model.fit(
    images[:1280],
    labels[:1280],
    batch_size=32,
    epochs=2,
    verbose=0,
    validation_data=None if "no data" in wrong else (images[1280:], labels[1280:]),
    callbacks=[] if "no checkpoint" in wrong else callbacks,
).history
print("the chief logged", *sorted(history))
print("final", *model.evaluate(images[1280:], labels[1280:], verbose=0))
