"""Parameter servers: every optimizer takes the steps it takes in one process, or is refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

import dtk
from dtk.parameter_server.consistency_models import BoundedDelay

from support import cases
from support.bodies import flat, scope_of, served_with
from support.once import once
from support.served_bodies import check_mistake, partitioned

TOLERANCE = 1e-5

pytestmark = pytest.mark.worlds(("served", 2))

ROWS, TOKENS = 1001, 6


def _multi():
    first, second = optimizers.RMSprop(0.01), optimizers.Adam(0.01)
    return optimizers.MultiOptimizer(lambda v: first if v.path.endswith("embeddings") else second)


def _dtk(name, *args, **kwargs):
    def make():
        return getattr(dtk.optimizers, name)(*args, **kwargs)

    return make


# All take a row at a time, so that they may be given a table in parts.
BY_ROWS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
    "rmsprop momentum": lambda: optimizers.RMSprop(0.01, momentum=0.9),
    "rmsprop centered": lambda: optimizers.RMSprop(0.01, centered=True),
    "adam": lambda: optimizers.Adam(0.01),
    "adamw": lambda: optimizers.AdamW(0.01),
    "adamax": lambda: optimizers.Adamax(0.01),
    "nadam": lambda: optimizers.Nadam(0.01),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.001),
    "lion": lambda: optimizers.Lion(0.01),
    "schedule free": lambda: optimizers.ScheduleFreeAdamW(0.01),
    "muon": lambda: optimizers.Muon(0.01),  # an embedding is none of its matrices
    "loss scaling": lambda: optimizers.LossScaleOptimizer(optimizers.RMSprop(0.01), 64.0),
    # Keras has it from 3.15 on
    **({"several": _multi} if hasattr(optimizers, "MultiOptimizer") else {}),
    "clipnorm": lambda: optimizers.RMSprop(0.01, clipnorm=0.1),
    "clipnorm of a window": lambda: optimizers.SGD(
        0.5, clipnorm=0.1, gradient_accumulation_steps=2
    ),
    "global clipnorm": lambda: optimizers.RMSprop(0.01, global_clipnorm=0.1),
    "averages": lambda: optimizers.Adagrad(0.1, use_ema=True, ema_overwrite_frequency=2),
    "RMSpropWarmup": _dtk("RMSpropWarmup", 0.01, steps_per_epoch=3),
}
WHOLE = {
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "lamb": lambda: optimizers.Lamb(0.01),
    "muon on tables": lambda: optimizers.Muon(0.01, exclude_embeddings=False),
    "LARS": _dtk("LARS", 1.0, weight_decay=1e-4),
    "LAMB": _dtk("LAMB", 0.01, weight_decay=0.01),
    "scaled LAMB": lambda: optimizers.LossScaleOptimizer(WHOLE["LAMB"](), 64.0),
    "of one's own": lambda: cases.Normed(0.1),
}


def _tower(top, table):
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((TOKENS,), dtype="int32"),
            layers.Embedding(ROWS, 8, **table),
            layers.Flatten(),
            *top(),
        ]
    )


class Towers(keras.Model):
    """A table and a kernel for each optimizer, all trained in the same steps."""

    def __init__(self, recipes, **table):
        super().__init__()
        self.towers = [_tower(self.top, table) for _ in recipes]
        self.updating = []
        for number, make in enumerate(recipes.values()):
            setattr(self, f"optimizer_{number}", make())
            self.updating.append(f"optimizer_{number}")

    def top(self):
        return [layers.Dense(4)]

    def loss_of(self, labels, outputs):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, outputs)

    def call(self, tokens):
        return [tower(tokens) for tower in self.towers]

    def train_step(self, data):
        tokens, labels = data
        found = []
        for tower, name in zip(self.towers, self.updating, strict=True):
            optimizer = getattr(self, name)
            with tf.GradientTape() as tape:
                loss = self.loss_of(labels, tower(tokens)) + sum(tower.losses)
                loss = optimizer.scale_loss(loss)
            weights = tower.trainable_weights
            found.append((optimizer, tape.gradient(loss, weights), weights))
        for optimizer, gradients, weights in found:
            optimizer.apply(gradients, weights)
        return {"loss": loss}


class Linear(Towers):
    """Towers whose gradients do not depend on their weights, so neither on how old these are."""

    def top(self):
        return []

    def loss_of(self, labels, outputs):
        return keras.ops.mean(keras.ops.sum(outputs * keras.ops.arange(48, dtype="float32"), -1))


def _towers(recipes, strategy, parts, run_eagerly=False, kind=Towers, **table):
    if kind is Linear:
        tokens = np.arange(48 * TOKENS).reshape(48, TOKENS)
    else:
        tokens = np.random.default_rng(0).integers(0, ROWS, (48, TOKENS))
        tokens[:, 1] = tokens[:, 0]  # rows that a batch takes twice
    labels = tokens.sum(1) % 4
    with partitioned(strategy, parts):
        with scope_of(strategy):
            model = kind(recipes, **table)
            for tower, name in zip(model.towers, model.updating, strict=True):
                optimizer = getattr(model, name)
                if hasattr(optimizer, "initial_scale") and parts == 1:  # steps scale before `apply`
                    optimizer.build(tower.trainable_weights)
            model.compile(run_eagerly=run_eagerly)
        keras.utils.set_random_seed(6)  # the order of the rows
        model.fit(tokens, labels, batch_size=12, verbose=0)
    return {name: tower.get_weights() for name, tower in zip(recipes, model.towers, strict=True)}


def trained(consistency, parts):
    """Weights by optimizer after four steps; of those for tables in parts, or of the others."""
    return _towers(BY_ROWS if parts > 1 else WHOLE, served_with(consistency), parts)


def plain():
    """The same of all in one process.

    Eagerly: in a graph Keras 3.15 trains tables with ScheduleFreeAdamW as if they began with zeros.
    """
    return _towers(BY_ROWS | WHOLE, None, 1, run_eagerly=True)


@pytest.mark.full("the equations are tested in one process")
@pytest.mark.parametrize("consistency, parts", [("sync", 2), (BoundedDelay(0), 1)], ids=str)
def test_every_optimizer_trains_tables_as_one_process_does(pool, consistency, parts):
    """Rows pushed for a table had a shape and a rank that Keras's sparse arithmetic cannot use.

    RMSprop, Ftrl, Adadelta, Nadam, Lion, Adafactor and Adagrad failed on that, a MultiOptimizer
    because its members were not known; a norm to clip to was compared with that of each part.
    """
    (mine,) = pool.run(trained, consistency, parts, timeout=300)
    check(mine, once(plain))


ORDERLESS = (
    "rmsprop centered",
    "nadam",
    "adagrad",
    "adadelta",
    "ftrl",
    "lion",
    "clipnorm",
    "several",
)


def of_any_age(consistency):
    """Tables, in two parts where there is a consistency, after four steps; gradients are given."""
    strategy = served_with(consistency)
    recipes = {name: BY_ROWS[name] for name in ORDERLESS}
    return _towers(recipes, strategy, 2, run_eagerly=strategy is None, kind=Linear)


@pytest.mark.full("four to six processes: when steps may start is tested by itself")
@pytest.mark.worlds(("served", 1))
def test_asynchronous_steps_of_one_worker_are_those_of_one_process(pool):
    """But for the age of the weights they read, on which these gradients do not depend."""
    (mine,) = pool.run(of_any_age, "async", timeout=120)
    check(mine, once(of_any_age, None))


def check(mine, expected):
    wrong = {}
    for name, weights in mine.items():
        wanted = flat(expected[name])
        apart = np.linalg.norm(flat(weights) - wanted) / np.linalg.norm(wanted)
        if not apart <= TOLERANCE:
            wrong[name] = apart
    assert mine and not wrong


CONSTRAINTS = {
    "non-negative": keras.constraints.NonNeg,
    "unit rows": lambda: keras.constraints.UnitNorm(axis=1),
    "unit columns": keras.constraints.UnitNorm,
}


def constrained(name, consistency):
    """A constrained table, in two parts where there is a consistency, after four steps."""
    strategy = served_with(consistency)
    recipes = {"rmsprop": BY_ROWS["rmsprop"]}
    return _towers(recipes, strategy, 2, embeddings_constraint=CONSTRAINTS[name]())["rmsprop"][0]


@pytest.mark.full_but("served-2-non-negative")
@pytest.mark.parametrize("name", ["non-negative", "unit rows"])
def test_constraints_hold_for_tables_in_parts(pool, name):
    """Parts had none: a table went negative, and nobody was told."""
    (mine,) = pool.run(constrained, name, "sync")
    np.testing.assert_allclose(mine, constrained(name, None), atol=1e-6)


def regularized(consistency):
    """A table of which a step's loss reads all rows, in two parts where there is a consistency."""
    strategy, recipes = served_with(consistency), {"adam": BY_ROWS["adam"]}
    return _towers(recipes, strategy, 2, embeddings_regularizer="l2")


def test_a_table_may_have_a_regularizer(pool):
    """Its rows were looked up, and the regularizer was given None."""
    (mine,) = pool.run(regularized, "sync")
    check(mine, regularized(None))


def doubled(consistency):
    """A script that replaces `apply` of a compiled model's optimizer."""
    keras.utils.set_random_seed(3)
    x, y = cases.rows(32)
    strategy, sgd = served_with(consistency), optimizers.SGD(0.1)
    model = cases.compiled(strategy, cases.Subclassed, optimizer=sgd)
    own = model.optimizer.apply

    def apply(grads, trainable_variables=None):
        return own([2 * g for g in grads], trainable_variables)

    model.optimizer.apply = apply
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    return flat(model.get_weights())


def test_an_apply_that_a_script_sets_is_called_once(pool):
    """The servers called it again."""
    (mine,) = pool.run(doubled, "sync")
    np.testing.assert_allclose(mine, once(doubled, None), 1e-5, 1e-6)


def _whole(name):
    """A mistake: a table in two parts. Lamb and others once took each part for a variable."""
    said = ("variable_partitioner=", "embeddings' into 2 parts", "optimizer '", "Adagrad")
    return (lambda: _towers({name: WHOLE[name]}, served_with("sync"), 2), ValueError, *said)


def taped():
    """A loop's gradient of a Keras variable in two parts."""
    strategy = served_with("sync")
    with partitioned(strategy, 2, rows=4), strategy.scope():
        table = keras.layers.Embedding(4, 2)
        table.build()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table(tf.constant([1])))
        tape.gradient(loss, table.trainable_variables)


MISTAKES = {name: _whole(name) for name in WHOLE} | {
    "a loop": (taped, AttributeError, "embeddings' into 2 parts", "Train it by model.fit"),
    "unit columns": (
        lambda: constrained("unit columns", "sync"),
        *(ValueError, "UnitNorm", "more than a row at a time", "axis=1"),
    ),
}


@pytest.mark.full_but(
    "served-2-a loop",
    "served-2-of one's own",
    "served-2-unit columns",
)
@pytest.mark.parametrize("name", MISTAKES)
def test_what_needs_a_whole_table_is_refused_for_parts(pool, name):
    check_mistake(pool, __name__, name)
