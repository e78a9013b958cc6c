"""What `fit` takes beside its steps, most of all at the end of each epoch, where its data ends.

Workers are bound to their cores, as by `dtk run`. Plain `fit` is by itself on every worker, on the
same core and the worker's own rows.
"""

import contextlib
import time

import keras
from dtk.bench.turns import order

import report
from fits import mean_of_ranks
from models import PROBLEMS

EPOCHS = 3


def measure(setting, strategy):
    problem, communicator = PROBLEMS[setting.model], strategy.communicator
    count = setting.steps * setting.batch_size
    x, y = problem.data(count * strategy.size)
    own = slice(strategy.rank * count, (strategy.rank + 1) * count)
    fits = {}
    for name, scope, rows, workers in (
        ("dtk", strategy.scope, slice(None), strategy.size),
        ("plain", contextlib.nullcontext, own, 1),
    ):
        with scope():
            model = problem.compiled(keras)
        fits[name] = (model, x[rows], y[rows], setting.batch_size * workers)
    wholes, parts = {name: [] for name in fits}, {name: [] for name in fits}
    for number in range(setting.rounds + 1):
        for name in order(list(fits), number):
            communicator.barrier()
            whole, part = clocked(*fits[name])
            if number:  # the first one traces
                wholes[name].append(whole)
                parts[name].append(part)
    wholes, parts = (mean_of_ranks(seconds, communicator) for seconds in (wholes, parts))
    scale = report.MS / (EPOCHS * setting.steps)
    rows = [
        [
            f"{setting.model}, {name}",
            report.spread(wholes[name], scale),
            report.spread(parts[name], scale),
            report.spread([a / b for a, b in zip(wholes[name], parts[name], strict=True)]),
        ]
        for name in fits
    ]
    header = f"`fit` of {EPOCHS} epochs of {setting.steps} steps|all of it, ms per step|"
    header += "from the first step of an epoch to the end of its last, ms|all / that"
    return report.markdown(header, rows)


def clocked(model, x, y, batch_size):
    """Seconds of a `fit`, and of its steps."""
    epochs = Epochs()
    began = time.perf_counter()
    model.fit(x, y, batch_size=batch_size, epochs=EPOCHS, verbose=0, callbacks=[epochs])
    return time.perf_counter() - began, epochs.seconds


class Epochs(keras.callbacks.Callback):
    """Seconds from the first step of each epoch to the end of its last."""

    seconds = 0.0

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            self._began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.params["steps"] - 1:
            self.seconds += time.perf_counter() - self._began
