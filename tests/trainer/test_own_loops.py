"""A loop of one's own is told where its loss counts other than one process's."""

import contextlib
import functools
import io
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.compat.keras_steps import with_mask
from dtk.errors import NotDistributedError

from support import bodies

BATCH = 8


def penalty(model):
    return tf.reduce_sum(model.trainable_variables[0] ** 2)


def kept(x, losses):
    return tf.cast(x[:, 0] > 0, losses.dtype)


def of_activity(outputs):
    """Return what Keras adds for an `activity_regularizer`."""
    rows = tf.cast(tf.shape(outputs)[0], outputs.dtype)
    return tf.math.divide_no_nan(tf.reduce_sum(outputs**2), rows)


def everywhere(value):
    return tf.distribute.get_replica_context().all_reduce("sum", value)


def average(losses):
    return tf.nn.compute_average_loss(losses, global_batch_size=BATCH)


# Given losses for each row, the rows, and the model.
WRONG = {
    "a mean over": lambda losses, x, model: tf.reduce_mean(losses),
    "a mean over a replica's": lambda losses, x, model: 0.3 * tf.reduce_mean(losses) + 1.0,
    "a penalty": lambda losses, x, model: average(losses) + 0.1 * penalty(model),
    "divided by a replica's own rows": lambda losses, x, model: (
        tf.reduce_sum(losses) / tf.cast(tf.shape(losses)[0], tf.float32)
    ),
    "a sum divided by a replica's own": lambda losses, x, model: (
        average(losses) + of_activity(2.0 * losses)  # a number of replicas, but not of the divisor
    ),
    "Log of a number": lambda losses, x, model: tf.math.log(tf.reduce_sum(losses)),
    "0 / 0": lambda losses, x, model: (
        tf.reduce_sum(losses * kept(x, losses)) / tf.reduce_sum(kept(x, losses))
    ),
}
RIGHT = {
    "average": lambda losses, x, model: average(losses),
    "average of own": lambda losses, x, model: tf.nn.compute_average_loss(losses),
    "divided": lambda losses, x, model: tf.reduce_mean(losses) / 2.0,
    "scaled": lambda losses, x, model: (
        average(losses) + tf.nn.scale_regularization_loss(penalty(model)) + 1.0
    ),
    "of the layers": lambda losses, x, model: (  # a number, as `sum(model.losses)` is
        average(losses) + tf.nn.scale_regularization_loss(of_activity(losses))
    ),
    "of all": lambda losses, x, model: (
        tf.reduce_sum(losses * kept(x, losses)) / everywhere(tf.reduce_sum(kept(x, losses)))
    ),
}


pairs = functools.partial(zip, strict=True)


def of_keras(x, predicted):
    return keras.losses.MeanSquaredError()(x[:, :1], predicted)


# Right where all replicas have equally many rows.
OF_EQUAL_ROWS = {
    "of Keras": lambda losses, x, model: of_keras(x, model(x)),
    "of kept rows": lambda losses, x, model: of_keras(x, with_mask(model(x), x[:, 0] > 0)),
    "in a function": lambda losses, x, model: tf.function(of_keras)(x, model(x)),
    **{name: RIGHT[name] for name in ("average of own", "divided", "of the layers")},
}
# Given the gradients of a loss that adds up, and the weights.
CLIPPED = {
    "to their norm": lambda gradients, weights: tf.clip_by_global_norm(gradients, 0.1)[0],
    "each": lambda gradients, weights: [tf.clip_by_norm(g, 0.1) for g in gradients],
    "to a value": lambda gradients, weights: [tf.clip_by_value(g, -0.1, 0.1) for g in gradients],
    "by hand": lambda gradients, weights: [0.1 / tf.norm(g) * g for g in gradients],
}
DECAYED = {
    "by hand": lambda gradients, weights: [g + 0.1 * w for g, w in pairs(gradients, weights)],
    "of a part": lambda gradients, weights: [gradients[0] * 0.3 - tf.sign(weights[0]), None],
}
UNTOUCHED = {
    "scaled": lambda gradients, weights: [0.5 * g * tf.minimum(1.0, 2.0) for g in gradients],
    "once summed": lambda gradients, weights: [
        tf.clip_by_norm(everywhere(g), 0.1) / 2.0 for g in gradients
    ],
    "decayed in parts": lambda gradients, weights: [
        g + 0.1 * w / 2.0 for g, w in pairs(gradients, weights)
    ],
    "with noise": lambda gradients, weights: [g + tf.random.normal(g.shape) for g in gradients],
}


def said_of(loss, mark=1.0, devices=0, handed=lambda gradients, weights: gradients, **more):
    """Take a step in a loop, of rows that begin with `mark`; return what dtk says."""
    return run_loop(loss, mark, devices, handed, **more)[0]


def run_loop(loss, mark, devices, handed, batch=BATCH, eager=False, static=False):
    """Return what dtk says, and the types of the operations of the loop's step."""
    strategy = bodies.strategy(devices)
    strategy.told.clear()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            losses = keras.losses.mean_squared_error(x[:, :1], model(x, training=True))
            target = loss(losses, x, model)
        gradients = tape.gradient(target, model.trainable_variables)
        gradients = handed(gradients, [v.value for v in model.trainable_variables])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    rows = np.random.default_rng(0).normal(size=(batch, 3)).astype("float32")
    rows[:, 0] = np.abs(rows[:, 0]) * mark
    data = tf.data.Dataset.from_tensor_slices(rows).batch(batch)
    signature = None if devices or static else [tf.TensorSpec([None, 3])]
    run = tf.function(lambda x: strategy.run(step, (x,)), input_signature=signature)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for x in strategy.experimental_distribute_dataset(data):
            strategy.run(step, (x,)) if eager else run(x)
    if devices or eager or static:
        return said.getvalue(), []
    graph = run.get_concrete_function().graph
    return said.getvalue(), [op.type for op in graph.get_operations()]


def said_of_all():
    said = {name: said_of(loss) for name, loss in (WRONG | RIGHT).items()}
    fixed = {name: said_of(f, static=True) for name, f in (WRONG | RIGHT).items()}
    return said, fixed


@pytest.mark.worlds(("collective", 2))
def test_a_loop_is_told_what_to_write(pool):
    (of_any, of_fixed), of_other = pool.run(said_of_all)
    for said in of_any, of_fixed:  # as many rows as the graph shows: their number is a constant
        for name in WRONG:
            line = r"dtk: warning: .*test_own_loops.py:\d+ differentiates "
            assert re.match(line, said[name]), name
            assert name in said[name]
        assert {name: said[name] for name in RIGHT} == dict.fromkeys(RIGHT, "")
    assert {*of_other[0].values(), *of_other[1].values()} == {""}, "rank 0 alone says it"


def said_of_unequal_rows():
    """By loss: what is said of equal rows, and of unequal ones."""
    said = {k: (said_of(f), said_of(f, batch=BATCH - 1)) for k, f in OF_EQUAL_ROWS.items()}
    kept, mean = OF_EQUAL_ROWS["of kept rows"], OF_EQUAL_ROWS["of Keras"]
    mark = np.where(np.arange(BATCH) < BATCH - 1, 1.0, -1.0)
    said["of fewer kept rows"] = said_of(kept), said_of(kept, mark)
    said["eagerly"] = said_of(mean, eager=True), said_of(mean, batch=BATCH - 1, eager=True)
    names = [name for name in RIGHT if name not in OF_EQUAL_ROWS]
    return said, {name: said_of(RIGHT[name], batch=BATCH - 1) for name in names}


@pytest.mark.worlds(("collective", 2))
def test_a_loop_is_told_that_replicas_divide_by_unequal_rows(pool):
    """Broke as gradients of a short last batch were up to 27 % off, without a word."""
    (said, of_right), (of_other, _) = pool.run(said_of_unequal_rows)
    for name, (of_equal, of_unequal) in said.items():
        told = r"dtk: warning: .*test_own_loops.py:\d+ divides by a replica's own rows"
        assert of_equal == "" and re.match(told, of_unequal), name
    assert set(of_right.values()) == {""}
    assert set(of_other.values()) == {("", "")}, "rank 0 alone says it"


def messages_of_a_step():
    _, types = run_loop(OF_EQUAL_ROWS["of Keras"], 1.0, 0, lambda gradients, weights: gradients)
    return [kind for kind in types if kind.startswith("Collective")]


@pytest.mark.worlds(("collective", 2))
def test_to_compare_rows_a_loop_sends_no_message_of_its_own(pool):
    for messages in pool.run(messages_of_a_step):
        assert len(messages) == 1


def said_of_handed():
    average = RIGHT["average"]
    cases = {"clipped": CLIPPED, "decayed": DECAYED, "untouched": UNTOUCHED}
    return {
        case: {name: said_of(average, handed=f) for name, f in ways.items()}
        for case, ways in cases.items()
    }


@pytest.mark.worlds(("collective", 2))
def test_a_loop_is_told_what_does_not_add_up_of_the_gradients_that_it_applies(pool):
    """Broke as clipped gradients were summed, and weights decayed twice, without a word."""
    said, _ = pool.run(said_of_handed)
    line = r"dtk: warning: .*test_own_loops.py:\d+ "
    for name, message in said["clipped"].items():
        assert re.match(line + "clips or norm", message), name
    for name, message in said["decayed"].items():
        assert re.match(line + "adds to gradients, once for each replica", message), name
    assert set(said["untouched"].values()) == {""}


def failure_without_rows(name):
    """What a step of a loop raises where no row of the second replica counts."""
    mark = np.where(np.arange(BATCH) < BATCH // 2, 1.0, -1.0)
    try:
        said_of((WRONG | RIGHT)[name], mark, devices=2)
    except tf.errors.InvalidArgumentError as error:
        return error.message
    return ""


def test_a_loop_does_not_divide_by_zero_where_one_process_would_not(world):
    pool = world("local", 1)
    assert pool.run(failure_without_rows, "of all") == [""]
    [message] = pool.run(failure_without_rows, "0 / 0")
    assert re.search(r"rank 0: .*test_own_loops.py:\d+ divides by a sum .* that is 0", message)


def refusal_of_a_metric(devices=0):
    """What a loop is told that counts in a metric of no scope, as it may in evaluation."""
    strategy = bodies.strategy(devices)
    metric = keras.metrics.Mean(name="seen")
    rows = tf.data.Dataset.range(6, output_type=tf.float32).batch(3)
    with pytest.raises(NotDistributedError) as error:
        for x in strategy.experimental_distribute_dataset(rows):
            strategy.run(metric.update_state, (x,))
    return str(error.value)


def test_a_metric_made_outside_the_scope_counts_in_no_loop(world):
    """Broke as its result was of one replica's rows, without a word."""
    said = [*world("collective", 2).run(refusal_of_a_metric)]
    said += world("local", 1).run(refusal_of_a_metric, 2)
    for message in said:
        assert "counts in 'total' of metric 'seen'" in message
        assert "Make the metric inside `with strategy.scope():`" in message
