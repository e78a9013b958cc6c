"""What the data tests run on every rank."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from strategies import bodies, cases


def elements_of(files, batch_size, steps=None):
    """Rows each step of this rank reads, as numbers."""
    import dtk

    strategy = bodies.strategy()  # before TensorFlow's first operation
    if files is None:
        source, read = tf.data.Dataset.range(23), None
    else:
        source, read = files, lambda name: tf.data.TextLineDataset(name).map(_number)
    dataset = dtk.data.shard(source, strategy, batch_size, read=read, steps=steps)
    return [batch.numpy().tolist() for batch in dataset]


def said_about(files, batch_size):
    """What is printed while the files are divided."""
    import contextlib
    import io

    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        elements_of(files, batch_size)
    return told.getvalue()


def refused(files, batch_size, steps):
    """What a rank says about its number of steps, given per rank."""
    rank = bodies.strategy().rank
    try:
        elements_of(files, batch_size, steps[rank])
    except ValueError as error:
        return str(error)
    return None


def no_end_no_start():
    import dtk

    strategy, said = bodies.strategy(), []
    for dataset in (tf.data.Dataset.range(4).repeat(), tf.data.Dataset.range(1)):
        try:
            dtk.data.shard(dataset, strategy, 2)
        except ValueError as error:
            said.append(str(error))
    return said


def _number(line):
    return tf.strings.to_number(line, tf.int64)


def trained_on_shards(whole_first=False):
    """`fit` on shards of a dataset, and the plain fit on the same global batches."""
    import dtk

    strategy = bodies.strategy()
    x, y = cases.rows(45)
    whole = tf.data.Dataset.from_tensor_slices((x, y))
    model = cases.compiled(strategy, metrics=["accuracy"])
    if whole_first:
        model.fit(whole.batch(15), verbose=0, shuffle=False)
    dataset = dtk.data.shard(whole, strategy, 15)
    history = model.fit(dataset, epochs=3, verbose=0, shuffle=False)

    order = []  # step by step: rank 0's eight rows, then rank 1's seven
    queues = [list(range(45))[rank::2] for rank in range(2)]
    for _ in range(3):
        for queue, count in zip(queues, (8, 7), strict=True):
            order += queue[:count]
            del queue[:count]
    plain = cases.compiled(None, metrics=["accuracy"])
    if whole_first:
        plain.fit(whole.batch(15), verbose=0, shuffle=False)
    batches = [len(order[i * 15 : i * 15 + 15]) for i in range(3)]
    assert batches[:2] == [15, 15]
    expected = plain.fit(
        tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(15),
        epochs=3,
        verbose=0,
        shuffle=False,
    )
    weights = [bodies.flat(m.get_weights()) for m in (model, plain)]
    return weights, history.history, expected.history


def seeds():
    import dtk

    own = dtk.data.set_seed(7, bodies.strategy())
    return own, np.random.rand()
