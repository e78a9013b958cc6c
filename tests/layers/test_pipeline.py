"""Stages on one rank each train as the same layers do in one process."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.communicators.local import LocalCommunicator, NullCommunicator
from dtk.layers import Pipeline, whole
from dtk.layers.pipeline import BACKWARD, FORWARD, gpipe, one_forward_one_backward

from support import bodies, world
from support.once import once


@functools.cache
def grid(parallel):
    communicator = world.communicator() if parallel > 1 else LocalCommunicator()
    return dtk.strategies.AllReduceStrategy(communicator, model_parallel=parallel)


@keras.saving.register_keras_serializable("tests")
class Flat(keras.layers.Layer):
    """A layer of one's own in one stage only; TensorFlow knows no width of its output."""

    def call(self, x):
        return tf.reshape(x, (tf.shape(x)[0], -1))

    def compute_output_shape(self, shape):
        return shape


STAGES = [
    lambda: keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(12, "tanh", kernel_regularizer="l2"), Flat()]
    ),
    lambda: keras.Sequential([keras.Input((12,)), keras.layers.Dense(10, "tanh")]),
    lambda: keras.Sequential([keras.Input((10,)), keras.layers.Dense(3, kernel_regularizer="l2")]),
]


def joined(count):
    """As many stages, which together are always the same layers."""
    stages = [stage() for stage in STAGES]
    last = stages[count - 1 :]
    layers = [layer for stage in last for layer in stage.layers]
    return [*stages[: count - 1], keras.Sequential([last[0].inputs[0], *layers])]


def data():
    random = np.random.default_rng(0)
    return random.normal(size=(58, 8)).astype("float32"), random.integers(0, 3, 58)


def compiled(model):
    model.compile(
        keras.optimizers.Adam(0.02, global_clipnorm=0.3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def fitted(model, **given):
    x, y = data()
    history = model.fit(
        x, y, batch_size=20, epochs=2, verbose=0, validation_split=0.2, **given
    ).history
    return history, model.predict(x, verbose=0)


def alone():
    keras.utils.set_random_seed(2)
    with dtk.strategies.undistributed():
        model = compiled(keras.Sequential(joined(1)))
        history, predicted = fitted(model)
    return bodies.flat(model.get_weights()), history, predicted


def piped(schedule, parallel):
    strategy = grid(parallel)
    with strategy.scope():
        keras.utils.set_random_seed(2)
        model = compiled(Pipeline(joined(parallel), 3, schedule))
    return results(strategy, model)


def results(strategy, model):
    """Weights, history and predictions, which are those of all stages in one process."""
    history, predicted = fitted(model)
    assert len(model.weights) < 6, "a rank holds its own stage only"
    strategy.check_weights(model)
    together = whole(model)
    assert np.allclose(together(data()[0]), predicted, atol=1e-5)
    return bodies.flat(together.get_weights()), history, predicted


def check_equal(found, expected):
    weights, history, predicted = expected
    for own_weights, own_history, own_predicted in found:
        assert np.linalg.norm(own_weights - weights) <= 1e-5 * np.linalg.norm(weights)
        assert np.abs(own_predicted - predicted).max() <= 1e-4
        assert own_history.keys() == history.keys()
        for name, values in history.items():
            assert own_history[name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.full_but("collective-2-1f1b", why="worlds of three and four")
@pytest.mark.worlds(
    ("collective", 2),
    ("horovod-mpi", 2),
    pytest.param(("mpi-wheel", 2), marks=pytest.mark.full),
    ("collective", 3),
    ("collective", 4),
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_train_as_one_process(pool, schedule):
    """Two or three of them, and a grid of two with two replicas each."""
    stages = 3 if pool.size == 3 else 2
    found = pool.run(piped, schedule, stages, timeout=280, meanwhile=lambda: once(alone))
    check_equal(found, once(alone))


def frozen(model, layer, **given):
    """Train with a layer that the script freezes once there is a model."""
    layer.trainable = False
    compiled(model).fit(*data(), batch_size=20, verbose=0, **given)
    return model


def frozen_alone():
    keras.utils.set_random_seed(2)
    with dtk.strategies.undistributed():
        model = keras.Sequential(joined(1))
        return bodies.flat(frozen(model, model.layers[0].layers[2], epochs=2).get_weights())


def frozen_in_parts(directory):
    for epochs in (1, 2):
        with grid(2).scope():
            keras.utils.set_random_seed(2)
            first, last = joined(2)
            model = Pipeline([first, last], 3)
        saving = dtk.callbacks.Checkpoint(directory)
        frozen(model, last.layers[0], epochs=epochs, callbacks=[saving])
    return bodies.flat(whole(model).get_weights())


@pytest.mark.worlds(("collective", 2))
def test_a_layer_that_is_frozen_late_is_saved_and_resumed(pool, tmp_path):
    """Rank 0 alone said that the model could not be put together: the whole one had more slots."""
    expected = once(frozen_alone)
    for weights in pool.run(frozen_in_parts, str(tmp_path), timeout=120):
        assert np.linalg.norm(weights - expected) <= 1e-5 * np.linalg.norm(expected)


# Branches: a stage that several take from, and one that takes from several.


def joining():
    """The second stage's output, and the first one's twice."""
    inputs = [keras.Input((width,)) for width in (10, 12, 12)]
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Concatenate()(inputs)))


def piped_with_branches(schedule):
    strategy = grid(3)
    with strategy.scope():
        keras.utils.set_random_seed(2)
        model = compiled(Pipeline([*STAGES[:2], joining], 2, schedule, links={2: [1, 0, 0]}))
    return results(strategy, model)


@functools.cache
def wired_by_hand():
    """What Keras's own functional model and `fit` make of the same stages, in this process."""
    keras.utils.set_random_seed(2)
    front, middle, last = STAGES[0](), STAGES[1](), joining()
    given = keras.Input((8,))
    first = front(given)
    model = compiled(keras.Model(given, last([middle(first), first, first])))
    with dtk.strategies.undistributed():
        history, predicted = fitted(model)
    return bodies.flat(model.get_weights()), history, predicted


@pytest.mark.full("worlds of three and four")
@pytest.mark.worlds(("collective", 3))
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.full)])
def test_a_stage_may_take_from_several(pool, schedule):
    check_equal(pool.run(piped_with_branches, schedule, timeout=120), wired_by_hand())


# Checkpoints.


def until(epochs, directory, parallel):
    """Train until an epoch, on rank 0 alone where it is not parallel."""
    if parallel == 1 and world.communicator().rank > 0:
        return None
    x, y = data()
    strategy = grid(parallel)
    keras.utils.set_random_seed(2)
    with strategy.scope():
        stages = [
            keras.Sequential([STAGES[0](), keras.layers.Dropout(0.3)]),
            keras.Sequential([STAGES[1](), keras.layers.Dropout(0.3), keras.layers.Dense(3)]),
        ]
        model = compiled(Pipeline(stages, 2))
    saving = [dtk.callbacks.Checkpoint(directory)] if directory else []
    with dtk.strategies.undistributed():
        model.fit(x, y, batch_size=20, epochs=epochs, verbose=0, callbacks=saving)
    return bodies.flat(whole(model).get_weights())


@pytest.mark.full("one way of being interrupted of each kind")
@pytest.mark.worlds(("collective", 2))
@pytest.mark.parametrize("saves, resumes", [(2, 1), pytest.param(1, 2, marks=pytest.mark.full)])
def test_what_some_ranks_have_saved_others_resume(pool, tmp_path, saves, resumes):
    pool.run(until, 1, str(tmp_path), saves)
    expected = pool.run(until, 3, None, 1)[0]
    for resumed in pool.run(until, 3, str(tmp_path), resumes)[:resumes]:
        assert np.linalg.norm(resumed - expected) <= 1e-5 * np.linalg.norm(expected)


# Mistakes.


def stage(taken, units):
    layers = [keras.Input((taken,)), keras.layers.Dense(units)]
    return keras.Sequential(layers, name=f"taking_{taken}")


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda two: Pipeline(joined(3), communicator=two), "3 stages on 2 ranks.*=3"),
        (lambda two: Pipeline([], communicator=two), "0 stages on 2 ranks"),
        (lambda two: Pipeline(joined(2), 0, communicator=two), "microbatches=0"),
        (lambda two: Pipeline(joined(2), 2, "zigzag", communicator=two), "'gpipe' or '1f1b'"),
        (lambda two: Pipeline(joined(2), links={0: [1]}, communicator=two), "links={0"),
        (lambda two: Pipeline(joined(2), links={1: []}, communicator=two), r"\[0\] of 2 lead"),
        (lambda two: Pipeline([keras.Sequential()] * 2, communicator=two), "0 outputs"),
        (
            lambda two: Pipeline([stage(8, 5), stage(6, 1)], communicator=two),
            r"stage 1 \('taking_6'\) takes inputs of the shapes \[\(6,\)\].*put out \[\(5,\)\]",
        ),
    ],
)
def test_a_pipeline_that_cannot_be(make, said):
    with pytest.raises(ValueError, match=said):
        make(NullCommunicator(0, 2))


def test_a_stage_with_nothing_to_train_is_named():
    frozen = keras.Sequential([keras.Input((8,)), keras.layers.Rescaling(2.0)])
    model = Pipeline([frozen, stage(8, 1)], communicator=NullCommunicator(0, 2))
    with pytest.raises(ValueError, match=r"rank 0: stage 0 .* has no trainable weights"):
        model(np.zeros((4, 8)), training=True)


def of_each_row(y, p):
    return keras.ops.mean(keras.ops.square(y - p), -1)


@pytest.mark.parametrize(
    "loss, weighted, is_mean",
    [
        ("mse", True, True),
        (of_each_row, False, False),
        (keras.losses.MeanSquaredError(reduction="sum"), False, False),
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=0), False, False),
        (keras.losses.Dice(), False, False),
    ],
)
def test_losses_that_are_not_means_over_rows_are_trained_as_by_gpipe(
    loss, weighted, is_mean, capsys
):
    """Breaks as gradients of each microbatch's own quotient, without a word."""
    x, labels = data()
    sparse = isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
    model = Pipeline(joined(2), 2, "1f1b", communicator=NullCommunicator(0, 2))
    model.compile("sgd", loss)
    y = labels if sparse else keras.utils.to_categorical(labels, 3)
    model.train_on_batch(x, y, np.ones(len(x)) if weighted else None)
    assert ("trains by schedule='gpipe'" in capsys.readouterr().err) != is_mean


@pytest.mark.parametrize(
    "width, activation, loss",
    [(2, "softmax", "sparse_categorical_crossentropy"), (1, "sigmoid", "binary_crossentropy")],
)
def test_a_last_stage_may_end_in_what_the_loss_looks_through(width, activation, loss):
    """Keras takes the logits from before it, past the output of which the loss is a function."""
    back = keras.Sequential([keras.Input((4,)), keras.layers.Dense(width, activation)])
    front = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model = Pipeline([front, back], 2, "1f1b", communicator=NullCommunicator(1, 2))
    model.compile("sgd", loss)
    model.train_on_batch(data()[0], np.zeros((len(data()[0]), 1)))
    assert np.all(model.stage.layers[-1].bias.numpy())


@pytest.mark.parametrize("options", [{}, {"renorm": True}])
def test_a_microbatch_without_rows_counts_for_nothing(options):
    """Two rows in four microbatches are those of two: moving statistics became NaN, and stayed."""

    def trained(microbatches):
        keras.utils.set_random_seed(3)
        norm = keras.layers.BatchNormalization(momentum=0.5, **options)
        front = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), norm])
        back = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model = Pipeline([front, back], microbatches)
        model.compile("sgd", "mse")
        model.train_on_batch(data()[0][:2], np.ones((2, 1), "float32"))
        return bodies.flat(model.get_weights())

    assert trained(4) == pytest.approx(trained(2), rel=1e-6)


def test_a_mask_of_the_last_stage_is_no_part_of_the_loss(capsys):
    last = keras.Sequential([keras.Input((4, 3)), keras.layers.Masking(), keras.layers.Dense(1)])
    first = keras.Sequential([keras.Input((4, 3)), keras.layers.Dense(3)])
    model = Pipeline([first, last], 2, "1f1b", communicator=NullCommunicator(0, 2))
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones((6, 4, 3)), np.ones((6, 4, 1)))
    assert "trains by schedule='gpipe'" in capsys.readouterr().err


def test_losses_of_a_stage_of_its_own_are_refused_with_microbatches():
    stages = joined(2)
    stages[0].add(keras.layers.ActivityRegularization(0.1))
    model = Pipeline(stages, 2, communicator=NullCommunicator(0, 2))
    with pytest.raises(ValueError, match="adds losses of its own"):
        model(np.zeros((4, 8)), training=True)
    Pipeline(stages, 1, communicator=NullCommunicator(0, 2))(np.zeros((4, 8)), training=True)


# The orders of stages, played through.

SIZES = list(itertools.product((1, 2, 3, 5), (1, 2, 4, 7)))


def orders(schedule, stages, parts):
    if schedule == "gpipe":
        return [gpipe(parts)] * stages
    return [one_forward_one_backward(stage, stages, parts) for stage in range(stages)]


def play(orders):
    """When the last stage ends, if every slot takes one unit; each stage follows its order."""
    ended, now, waiting = {}, [0] * len(orders), [list(order) for order in orders]
    while any(waiting):
        moved = False
        for stage, slots in enumerate(waiting):
            if not slots:
                continue
            before = stage + (-1 if slots[0][0] == FORWARD else 1)
            if 0 <= before < len(orders) and (before, slots[0]) not in ended:
                continue
            now[stage] = max(now[stage], ended.get((before, slots[0]), 0)) + 1
            ended[stage, slots.pop(0)] = now[stage]
            moved = True
        assert moved, "stages wait for each other for ever"
    return max(now)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages, parts", SIZES)
def test_every_pass_once_and_idle_no_longer_than_the_formula(schedule, stages, parts):
    chosen = orders(schedule, stages, parts)
    for stage, order in enumerate(chosen):
        assert sorted(order) == sorted(gpipe(parts))
        for part in range(parts):
            assert order.index((FORWARD, part)) < order.index((BACKWARD, part))
        held = itertools.accumulate(1 if direction == FORWARD else -1 for direction, _ in order)
        assert max(held) == (parts if schedule == "gpipe" else min(parts, stages - stage))
    idle = (stages - 1) / (parts + stages - 1)
    assert 1 - 2 * parts / play(chosen) == pytest.approx(idle)


# A stage that dies is named, and the others do not wait for it.

ROOT = Path(__file__).resolve().parents[2]
# A pipeline of two ranks, of which one dies between two steps, while the other begins the next.
SCRIPT = """
import os, signal, sys
from pathlib import Path

import keras
import numpy as np

import dtk

folder, how, rank = sys.argv[1:]
strategy = dtk.strategies.AllReduceStrategy("collective", model_parallel=2)

def die(batch, logs=None):
    if strategy.rank != int(rank) or batch < 3:
        return
    Path(folder, "dying").touch()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("no such batch")

with strategy.scope():
    stages = [
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh")]),
        keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]),
    ]
    model = dtk.layers.Pipeline(stages, microbatches=2, schedule="1f1b")
    model.compile("sgd", "mse")
ones = np.ones((40, 4), "float32")
dying = keras.callbacks.LambdaCallback(on_train_batch_begin=die)
model.fit(ones, ones[:, :1], batch_size=4, verbose=0, callbacks=[dying])
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "how, rank, said",
    [
        ("kill", 0, "rank 0, host localhost, failed first, by SIGKILL"),
        ("kill", 1, "rank 1, host localhost, failed first, by SIGKILL"),
        ("raise", 1, "rank 1, host localhost, failed first, with exit code 1"),
    ],
)
def test_a_dead_stage_is_named_and_the_job_ends(tmp_path, how, rank, said):
    script = tmp_path / "dead_stage.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2", "--no-bind"]
        + [str(script), str(tmp_path), how, str(rank)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_NUM_INTRAOP_THREADS": "1"},
    )
    ended = time.time()
    assert done.returncode != 0
    assert said in done.stderr, done.stderr
    assert ("ValueError: no such batch" in done.stderr) == (how == "raise")
    assert ended - (tmp_path / "dying").stat().st_mtime < 30, "seconds from its death to the end"
