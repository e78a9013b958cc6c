"""Horovod's scripts with only the import changed: names, equations, and the ends of one process."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk.migrate.horovod as hvd
from dtk.errors import DisagreementError, NotDistributedError, ReplacedError
from dtk.migrate.horovod import callbacks, job

from support.once import once

RANKS, ROWS = 2, 8  # rows of a rank's batch
real = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"
)
two_ranks = pytest.mark.parametrize("backend, size", [("collective", RANKS)])
# Imports of Horovod's modules, not names of its own.
THEIRS = {"K", "is_version_greater_equal_than", "TensorFlowKerasState"}
# Defaults that are values of a class of Horovod's.
OWN_DEFAULTS = {"compression", "op", "process_set"}


@contextlib.contextmanager
def initialized():
    """Run as after `hvd.init()`, in a world that has other tests after this one."""
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()
        job._job.made = None


def names_of(part):
    """Every public name of a part of Horovod, of both packages."""
    modules = [importlib.import_module(f"horovod.{where}{part}") for where in BOTH]
    for module in modules:
        for name, value in vars(module).items():
            foreign = isinstance(value, types.ModuleType) and "horovod" not in value.__name__
            if not name.startswith("_") and name not in THEIRS and not foreign:
                yield name, value


BOTH = ("keras", "tensorflow.keras")


@real
@pytest.mark.parametrize("part", ["", ".callbacks", ".elastic"])
def test_every_name_is_there_with_its_arguments_or_says_what_replaces_it(part):
    module, seen = importlib.import_module(f"dtk.migrate.horovod{part}"), 0
    for name, theirs in names_of(part):
        ours, seen = getattr(module, name), seen + 1
        if hasattr(ours, "cure"):
            with pytest.raises(ReplacedError, match=name) as error:
                ours()
            assert ours.cure in str(error.value)
        elif callable(theirs) and not isinstance(theirs, types.ModuleType):
            given = inspect.signature(theirs).parameters.values()
            taken = inspect.signature(ours).parameters
            for one in given:
                if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                    continue
                assert one.name in taken, f"{name} does not take {one.name}"
                same = one.default == taken[one.name].default
                # horovod.keras alone says average=True, with which op= could not be given.
                assert same or one.name in {*OWN_DEFAULTS, "average"}, f"{name}({one.name}=)"
    assert seen > (20 if part == "" else 4)


# The equations.


class _Optimizer:
    """What Horovod's callbacks read and set of an optimizer of Keras 2."""

    def __init__(self, rate, momentum):
        self.lr, self.momentum = rate, momentum


class _Backend:
    """Keras 2's `get_value` and `set_value`, on the optimizer's own attributes."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def get_value(self, value):
        return value

    def set_value(self, old, new):
        name = "momentum" if old is self.optimizer.momentum else "lr"
        setattr(self.optimizer, name, new)


def theirs_by_step(monkeypatch, kind, steps, epochs, **arguments):
    """The rate and momentum of each step, by Horovod's own code."""
    impl = importlib.import_module("horovod._keras.callbacks")
    monkeypatch.setattr(impl.hvd, "size", lambda: RANKS)
    optimizer = _Optimizer(0.4, 0.9)
    callback = getattr(impl, f"{kind}Impl")(_Backend(optimizer), **arguments)
    callback.model, callback.params = types.SimpleNamespace(optimizer=optimizer), {"steps": steps}
    return walk(callback, steps, epochs, lambda: (optimizer.lr, optimizer.momentum))


def walk(callback, steps, epochs, look):
    found = []
    callback.on_train_begin()
    for epoch in range(epochs):
        callback.on_epoch_begin(epoch)
        for batch in range(steps):
            of_keras = getattr(callback, "on_train_batch_begin", None)
            begin = of_keras or callback.on_batch_begin
            begin(batch)
            found.append(look())
            callback.on_batch_end(batch)
        callback.on_epoch_end(epoch, {})
    return np.array(found)


@real
@pytest.mark.parametrize(
    "kind, arguments",
    [
        ("LearningRateWarmupCallback", {"initial_lr": 0.4, "warmup_epochs": 2}),
        ("LearningRateScheduleCallback", {"initial_lr": 0.4, "multiplier": 0.5, "start_epoch": 1}),
        (
            "LearningRateScheduleCallback",
            {
                "initial_lr": 0.4,
                "multiplier": lambda t: 1 / (1 + t),
                "staircase": False,
                "end_epoch": 2,
                "momentum_correction": False,
            },
        ),
    ],
    ids=["warmup", "base", "function"],
)
def test_rates_and_momenta_are_those_of_horovods_own_code(monkeypatch, kind, arguments):
    steps, epochs = 4, 3
    wanted = theirs_by_step(monkeypatch, kind, steps, epochs, **arguments)
    monkeypatch.setattr(job, "size", lambda: RANKS)
    monkeypatch.setattr(job, "rank", lambda: 0)
    variable = keras.Variable(np.zeros(1, "float32"))
    optimizer = keras.optimizers.SGD(0.4, momentum=0.9)
    optimizer.build([variable])
    callback = getattr(callbacks, kind)(**arguments)
    callback.set_params({"steps": steps})
    callback.set_model(types.SimpleNamespace(optimizer=optimizer))
    velocity, mine = optimizer.variables[2], []

    def look():
        mine.append((float(optimizer.learning_rate.numpy()), float(velocity.numpy()[0])))
        optimizer.apply([np.ones(1, "float32")], [variable])  # v <- m v - rate
        return mine[-1]

    walk(callback, steps, epochs, look)
    expected, v = [], 0.0
    for rate, momentum in wanted:
        expected.append(rate)
        v = momentum * v - rate  # Keras's SGD, with a gradient of 1
    np.testing.assert_allclose([rate for rate, _ in mine], expected, rtol=1e-6)
    np.testing.assert_allclose(velocity.numpy()[0], v, rtol=1e-5)


# Training.


def rows():
    draw = np.random.default_rng(1)
    return draw.normal(size=(64, 5)).astype("float32"), draw.normal(size=(64, 1)).astype("float32")


def of_rank(rank, size):
    """The rows of a rank: its part of each of the batches that all ranks' batches make up."""
    x, y = rows()
    batches = np.arange(64).reshape(-1, RANKS, ROWS)
    mine = batches[:, rank * RANKS // size : (rank + 1) * RANKS // size].ravel()
    return x[mine], y[mine]


def trained(kind, folder):
    """A script as Horovod's examples are; in one process it reads all ranks' batches."""
    options = {
        "average": {"compression": hvd.Compression.none},
        "sum": {"op": hvd.Sum},
        "passes": {"backward_passes_per_step": 2},
        "clipped": {},
        "dataset": {},
    }[kind]
    with initialized():
        rank, size = hvd.rank(), hvd.size()
        keras.utils.set_random_seed(7 + rank)  # differs by rank, as Horovod's scripts may
        x, y = of_rank(rank, size)
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)]
        )
        scale = RANKS if kind == "sum" and size == 1 else 1  # Sum is size times the mean
        clip = {"global_clipnorm": 0.5} if kind == "clipped" else {}
        optimizer = keras.optimizers.SGD(0.02 * RANKS * scale, momentum=0.9, **clip)
        optimizer = hvd.DistributedOptimizer(optimizer, **options)
        model.compile(
            loss="mse", optimizer=optimizer, metrics=["mae"], experimental_run_tf_function=False
        )
        given = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ]
        if kind == "average":
            given += [
                hvd.callbacks.LearningRateScheduleCallback(0.04, 0.5, momentum_correction=False)
            ]
        path = os.path.join(folder, f"{kind}{size}.keras")
        if rank == 0:
            given.append(keras.callbacks.ModelCheckpoint(path))
        batch = ROWS * RANKS // size
        how = {"epochs": 2, "shuffle": False, "verbose": 0, "validation_data": of_rank(rank, size)}
        data = {"x": x, "y": y, "batch_size": batch}
        if kind == "dataset":
            pairs = tf.data.Dataset.from_tensor_slices((x, y))
            data = {"x": pairs.repeat().batch(batch), "steps_per_epoch": len(x) // batch}
        history = model.fit(callbacks=given, **data, **how).history
        model.train_on_batch(x[:batch], y[:batch])
        alone = None
        if rank == 0 and size > 1:  # one rank alone, while the others go on
            alone = model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)
        loaded = None
        if kind == "average":
            hvd.allreduce(1.0)  # rank 0 has saved
            again = hvd.load_model(path, compression=hvd.Compression.fp16)
            again.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
            loaded = [again.get_weights(), again.optimizer.iterations.numpy()]
        return model.get_weights(), history, alone, loaded


@pytest.mark.full_but("sum-collective-2")
@two_ranks
@pytest.mark.parametrize("kind", ["average", "sum", "passes", "clipped", "dataset"])
def test_two_ranks_end_as_one_process_with_all_their_batches(world, backend, size, kind, tmp_path):
    results = world(backend, size).run(trained, kind, str(tmp_path))
    weights, history, _, loaded = once(trained, kind, str(tmp_path))
    for mine, logs, _, _ in results:
        for one, other in zip(mine, weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert logs.keys() == history.keys()
        for name, values in history.items():
            np.testing.assert_allclose(logs[name], values, rtol=1e-5)
    (losses, predictions), nothing = results[0][2], results[1][2]
    assert nothing is None
    assert len(losses) == 2
    assert predictions.shape == (64 // RANKS, 1), "its own rows only"
    if loaded is not None:
        for _, _, _, (again, steps) in results:
            assert steps == loaded[1] == 12
            for one, other in zip(again, loaded[0], strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)  # sent as float16


def different(seeded):
    """What ranks are given that shuffle and draw for themselves, with and without a seed."""
    tf.random.set_seed(None)  # this world's
    with initialized():
        if seeded:
            tf.random.set_seed(3)
        seen = []

        class Noting(keras.layers.Layer):
            def call(self, x):
                tf.py_function(lambda rows: seen.append(rows.numpy().ravel().tolist()), [x], [])
                return x

        model = keras.Sequential([keras.Input((1,)), Noting(), keras.layers.Dense(1)])
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3)), loss="mse")
        x = np.arange(40, dtype="float32")[:, None]
        seen.clear()
        model.fit(x, x, batch_size=8, verbose=0)
        arrays = [rows for rows in seen if len(rows) == 8][-5:]  # not of the self-test
        numbers = hvd.allgather_object(np.random.permutation(20).tolist())
        data = tf.data.Dataset.range(20).shuffle(20)
        return arrays, numbers, [int(one) for one in data]


def collectives():
    with initialized():
        rank = hvd.rank()
        variable = tf.Variable(float(rank))
        hvd.broadcast_variables([variable], root_rank=1)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
        unequal = ""
        try:
            model.fit(np.ones((8 + 4 * rank, 1)), np.ones((8 + 4 * rank, 1)), batch_size=4)
        except DisagreementError as error:
            unequal = str(error)
        plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        plain.compile("sgd", "mse")
        refused = ""
        if rank == 0:  # no rank waits for another
            try:
                plain.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
            except NotDistributedError as error:
                refused = str(error)
        place = [hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
        return {
            "place": place,
            "counts": float(hvd.allreduce(rank)),
            "list": hvd.allreduce([1.0, float(rank)], op=hvd.Sum).numpy().tolist(),
            "scaled": float(hvd.allreduce(1.0, prescale_factor=2.0, postscale_factor=3.0)),
            "half": float(hvd.allreduce(1 / 3, compression=hvd.Compression.fp16)),
            "extremes": [
                float(hvd.allreduce(rank + 2.0, op=op)) for op in (hvd.Min, hvd.Max, hvd.Product)
            ],
            "rows": hvd.allgather(np.full((rank + 1, 1), rank)).numpy().ravel().tolist(),
            "root": float(hvd.broadcast(float(rank), 1)),
            "scattered": hvd.reducescatter(np.arange(3.0) + rank).numpy().tolist(),
            "object": hvd.broadcast_object({"rank": rank}, 1),
            "variable": float(variable.numpy()),
            "set": [hvd.global_process_set.size(), hvd.global_process_set.included()],
            "refused": refused,
            "unequal": unequal,
        }


@two_ranks
def test_collectives(world, backend, size):
    first, second = world(backend, size).run(collectives)
    assert "hvd.DistributedOptimizer(optimizer)" in first.pop("refused")
    assert second.pop("refused") == ""
    for rank, mine in enumerate((first, second)):
        assert "steps_per_epoch everywhere" in mine["unequal"]
        assert mine["place"] == [2, rank, 2, 0, 1]
        assert mine["counts"] == 0.5, "an average of integers is no integer"
        assert mine["list"] == [2.0, 1.0]
        assert mine["scaled"] == 6.0
        assert mine["half"] == pytest.approx(1 / 3, rel=1e-3)
        assert mine["half"] != 1 / 3
        assert mine["extremes"] == [2.0, 3.0, 6.0]
        assert mine["rows"] == [0, 1, 1]
        assert mine["root"] == mine["variable"] == 1.0
        assert mine["scattered"] == ([0.5, 1.5] if rank == 0 else [2.5])
        assert mine["object"] == {"rank": 1}
        assert mine["set"] == [2, True]


@pytest.mark.full("a cheaper test holds its rule")
@two_ranks
def test_ranks_shuffle_and_draw_each_for_itself(world, backend, size):
    """Had all ranks one seed, as dtk gives them otherwise, they would compute the same batches."""
    (first, numbers, data), (second, _, others) = world(backend, size).run(different, False)
    assert first != second
    assert numbers[0] != numbers[1]
    assert data != others
    (first, _, data), (second, _, others) = world(backend, size).run(different, True)
    assert first == second, "the script's own seed counts, as in Horovod"
    assert data == others


# What cannot be.


def test_before_init():
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.rank()
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.DistributedOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.mpi_threads_supported()
    assert not hvd.is_initialized()


@pytest.mark.parametrize("communicator", ["mpi", "collective"])
def test_scripts_ask_what_is_built_before_init(communicator, monkeypatch):
    """They got "Horovod has not been initialized", where Horovod answers."""
    monkeypatch.setenv("DTK_COMMUNICATOR", communicator)
    assert hvd.mpi_built() == (communicator == "mpi")
    assert not hvd.nccl_built() and not hvd.ccl_built()


def test_what_dtk_does_in_another_way_says_so():
    with initialized():
        sgd = keras.optimizers.SGD
        for arguments, word in (
            ({"op": hvd.Adasum}, "LARS"),
            ({"process_set": object()}, "process_set"),
            ({"compression": object()}, "dtk.exchange"),
        ):
            with pytest.raises(ReplacedError, match=word):
                hvd.DistributedOptimizer(sgd(), **arguments)
        with pytest.raises(TypeError, match=r"expected a keras\.Optimizer"):
            hvd.DistributedOptimizer("sgd")
        with pytest.raises(ValueError, match="Average and Sum"):
            hvd.DistributedOptimizer(sgd(), op=hvd.Max)
        with pytest.raises(ValueError, match="already"):
            hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd()))
        with pytest.raises(ValueError, match="backward_passes_per_step"):
            hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0)
        with pytest.raises(ReplacedError, match="local_variables"):
            callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[tf.Variable(1.0)])
        with pytest.raises(ReplacedError, match="legacy"):
            hvd.load_model("there.keras", legacy_opts=True)
    with pytest.raises(ReplacedError, match="dtk run"):
        hvd.init(comm=[0])


def test_an_argument_that_changes_nothing_is_told_of(capfd):
    with initialized():
        hvd.DistributedOptimizer(keras.optimizers.SGD(), sparse_as_dense=True, groups=2)
    told = capfd.readouterr().err
    assert "sparse_as_dense=True" in told
    assert "groups=2" in told
