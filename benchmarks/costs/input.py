"""What ranks read and decode, and whether training waits for it.

rows      a rank decodes, for each row that it trains on
speed     of `fit` from several sources, against one batch that stays in memory
alone     the same pipelines read by all ranks without training, in rows per second
"""

import contextlib
import functools

import dtk
import keras
import numpy as np
import tensorflow as tf
from dtk.bench.turns import order
from dtk.bench.variant import Fit
from dtk.bench.worker import clock
from dtk.compat import keras_data
from dtk.input import slicing

import report
from fits import mean_of_ranks, take, warm, watched
from models import PROBLEMS

SPEED = report.at_least(0.98)
MEMORY = "one batch in memory"
BATCHES = 4


def measure(setting, strategy):
    counts = decoded(setting, strategy)
    return [*counts_table(counts), "", *speeds_table(setting, strategy)]


# Rows.


class Numbers(keras.utils.PyDataset):
    """Batches that count the rows they were made of."""

    def __init__(self, x, y, batch, count):
        super().__init__()
        self._x, self._y, self._batch, self._count = x, y, batch, count

    def __len__(self):
        return len(self._x) // self._batch

    def __getitem__(self, index):
        rows = slice(index * self._batch, (index + 1) * self._batch)
        self._count.assign_add(self._batch)
        return self._x[rows], self._y[rows]


def decoded(setting, strategy):
    """Source -> rows this rank has decoded for each that it trains on."""
    batch = setting.batch_size * strategy.size
    x, y = PROBLEMS["dense"].data(BATCHES * batch)
    count = tf.Variable(0, dtype=tf.int64)

    def counted(x, y):
        count.assign_add(1)
        return x, y

    def counted_batch(x, y):
        count.assign_add(tf.shape(x, tf.int64)[0])
        return x, y

    def shard(source, **kwargs):
        return dtk.data.shard(source, strategy, batch, **kwargs)

    rows = tf.data.Dataset.from_tensor_slices((x, y))
    names, read = named(x, y, strategy.size)
    sources = {
        "arrays (rows gathered)": {"x": x, "y": y, "batch_size": batch},
        "`tf.data`: `.map(decode).batch(n)`, with state": {"x": rows.map(counted).batch(batch)},
        "`PyDataset`": {"x": Numbers(x, y, batch, count)},
        "`shard(dataset.map(decode), ...)`": {"x": shard(rows.map(counted))},
        "`shard(dataset, ...).map(decode)`": {"x": shard(rows).map(counted_batch)},
        "`shard(names, ..., read=read_and_decode)`": {
            "x": shard(names, read=lambda name: read(name).map(counted))
        },
    }
    with strategy.scope():
        model = PROBLEMS["dense"].compiled(keras)
    found = {}
    for name, data in sources.items():
        # Arrays have no function that decodes: count what goes into dtk's cutting.
        gathers = "y" in data
        with _cutting(counted_batch) if gathers else contextlib.nullcontext():
            # Beginning a `fit` may read ahead: what one epoch more adds is an epoch's.
            totals = []
            for epochs in (1, 2):
                before = int(count)
                model.fit(**data, epochs=epochs, shuffle=gathers, verbose=0)
                totals.append(int(count) - before)
        found[name] = [(totals[1] - totals[0]) / (BATCHES * setting.batch_size)]
    return mean_of_ranks(found, strategy.communicator)


@contextlib.contextmanager
def _cutting(function):
    """While inside, a function is mapped over the global batches that dtk cuts."""
    cut = slicing.cut_dataset
    slicing.cut_dataset = lambda dataset, *args: cut(dataset.map(function), *args)
    try:
        yield
    finally:
        slicing.cut_dataset = cut


def named(x, y, size):
    """Names, and what reads the rows under each: as of files, one for every rank."""
    x, y = (tf.constant(rows.reshape(size, -1, *rows.shape[1:])) for rows in (x, y))

    def read(name):
        part = tf.strings.to_number(name, tf.int64)
        return tf.data.Dataset.from_tensor_slices((x[part], y[part]))

    return [f"{part:03}" for part in range(size)], read


def counts_table(counts):
    rows = [[source, f"{value:.2f}"] for source, (value,) in counts.items()]
    return report.markdown("source|rows a rank decodes for each row it trains on", rows)


# Speed.


def speeds_table(setting, strategy):
    communicator = strategy.communicator
    batch = setting.batch_size * strategy.size
    sources = pipelines(setting, strategy, batch)
    with strategy.scope():
        model = PROBLEMS[setting.model].compiled(keras)
    variants = [
        Fit(name, model, {"shuffle": "y" in data, **data}, setting.steps, communicator)
        for name, data in sources.items()
    ]
    read = {}
    for one in variants:
        with watched(keras_data, "cut") as cuts:
            warm([one])
        read[one.name] = cuts[-1].result
    training = take(variants, setting.rounds, communicator)
    alone = reading(read, setting, communicator)
    rows = []
    for name, seconds in training.items():
        target = ["", ""] if name == MEMORY else None
        cells = report.compared(seconds, training[MEMORY], SPEED, speed=True)
        rates = [[batch / one for one in samples] for samples in (alone[name], seconds)]
        rates = list(map(report.spread, rates))
        rows.append([name, cells[0], cells[2], *(target or cells[3:]), *rates])
    header = "`fit` from|ms per step|in memory / this|target||rows/s, pipeline alone|rows/s, `fit`"
    return report.markdown(header, rows)


def pipelines(setting, strategy, batch):
    """Source -> what `fit` is given for one step more than are measured.

    Where rows are decoded, they are kept as bytes.
    """
    steps = setting.steps + 1
    x, y = PROBLEMS[setting.model].data(steps * batch)
    kept = np.clip(32 * x, -127, 127).astype("int8")
    rows = tf.data.Dataset.from_tensor_slices
    names, read = named(kept, y, strategy.size)
    decoding = {"map_func": decode, "num_parallel_calls": tf.data.AUTOTUNE}
    sharded = dtk.data.shard(
        names, strategy, batch, read=lambda name: read(name).map(**decoding), steps=steps
    )
    return {
        MEMORY: {"x": rows((x, y)).batch(batch).take(1).cache().repeat(steps)},
        "arrays": {"x": x, "y": y, "batch_size": batch},
        "`tf.data`, decoded row by row": {"x": rows((kept, y)).map(**decoding).batch(batch)},
        "`dtk.data.shard`, the same": {"x": sharded},
    }


def decode(x, y):
    """Bytes -> an image of mean 0 and variance 1."""
    x = tf.cast(x, tf.float32)
    return (x - tf.reduce_mean(x)) / tf.math.reduce_std(x), y


def _read(dataset, tick):
    for _ in dataset:
        tick()


def reading(datasets, setting, communicator):
    """Name -> seconds that a batch takes where all ranks read and none trains, for each round."""
    mine = {name: [] for name in datasets}
    for number in range(setting.rounds):
        for name, dataset in order(list(datasets.items()), number):
            communicator.barrier()
            mine[name].append(clock(functools.partial(_read, dataset))["seconds"])
    return mean_of_ranks(mine, communicator)
