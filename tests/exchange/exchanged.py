"""What the tests of exchanges run, on every rank at once."""

from __future__ import annotations

import contextlib
import itertools

import keras
import numpy as np
import tensorflow as tf

from dtk import exchange as exchanges
from dtk.exchange.base import BatchPart, Trained
from dtk.exchange.state import ExchangeState

from strategies import bodies, cases

SHAPES = [(3, 3, 4, 6), (40, 12), (7,), ()]


@contextlib.contextmanager
def exchanging(value):
    """The strategy of this process, with an exchange for what is compiled meanwhile."""
    strategy = bodies.strategy()
    before, strategy.exchange = strategy.exchange, exchanges.parse(value)
    try:
        yield strategy
    finally:
        strategy.exchange = before


def gradients(rank, step, shapes=SHAPES):
    random = np.random.default_rng((rank, step))
    return [random.normal(size=shape).astype("float32") for shape in shapes]


def sums(value, steps, in_graph, broken=None):
    """Exchange `steps` lists of gradients; in step `broken` rank 0's are not finite.

    Returns what came out of each, what is remembered of all ranks, and the bytes of the last step.
    """
    communicator = bodies.strategy().communicator
    state = ExchangeState(communicator, "CPU:0")
    op = exchanges.parse(value).init(communicator, state, Trained())

    def reduce(given):
        with communicator.sequence(f"sums {value} {broken}"):
            return op.reduce(given)

    reduce = tf.function(reduce) if in_graph else reduce
    results = []
    for step in range(steps):
        given = gradients(communicator.rank, step)
        if step == broken and communicator.rank == 0:
            given[1][2, 3] = np.inf
        before = communicator.bytes_sent
        results.append([r.numpy() for r in reduce([tf.constant(g) for g in given])])
    sent = communicator.bytes_sent - before
    return results, {name: item["value"] for name, item in state.collect().items()}, sent


def combined(value, locals_of_rounds, rows=None):
    """One weight: start, local values of each rank in each round -> the weight after each."""
    communicator = bodies.strategy().communicator
    state = ExchangeState(communicator, "CPU:0")
    weight, slot = tf.Variable(1.0), tf.Variable(5.0)
    op = value.init(communicator, state, Trained([weight], [slot]))
    after = []
    for of_ranks in locals_of_rounds:
        local = of_ranks[communicator.rank]
        count = rows or [1] * communicator.size
        share = count[communicator.rank] / sum(count)
        part = BatchPart(tf.constant(sum(count), tf.int64), tf.constant(share, tf.float32))
        slot.assign(5.0)
        op.update([tf.constant(0.0)], part)
        weight.assign(local)
        op.count(part)
        after.append((float(weight), float(slot), bool(op.together())))
    return after


def perceptron(strategy, optimizer, activation="relu", seed=3, **options):
    with bodies.scope_of(strategy):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Flatten(),
                keras.layers.Dense(32, activation=activation),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=optimizer, loss=cases.crossentropy(), metrics=["accuracy"], **options
        )
    return model


def train(value, optimizer="sgd", rows=155, batch=16, epochs=2, options=None):
    """A small network on the digits. Returns weights, the history and the optimizer's steps."""
    x, y = cases.rows(rows)
    options = options or {}
    if value == "plain":
        model = perceptron(None, make(optimizer), **options)
        history = model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0)
    else:
        with exchanging(value) as strategy:
            model = perceptron(strategy, make(optimizer), **options)
            history = model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0)
    return bodies.flat(model.get_weights()), history.history, int(model.optimizer.iterations)


def make(optimizer):
    return {
        "sgd": lambda: keras.optimizers.SGD(0.1),
        "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.003),
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**127, dynamic_growth_steps=5
        ),
        "accumulated": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    }[optimizer]()


def accuracy(value, optimizer, epochs):
    """Train on 1437 of the digits and test on the other 360."""
    x, y = bodies.digits()
    with contextlib.nullcontext() if value == "plain" else exchanging(value) as strategy:
        model = perceptron(strategy, make(optimizer))
        model.fit(x[:1437], y[:1437], batch_size=32, epochs=epochs, verbose=0)
        tested = model.evaluate(x[1437:], y[1437:], verbose=0)[1]
    return tested, bodies.flat(model.get_weights())


def feature(name, value):
    """One case of tests/strategies/cases.py with an exchange."""
    with exchanging(value) as strategy:
        return cases.CASES[name](strategy)


def delayed_by_hand(steps=10, batch=16):
    """Gradients at each step's weights, applied one step later; by one process."""
    x, y = cases.rows(160)
    model = perceptron(None, "sgd")
    optimizer, kept = keras.optimizers.SGD(0.05, momentum=0.9), None
    for start in range(0, steps * batch, batch):
        with tf.GradientTape() as tape:
            made = model(x[start : start + batch], training=True)
            loss = cases.crossentropy()(y[start : start + batch], made)
        now = tape.gradient(loss, model.trainable_variables)
        if kept is not None:
            optimizer.apply_gradients(zip(kept, model.trainable_variables, strict=True))
        kept = now
    return bodies.flat(model.get_weights())


def delayed(value, steps=10, batch=16):
    x, y = cases.rows(steps * batch)
    with exchanging(value) as strategy:
        model = perceptron(strategy, make("momentum"))
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
    return bodies.flat(model.get_weights()), int(model.optimizer.iterations)


def apart_by_hand(size, eta, nesterov, momentum, block, rows=75, batch=16, epochs=2):
    """Block momentum over `size` models that one process trains one after the other.

    A block holds `block` steps; an epoch's last may hold fewer.
    """
    x, y = cases.rows(rows)
    models = [perceptron(None, keras.optimizers.SGD(0.05, momentum=momentum)) for _ in range(size)]
    start = [w.astype("float64") for w in models[0].get_weights()]
    moved = [np.zeros_like(w) for w in start]
    for _ in range(epochs):
        batches = [(x[i : i + batch], y[i : i + batch]) for i in range(0, rows, batch)]
        for first in range(0, len(batches), block):
            seen = 0
            for images, labels in batches[first : first + block]:
                seen += len(images)
                cuts = np.cumsum(
                    [len(images) // size + (r < len(images) % size) for r in range(size)]
                )
                for model, (a, b) in zip(models, itertools.pairwise([0, *cuts]), strict=True):
                    if b > a:
                        model.train_on_batch(images[a:b], labels[a:b])
            power = eta ** (seen / (block * batch))
            for i, before in enumerate(start):
                changes = sum(before - model.get_weights()[i] for model in models)
                moved[i] = power * moved[i] + (1 - power) * changes
                start[i] = before - moved[i] * (1 + power if nesterov else 1)
            for model in models:
                model.set_weights(start)
                for variable in model.optimizer.variables:
                    if variable.path.endswith("_momentum"):
                        variable.assign(keras.ops.zeros_like(variable))
    return bodies.flat(start)


def apart(value, momentum, rows=75, batch=16, epochs=2):
    x, y = cases.rows(rows)
    with exchanging(value) as strategy:
        model = perceptron(strategy, keras.optimizers.SGD(0.05, momentum=momentum))
        history = model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
    return bodies.flat(model.get_weights()), history.history


def stats(value, validation=False):
    """The logs of CommunicationStats."""
    from dtk.callbacks import CommunicationStats

    x, y = cases.rows(96)
    with exchanging(value) as strategy:
        model = perceptron(strategy, make("sgd"))
        history = model.fit(
            x,
            y,
            batch_size=16,
            epochs=3,
            verbose=0,
            callbacks=[CommunicationStats()],
            validation_data=(x, y) if validation else None,
        )
    return history.history["comm_bytes"], history.history["comm_share"]


def bytes_of_sequences(value):
    """Bytes per step of a Dense layer on sequences."""
    from dtk.callbacks import CommunicationStats

    x, y = np.ones((32, 4, 64), "float32"), np.ones((32, 32), "float32")
    layers = [keras.layers.Dense(32), keras.layers.GlobalAveragePooling1D()]
    with exchanging(value) as strategy:
        with strategy.scope():
            model = keras.Sequential([keras.Input((4, 64)), *layers])
            model.compile("sgd", "mse")
        history = model.fit(x, y, batch_size=16, verbose=0, callbacks=[CommunicationStats()])
    return history.history["comm_bytes"]


def statistics_apart():
    """Moving statistics between blocks, and what evaluate makes of them."""
    x, y = cases.rows(48)
    with exchanging(exchanges.ModelAveraging(period=10_000)) as strategy:
        model = cases.compiled(strategy, lambda: cases.small(sync=False), optimizer=make("sgd"))
        model.fit(x[:16], y[:16], batch_size=16, verbose=0)
        for i in range(3):
            model.train_on_batch(x[16 * i : 16 * i + 16], y[16 * i : 16 * i + 16])
        between = bodies.flat(model.get_weights())
        evaluated = model.evaluate(x, y, verbose=0)
    return between, evaluated, bodies.flat(model.get_weights())


def around_open_blocks():
    """What single test batches, `fit` and `evaluate` make of a block that is open.

    Returns the weight as everything finds it, and how much `evaluate` changes the slots.
    """
    x, y = cases.rows(48)
    with exchanging(exchanges.ModelAveraging(period=10_000)) as strategy:
        model = perceptron(strategy, make("momentum"))
        seen = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: found.append(bodies.flat(model.get_weights())),
            on_epoch_end=lambda epoch, logs: found.append(bodies.flat(model.get_weights())),
        )
        found, own = [], []
        for look in (
            lambda: model.test_on_batch(x[:16], y[:16]),
            lambda: model.predict_on_batch(x[:2]),
            lambda: model.fit(x, y, batch_size=16, verbose=0, callbacks=[seen]),
        ):
            for i in range(3):
                model.train_on_batch(x[16 * i : 16 * i + 16], y[16 * i : 16 * i + 16])
            own.append(bodies.flat(model.get_weights()))
            look()
            if len(own) < 3:
                found.append(bodies.flat(model.get_weights()))
        slots = bodies.flat([v.numpy() for v in model.optimizer.variables])
        model.evaluate(x, y, verbose=0)
        after = bodies.flat([v.numpy() for v in model.optimizer.variables])
    return own, found, float(abs(after - slots).max())


def own_logs(value):
    """The history of a train step that returns a loss which no metric counts."""

    class Own(keras.Sequential):
        def train_step(self, data):
            images, labels = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=labels, y_pred=self(images, training=True))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"own": loss}

    x, y = cases.rows(48)
    with exchanging(value) as strategy:
        with bodies.scope_of(strategy):
            keras.utils.set_random_seed(3)
            model = Own([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
            model.compile(optimizer=make("sgd"), loss=cases.crossentropy())
        return model.fit(x, y, batch_size=16, epochs=2, verbose=0).history["own"]


def tried(value):
    """What is remembered before some training, after it, and after taking it back."""
    from dtk.trainer.model_scope import trainer_of
    from dtk.trainer.replica.snapshot import Snapshot, changed_by_training

    def remembered():
        return {name: item["value"] for name, item in state().items()}

    x, y = cases.rows(64)
    with exchanging(value) as strategy:
        model = perceptron(strategy, make("sgd"))
        state = trainer_of(model).exchange_state
        model.fit(x, y, batch_size=16, verbose=0)
        found = [remembered()]
        kept = Snapshot(changed_by_training(model))
        model.fit(x, y, batch_size=16, verbose=0)
        found.append(remembered())
        kept.restore()
        found.append(remembered())
    return found


def normalised(value, rows):
    """Moving statistics after batches that are cut unevenly."""
    x, y = cases.rows(rows)
    with exchanging(value) as strategy:
        model = cases.compiled(strategy, lambda: cases.small(sync=False), optimizer=make("sgd"))
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return bodies.flat(model.get_weights())


def refused(options):
    """The message of the error that training raises."""
    x, y = cases.rows(16)
    optimizer = options.get("optimizer", "sgd")
    try:
        with exchanging(options["value"]) as strategy:
            if options.get("sparse"):
                cases.sparse_embedding_gradients_clipped(strategy)
                return None
            ema = keras.optimizers.SGD(0.1, use_ema=True)
            model = perceptron(strategy, ema if optimizer == "ema" else make(optimizer))
            if options.get("own_loop"):
                gradients = [tf.zeros_like(v) for v in model.trainable_variables]
                strategy.run(lambda: model.optimizer.apply(gradients, model.trainable_variables))
            model.fit(x, y, batch_size=8, verbose=0)
    except ValueError as error:
        return str(error)
    return None
