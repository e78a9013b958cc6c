"""What the tests of rates per sample and of momentum schedules run, on every rank at once.

Row i of the data moves weight i and no other, by a gradient of 1: weights are what each sample has
contributed.
"""

from __future__ import annotations

import contextlib
import io

import numpy as np

from callbacks.bodies import Crash, crash_at, fails, strategy

ROWS = 37


class Linear:
    """A model whose loss is the mean of its weights' sum; notes how often its loss is traced."""

    def __init__(self, kind="world", sgd=None, optimizer=None, **options):
        import keras

        self.traces = 0
        sgd = {"momentum": 0.9} | (sgd or {})
        with strategy(kind).scope():
            dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
            self.model = keras.Sequential([keras.Input((ROWS,)), dense])
            chosen = optimizer() if optimizer else keras.optimizers.SGD(0.125, **sgd)
            self.model.compile(optimizer=chosen, loss=self._loss, **options)

    def _loss(self, y_true, y_pred):
        self.traces += 1
        return y_pred[:, 0]

    def fit(self, callbacks, batch_size=8, epochs=3, form="arrays"):
        import tensorflow as tf

        x = np.eye(ROWS, dtype="float32")
        given = {"x": x, "y": x[:, :1], "batch_size": batch_size, "shuffle": False}
        if form == "dataset":
            given = {"x": tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(batch_size)}
        with contextlib.suppress(Crash):
            self.model.fit(**given, epochs=epochs, verbose=0, callbacks=callbacks)
        return self

    @property
    def moved(self):
        """How far each weight has been moved down."""
        return -self.model.get_weights()[0][:, 0].astype("float64")

    @property
    def buffer(self):
        """What momentum holds of each, downwards."""
        (found,) = [v for v in self.model.optimizer.variables if v.path.endswith("_momentum")]
        return -found.numpy()[:, 0].astype("float64")


def steps_of(sizes, epochs):
    """Rows of each step, epoch by epoch; the last size persists."""
    steps = []
    for epoch in range(epochs):
        size = sizes[min(epoch, len(sizes) - 1)]
        steps += [(epoch, range(at, min(at + size, ROWS))) for at in range(0, ROWS, size)]
    return steps


def by_hand(steps, rate_of, tau_of, nesterov=False, cuts_every=None, most=0):
    """What each row has moved its weight by: all that is due of it leaves at the pace of momentum.

    `rate_of` and `tau_of` take the epoch and the rows seen before the step. Every `cuts_every` rows
    but the first time all is halved, `most` times.
    """
    moved, due, seen, cut, last = np.zeros(ROWS), np.zeros(ROWS), 0, 1.0, None
    for epoch, rows in steps:
        rate, tau = cut * rate_of(epoch, seen), tau_of(epoch, seen)
        due *= 1.0 if last is None else rate / last
        last = rate
        mu = np.exp(-len(rows) / tau) if tau else 0.0
        new = np.zeros(ROWS)
        new[list(rows)] = rate
        at_once = (1 - mu**2 if nesterov else 1 - mu) * new
        moved += (1 - mu) * due + at_once
        due = mu * due + (new - at_once)
        passed = cuts_every and (seen + len(rows)) // cuts_every > seen // cuts_every
        if passed and seen >= cuts_every and most:
            cut, due, last, most = cut / 2, due / 2, last / 2, most - 1
        seen += len(rows)
    return moved, due


def contributed(sizes, tau, nesterov=False, kind="world", corrected=True, epochs=3, options=None):
    """What each row has moved its weight by, and what is still to come of it."""
    import dtk

    strategy(kind)  # before the optimizer: TensorFlow's collectives come first
    rate = dtk.callbacks.SampleRate(0.01, tau, momentum_correction=corrected)
    growing = dtk.callbacks.BatchSizeSchedule(sizes)
    linear = Linear(kind, {"nesterov": nesterov}, **(options or {}))
    linear.fit([rate, growing], epochs=epochs)
    mu = rate.momentum
    return linear.moved, linear.buffer * mu ** (2 if nesterov else 1) / (1 - mu)


def again(same):
    """Two calls of `fit`, by one callback or two: what each row has contributed, or is to."""
    import dtk

    strategy()
    linear, first = Linear(), dtk.callbacks.SampleRate(0.01, 24)
    second = first if same else dtk.callbacks.SampleRate(0.01, 24)
    linear.fit([first], epochs=1).fit([second, dtk.callbacks.BatchSizeSchedule([4, 16])], epochs=2)
    return linear.moved + linear.buffer * second.momentum / (1 - second.momentum)


def unchanged():
    """Traces of the loss: of one batch size, and of sizes and momenta that change."""
    import dtk

    strategy()
    told = []
    for tau, sizes in ((24, [8]), ([0, 24, 48], [4, 8, 16])):
        callbacks = [dtk.callbacks.SampleRate(0.01, tau), dtk.callbacks.BatchSizeSchedule(sizes)]
        told.append(Linear().fit(callbacks).traces)
    return told


def everything_at_once(directory=None, crash=None, corrected=True, often="epoch"):
    """A growing batch, momentum by samples, halving: weights, rates told, Keras's rates."""
    import keras

    import dtk

    strategy()
    x = np.eye(ROWS, dtype="float32")
    rates = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    callbacks = [
        dtk.callbacks.SampleRate([0.01, 0.02], [0] * 2 + [24], corrected, every_samples=16),
        dtk.callbacks.BatchSizeSchedule([4, 8, 16]),
        dtk.callbacks.HalveRate(
            30,
            (x, x[:, :1]),
            cuts=2,
            monitor=lambda numbers: 1.0,
            momentum_correction=corrected,
        ),
        Rates(),
    ]
    callbacks += [] if directory is None else [dtk.callbacks.Checkpoint(directory, often)]
    callbacks += [] if crash is None else [crash_at(*crash)]
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        linear = Linear().fit(callbacks)
    return linear.moved, rates, screen.getvalue()


def beside_growing(kind="world"):
    """The schedule falls by half, and again: so does the rate per sample, and the batch grows."""
    import dtk

    strategy(kind)
    growing = dtk.callbacks.GrowBatchInsteadOfDecay([3.0, 1.5, 0.75])
    rate = dtk.callbacks.SampleRate(0.01, 24)
    return Linear(kind).fit([growing, rate], batch_size=4).moved, [size for size, _ in growing.plan]


def beside_searching(first=True):
    """Sizes as found by trials, which must leave no trace; losses of the last."""
    import dtk

    strategy()
    search = dtk.callbacks.AutoBatchSize(multiple=4, trial_batches=2, margin=1e9)
    sizes = []

    class Sizes(dtk.callbacks.BatchSizeSchedule):
        sets = ()

        def __init__(self):
            super().__init__([1])

        def on_train_begin(self, logs=None):
            pass

        def on_epoch_begin(self, epoch, logs=None):
            sizes.append(self.trainer.feed.batch_size())

    callbacks = [search, dtk.callbacks.SampleRate([0.01, 0.02, 0.04], 24)]
    callbacks = [*(callbacks if first else reversed(callbacks)), Sizes()]
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        moved = Linear().fit(callbacks, batch_size=4).moved
    return moved, sizes, search.trials


def plateaued():
    """Keras's own callback halves the optimizer's rate before each epoch but the first."""
    import keras

    import dtk

    class Halving(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch:
                rate = self.model.optimizer.learning_rate
                self.model.optimizer.learning_rate = float(keras.ops.convert_to_numpy(rate)) / 2

    strategy()
    rate = dtk.callbacks.SampleRate(0.01)
    linear = Linear(sgd={"momentum": 0.0})
    linear.fit([Halving(), rate, dtk.callbacks.BatchSizeSchedule([4, 8, 16])])
    return linear.moved, rate.rate


def scheduled(time_constants, every_samples=None, form="arrays"):
    """Weights with a momentum schedule; the rate stays."""
    import dtk

    strategy()
    size = 8 if form == "dataset" else None
    schedule = dtk.callbacks.MomentumSchedule(time_constants, every_samples, size)
    return Linear().fit([schedule], form=form).moved


def constant_momentum(momentum):
    """Keras's own, in a model that dtk has nothing to do with but the strategy."""
    strategy()
    return Linear(sgd={"momentum": momentum}).fit([]).moved


def served(consistency):
    """Behind parameter servers: weights, and what a rate per sample would have made of them."""
    import keras

    import dtk

    from strategies import served_bodies

    chosen = served_bodies.served_with(consistency)
    with chosen.scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((ROWS,)), dense])
        model.compile(keras.optimizers.SGD(0.125, momentum=0.9), lambda y, p: p[:, 0])
    x = np.eye(ROWS, dtype="float32")
    callbacks = [dtk.callbacks.SampleRate(0.01, 24), dtk.callbacks.BatchSizeSchedule([4, 8, 16])]
    model.fit(x, x[:, :1], shuffle=False, epochs=3, verbose=0, callbacks=callbacks)
    return -model.get_weights()[0][:, 0].astype("float64")


def halved(corrected):
    """The rate is halved once, after 32 rows of batches of 8; plain SGD with momentum."""
    import dtk

    strategy()
    x = np.eye(ROWS, dtype="float32")
    cut = dtk.callbacks.HalveRate(
        16, (x, x[:, :1]), cuts=1, monitor=lambda numbers: 1.0, momentum_correction=corrected
    )
    with contextlib.redirect_stdout(io.StringIO()):
        linear = Linear().fit([cut], epochs=1)
    return linear.moved


def refused():
    """What is said to each mistake, in order."""
    import keras

    import dtk

    strategy()
    rate, schedule = dtk.callbacks.SampleRate, dtk.callbacks.MomentumSchedule
    grow = dtk.callbacks.GrowBatchInsteadOfDecay([0.1])
    halve = dtk.callbacks.HalveRate(16, (np.eye(ROWS, dtype="float32"), np.zeros((ROWS, 1))))
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)
    warm = dtk.callbacks.LearningRateScaling()

    def told(callbacks, **options):
        return fails(lambda: Linear(**options).fit(callbacks))

    return [
        told([rate(0.01)]),
        told([rate(0.01, 24)], sgd={"momentum": 0.0}),
        told([schedule(24)], sgd={"momentum": 0.0}),
        told([schedule(24)], optimizer=lambda: keras.optimizers.Adam()),
        told([rate(0.01, 24)], optimizer=lambda: keras.optimizers.Adam()),
        told([rate(0.01, 24)], optimizer=lambda: keras.optimizers.SGD(decay, momentum=0.9)),
        told([rate(0.01, 24), schedule(24)]),
        told([warm, rate(0.01, 24)]),
        told([halve, grow]),
    ]


def exchange_refused(exchange):
    import dtk

    chosen = strategy()
    before, chosen.exchange = chosen.exchange, exchange
    try:
        return fails(lambda: Linear().fit([dtk.callbacks.SampleRate(0.01, 24)]))
    finally:
        chosen.exchange = before
