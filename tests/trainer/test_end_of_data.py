"""The step that finds no more data: no rank begins a collective of it."""

from __future__ import annotations

import collections
import contextlib
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.patches import patch
from dtk.strategies import AllReduceStrategy

from support.launched import dtk_run

ROWS, STEPS = 12, 5


def data(rank):
    """Batches of unknown number, whose end one rank finds later than the other.

    Until then it runs what of a step does not depend on the batch; the other's end cancels that.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 40, (STEPS, ROWS, 4))
    labels = (ids.sum(2, keepdims=True) % 2).astype("float32")

    def batches():
        yield from zip(ids, labels, strict=True)
        time.sleep(0.1 * rank)

    spec = (tf.TensorSpec((ROWS, 4), tf.int64), tf.TensorSpec((ROWS, 1), tf.float32))
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


def model_of(strategy, table):
    keras.utils.set_random_seed(1)
    first = keras.layers.Embedding(40, 3) if table else keras.layers.CategoryEncoding(40, "one_hot")
    with strategy.scope():
        return keras.Sequential(
            [
                keras.Input((4,), dtype="int64"),
                first,
                keras.layers.Flatten(),
                keras.layers.Dense(4),
                keras.layers.Dense(1),
            ]
        )


@contextlib.contextmanager
def posts():
    """How often each collective of a graph has begun."""
    from dtk.communicators.mpi.transport import MPITransport

    begun = collections.Counter()
    call = MPITransport._call

    def counted_call(self, lane, post, inputs, label, peer=None):
        def counted(*given):
            if not label.startswith("eager"):
                begun[label] += 1
            return post(*given)

        return call(self, lane, counted, inputs, label, peer)

    with patch(MPITransport, _call=counted_call):
        yield begun


def hashes(model):
    return [np.asarray(v.numpy()).tobytes().hex()[:64] for v in model.weights]


def gathering(y, p):
    everybody, _ = dtk.layers.gather_over_batch(p)
    return tf.reduce_mean(tf.square(p - y), 1) + 0.0 * tf.reduce_sum(everybody)


def fit(exchange, table, shard, compiled, gathers):
    """Train for some epochs; return the collectives that began, and the weights."""
    exchange = eval(exchange, vars(dtk.exchange))
    strategy = AllReduceStrategy(exchange=exchange, shard_optimizer=shard, self_test=False)
    model = model_of(strategy, table)
    optimizer = keras.optimizers.Adam(1e-2, **compiled.pop("optimizer", {}))
    with strategy.scope():
        loss = gathering if gathers else "mse"
        model.compile(optimizer, loss, metrics=["mae", keras.metrics.AUC()], **compiled)
    with posts() as begun:
        model.fit(data(strategy.rank), epochs=3, verbose=0)
    return begun, hashes(model)


SHORTER = """
import dtk, keras, numpy as np

strategy = dtk.auto_strategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

def batches():
    for _ in range(9 - 3 * strategy.rank):
        yield np.ones((8, 4)), np.ones((8, 1))

model.fit(batches(), verbose=0)
"""


def test_a_rank_whose_data_is_shorter_is_named_within_seconds(tmp_path):
    """It took five minutes, the timeout of any other stall."""
    (tmp_path / "train.py").write_text(SHORTER)
    done = dtk_run("-n", "2", "train.py", cwd=tmp_path, timeout=200)
    assert done.returncode == 124, done.stderr
    said = "rank 1, host localhost, has come to the end of its data before the others, and waits in"
    assert said in done.stderr
    assert f'{tmp_path}/train.py", line 13 in' in done.stderr
    assert "Give every rank the same global data, of as many batches" in done.stderr
    assert "rank 0 waits in train step 7." in done.stderr


CASES = {
    "delayed": ("Delayed()", False, False, {}, False),
    "delayed, fp16": ("Delayed(Dense('float16'))", False, False, {}, False),
    "delayed, in executions": (
        "Delayed(Quantized(4))", False, False, {"steps_per_execution": 2}, False
    ),
    "delayed, after a warm start": ("WarmStart(Delayed(), samples=24)", False, False, {}, False),
    "blocks": ("BlockMomentum(24)", True, False, {}, False),
    "averaging": ("ModelAveraging(12)", True, False, {}, False),
    "windows, clipped": (
        "None",
        True,
        False,
        {"optimizer": {"gradient_accumulation_steps": 2, "global_clipnorm": 0.1}},
        True,
    ),
    "parts": ("None", True, True, {"optimizer": {"global_clipnorm": 0.1}}, False),
}  # fmt: skip


@pytest.mark.full_for(
    *("*-averaging", "*-delayed", "*-delayed, fp16"),
    why="local steps are those of blocks, and a warm start ends in plain delayed steps",
)
@pytest.mark.worlds(("mpi-wheel", 2))
@pytest.mark.parametrize("name", CASES)
def test_no_collective_begins_without_a_batch(pool, name):
    """Last step's gradients depend on no batch: one rank sent them again, and weights differed."""
    (begun, weights), other = pool.run(fit, *CASES[name])
    assert begun and (begun, weights) == other
    # of the attempt to read beyond the end there is none
    steps = 3 * STEPS
    assert all(count % steps == 0 or count < steps for count in begun.values()), begun


def loop(kind):
    """Train in a loop that reads within its function, in ways of which each needs its own care."""
    strategy = AllReduceStrategy(self_test=False)
    world, one = strategy.world, tf.Variable(1.0)
    model = model_of(strategy, table=True)
    optimizer = keras.optimizers.SGD(1e-2)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / ROWS
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    @tf.function
    def of_no_batch():
        return world.allreduce(one.read_value())

    def in_branch():
        return tf.cond(one > 0, of_no_batch, lambda: 0.0)

    @tf.function
    def train(batches):
        if kind == "two steps":
            for _ in (1, 2):
                of_no_batch()
                strategy.run(step, next(batches))
        elif kind == "within run":
            strategy.run(lambda: (step(*next(batches)), in_branch()))
        else:
            batch = next(batches)
            in_branch()
            of_no_batch()
            strategy.run(tf.function(step), batch)

    batches = strategy.experimental_distribute_dataset(data(strategy.rank))
    for _ in range(3):
        iterator = iter(batches)
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                train(iterator)
    return hashes(model)


@pytest.mark.worlds(("collective", 2))
@pytest.mark.parametrize("kind", ["two steps", "within run", "before run"])
def test_a_loop_that_reads_within_its_function_may_end(pool, kind):
    """An end cancelled collectives on one rank: another's step, or one that counts rows."""
    weights, other = pool.run(loop, kind)
    assert weights == other
