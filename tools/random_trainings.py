"""Train what is put together at random, on several ranks and in one process, and compare.

    python tools/random_trainings.py                               # 40 trainings, 2 ranks
    python tools/random_trainings.py --first 100 --count 20 -n 3 --communicator mpi
    python tools/random_trainings.py --resume                      # stopped at random steps

A seed decides the model, the optimizer, losses, metrics, weights, the kind of data, the options of
`fit` and what comes after it. In float64 weights, slots, History, `evaluate` and `predict` must be
those of one process to 1e-9, relative to the largest entry. With `--resume` a training that is
stopped up to three times, and resumed by `Checkpoint`, must end as the same without a stop. A line
per seed says how far they are apart, or what refused. The exit code is 1 if any are apart.

What differs by design is left out: dropout, which each rank draws for its rows; biases that a norm
takes away again, whose gradients are rounding alone; accumulators of an open window.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf

import dtk
from dtk.nests import Array, Tree

NEAR, SAME = 1e-9, 1e-12  # of one process, and of a training without a stop
CLASSES = 4
FOLDER = "RANDOM_TRAININGS_FOLDER"  # variable of the ranks

Data: TypeAlias = "tuple[Tree, Tree, Tree | None]"
_Item = TypeVar("_Item")


class Training(NamedTuple):
    """What a seed decides."""

    seed: int
    rows: int
    kind: str
    norm: str | None
    heads: int
    loss: str
    metrics: tuple[str, ...]
    optimizer: str
    settings: dict[str, object]
    regularized: bool
    compile: dict[str, object]
    source: str
    batch_size: int
    weights: str | None
    class_weight: bool
    fit: dict[str, object]
    validation: bool
    callbacks: tuple[str, ...]
    after: str

    def told(self) -> str:
        """Return the values that are not usual ones, for a line."""
        return " ".join(f"{name}={value}" for name, value in self._asdict().items() if value)


def draw(seed: int) -> Training:
    """Return the training of a seed."""
    random = np.random.default_rng(seed)

    def one(*of: _Item) -> _Item:
        return of[int(random.integers(len(of)))]

    def some(*of: str) -> tuple[str, ...]:
        return tuple(name for name in of if random.integers(3) == 0)

    settings: dict[str, object] = {}
    compiled: dict[str, object] = {}
    if steps := one(None, None, None, 2, 3):
        settings["gradient_accumulation_steps"] = steps
    if clip := one(None, None, "clipnorm", "global_clipnorm", "clipvalue"):
        settings[clip] = 0.05
    if one(*[False] * 4, True):
        settings |= {"use_ema": True, "ema_momentum": 0.9}
    if steps := one(None, None, None, 2, 3):
        compiled["steps_per_execution"] = steps
    if one(*[False] * 7, True):
        compiled["run_eagerly"] = True
    heads, loss = one(1, 1, 1, 2), one("sparse", "categorical", "binary", "mse", "mae", "huber")
    weights = one(None, None, "random", "zeros")
    weighs_classes = one(True, False, False) and heads == 1 and loss == "sparse"
    options: dict[str, object] = {"epochs": one(1, 2, 3), "shuffle": one(True, False)}
    if steps := one(None, None, None, None, 1, 2, 3):
        options["steps_per_epoch"] = steps
    return Training(
        seed,
        rows=one(1, 2, 3, 5, 17, 31, 32, 33, 64, 75, 101),
        kind=one("rows", "rows", "images", "tokens", "steps", "two inputs"),
        norm=one(None, None, "batch", "layer"),
        heads=heads,
        loss=loss,
        metrics=some("accuracy", "mse", "cosine_similarity") if loss != "sparse" else ("accuracy",),
        optimizer=one("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Lion", "Nadam", "Lamb"),
        settings=settings,
        regularized=one(True, False, False, False),
        compile=compiled,
        source=one("arrays", "arrays", "tensors", "fortran", "every second row", "32 bits")
        if one(True, True, False)
        else one("dataset", "shuffled dataset", "PyDataset", "generator"),
        batch_size=one(1, 2, 3, 7, 8, 16, 32, 100),
        weights=weights,
        class_weight=weighs_classes and weights is None,
        fit=options,
        validation=one(True, False),
        callbacks=some("stopping", "plateau", "schedule"),
        after=one("", "", "fit", "load", "evaluate"),
    )


def data_of(training: Training, seed: int, rows: int) -> Data:
    """Return inputs, targets and weights of rows."""
    random = np.random.default_rng(seed)
    shapes = {"rows": (6,), "images": (6, 6, 2), "steps": (5, 3)}
    x: Tree
    if training.kind in shapes:
        x = random.standard_normal((rows, *shapes[training.kind]))
    elif training.kind == "tokens":
        x = random.integers(0, 20, (rows, 7))
    else:
        x = {"a": random.standard_normal((rows, 4)), "b": random.integers(0, 20, (rows, 3))}

    def targets() -> Array:
        if training.loss == "sparse":
            return random.integers(0, CLASSES, rows)
        if training.loss == "categorical":
            return np.eye(CLASSES)[random.integers(0, CLASSES, rows)]
        if training.loss == "binary":
            return random.integers(0, 2, (rows, CLASSES)).astype(float)
        return random.standard_normal((rows, CLASSES))

    def weights() -> Array:
        found = random.random(rows)
        return found + 0.1 if training.weights == "random" else (found > 0.4).astype(float)

    y = tuple(targets() for _ in range(training.heads))
    w = tuple(weights() for _ in y) if training.weights else None
    return x, y if len(y) > 1 else y[0], w if w is None or len(w) > 1 else w[0]


class Items(keras.utils.PyDataset):
    """Batches of a structure of arrays."""

    def __init__(self, data: Tree, size: int):
        super().__init__()
        self._data, self._size = data, size

    def __len__(self) -> int:
        return -(-len(tf.nest.flatten(self._data)[0]) // self._size)

    def __getitem__(self, index: int) -> Tree:
        begin = index * self._size
        return tf.nest.map_structure(lambda leaf: leaf[begin : begin + self._size], self._data)


def given(training: Training) -> dict[str, object]:
    """Return the arguments of `fit` that are about its data, new ones for each `fit`."""

    def converted(leaf: Array | None) -> Tree:
        if leaf is None:
            return None
        if training.source == "tensors":
            return tf.constant(leaf)
        if training.source == "fortran":
            return np.asfortranarray(leaf)
        if training.source == "every second row":
            return np.repeat(leaf, 2, axis=0)[::2]
        if training.source == "32 bits":
            return leaf.astype("float32" if leaf.dtype.kind == "f" else "int32")
        return leaf

    size, options = training.batch_size, dict(training.fit)
    x, y, w = tf.nest.map_structure(converted, data_of(training, training.seed, training.rows))
    data = tuple(part for part in (x, y, w) if part is not None)
    if training.class_weight:
        options["class_weight"] = {number: 0.5 + number for number in range(CLASSES)}
    if training.validation:
        kept = data_of(training, training.seed + 1, training.rows // 2 + 1)
        options["validation_data"] = kept if training.weights else kept[:2]
        options["validation_batch_size"] = 5
    if training.source == "PyDataset":
        return {"x": Items(data, size), **options}
    if training.source == "generator":

        def batches() -> Iterator[Tree]:
            items = Items(data, size)
            while True:
                yield from (items[number] for number in range(len(items)))

        return {"steps_per_epoch": -(-training.rows // size), **options, "x": batches()}
    if "dataset" in training.source:
        dataset = tf.data.Dataset.from_tensor_slices(data)
        if training.source.startswith("shuffled"):
            dataset = dataset.shuffle(50, seed=3)
        dataset = dataset.batch(size)
        return {"x": dataset.repeat() if "steps_per_epoch" in options else dataset, **options}
    return {"x": x, "y": y, "sample_weight": w, "batch_size": size, **options}


def model_of(training: Training) -> keras.Model:
    """Build and compile a model, with the same weights every time."""
    layers, bias = keras.layers, training.norm != "batch"
    keras.utils.set_random_seed(training.seed % 1000)
    penalty = keras.regularizers.L2(1e-3) if training.regularized else None

    def dense(units: int, **options: object) -> keras.layers.Dense:
        return layers.Dense(units, kernel_regularizer=penalty, **options)

    if training.kind == "rows":
        inputs = keras.Input((6,))
        x = dense(8, use_bias=bias)(inputs)
    elif training.kind == "images":
        inputs = keras.Input((6, 6, 2))
        x = layers.Conv2D(4, 3, use_bias=bias, kernel_regularizer=penalty)(inputs)
    elif training.kind == "tokens":
        inputs = keras.Input((7,), dtype="int64")
        x = layers.Embedding(20, 6, mask_zero=training.seed % 2 == 0)(inputs)
        x = layers.MultiHeadAttention(2, 3, use_bias=False)(x, x)
    elif training.kind == "steps":
        inputs = keras.Input((5, 3))
        x = layers.LSTM(5)(inputs)
    else:
        inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((3,), dtype="int64", name="b")}
        rows = layers.Flatten()(layers.Embedding(20, 3)(inputs["b"]))
        x = layers.Concatenate()([dense(5, use_bias=bias)(inputs["a"]), rows])
    if training.norm == "batch":
        x = layers.BatchNormalization(synchronized=True)(x)
    elif training.norm == "layer":
        x = layers.LayerNormalization()(x)
    x = layers.Activation("tanh")(x)
    if len(x.shape) > 2:
        flat = layers.GlobalAveragePooling1D if training.kind == "tokens" else layers.Flatten
        x = flat()(x)
    activation = "sigmoid" if training.loss == "binary" else None
    heads = [dense(CLASSES, activation=activation, name=f"o{i}")(x) for i in range(training.heads)]
    model = keras.Model(inputs, heads if len(heads) > 1 else heads[0])
    losses = {
        "sparse": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "categorical": keras.losses.CategoricalCrossentropy(from_logits=True),
        "binary": "binary_crossentropy",
        "huber": keras.losses.Huber(),
    }
    optimizer = getattr(keras.optimizers, training.optimizer)(0.01, **training.settings)
    for_head = losses.get(training.loss, training.loss), list(training.metrics)
    loss, metrics = for_head if training.heads == 1 else ([each] * 2 for each in for_head)
    model.compile(
        optimizer, loss, metrics=metrics, weighted_metrics=metrics, **training.compile
    )
    return model


def callbacks_of(training: Training) -> list[keras.callbacks.Callback]:
    """Return Keras's callbacks of a training."""
    made = {
        "stopping": lambda: keras.callbacks.EarlyStopping(
            "loss", patience=0, min_delta=0.01, restore_best_weights=True
        ),
        "plateau": lambda: keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1),
        "schedule": lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    }
    return [made[name]() for name in training.callbacks]


def train(
    training: Training,
    strategy: dtk.strategies.AllReduceStrategy | None,
    saved_to: str | None = None,
    stop_at: float = float("inf"),
) -> dict[str, Array] | None:
    """Train on all ranks, or in this process alone; return all that is compared.

    With a folder, a `Checkpoint` saves there; None is returned where the training was stopped.
    """
    scope = contextlib.nullcontext if strategy is None else strategy.scope
    with scope():
        model = model_of(training)
    callbacks = callbacks_of(training)
    if saved_to is not None:
        frequency = [1, 2, 3, "epoch"][training.seed % 4]
        background = training.seed % 3 == 0
        callbacks.append(dtk.callbacks.Checkpoint(saved_to, frequency, background=background))
    keras.utils.set_random_seed(training.seed % 1000)
    try:
        callbacks.append(_Stop(stop_at))
        history = model.fit(**given(training), verbose=0, callbacks=callbacks).history
    except _Stopped:
        return None
    found = {f"history {name}": np.array(values) for name, values in history.items()}
    if training.after == "load":
        rank = 0 if strategy is None else strategy.rank
        path = Path(os.environ[FOLDER], f"{rank}-{strategy is None}.keras")
        model.save(path)
        with scope():
            model = keras.models.load_model(path)
    if training.after in ("load", "fit"):
        again = model.fit(**given(training), verbose=0).history
        found |= {f"second history {name}": np.array(values) for name, values in again.items()}
    if training.after == "evaluate":
        x, y, _ = data_of(training, training.seed + 2, training.rows)
        logs = model.evaluate(x, y, training.batch_size, verbose=0, return_dict=True)
        found |= {f"evaluate {name}": np.array(value) for name, value in logs.items()}
        outputs = tf.nest.flatten(model.predict(x, training.batch_size, verbose=0))
        found |= {f"predict {number}": value for number, value in enumerate(outputs)}
    found |= {f"weight {number}": value.numpy() for number, value in enumerate(model.weights)}
    slots = [v for v in model.optimizer.variables if "accumulator" not in v.name]
    return found | {f"slot {number}": value.numpy() for number, value in enumerate(slots)}


class _Stopped(Exception):
    """A training was stopped on purpose."""


class _Stop(keras.callbacks.Callback):
    """Stops a training after so many calls."""

    def __init__(self, at: float):
        super().__init__()
        self._left = at

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._left -= 1
        if self._left <= 0:
            raise _Stopped


def distance(one: dict[str, Array], other: dict[str, Array]) -> tuple[float, str]:
    """Return how far two results are apart, relative to the largest entry, and where."""
    if one.keys() != other.keys():
        return float("inf"), str(sorted(one.keys() ^ other.keys()))
    found = [(0.0, "nothing")]
    for name, value in one.items():
        if value.shape != other[name].shape:
            found.append((float("inf"), name))
        elif value.size:
            apart = np.abs(value - other[name]).max() / (1e-3 + np.abs(value).max())
            found.append((float("inf") if np.isnan(apart) else float(apart), name))
    return max(found)


def compare(training: Training, strategy: dtk.strategies.AllReduceStrategy, resume: bool) -> str:
    """Train both ways; return what a line says, which begins with "apart" if they differ."""

    def tried(*how: object) -> dict[str, Array] | Exception | None:
        try:
            return train(training, *how)
        except Exception as error:
            return error

    if resume:
        folder = Path(os.environ[FOLDER], str(training.seed))
        whole, again = tried(strategy, str(folder / "whole")), None
        steps = np.random.default_rng(training.seed).integers(1, 30, 3)
        for stop_at in (*steps.tolist(), float("inf")):
            again = tried(strategy, str(folder / "stopped"), stop_at)
            if again is not None:
                break
    else:
        again = tried(strategy)
        with dtk.strategies.undistributed():
            whole = tried(None)
    if isinstance(again, Exception):
        told = f"{type(again).__name__}: {again}".replace("\n", " ")[:300]
        too = isinstance(whole, Exception)
        return f"{'fails in one process, too' if too else 'refused'}: {told}"
    if isinstance(whole, Exception):
        return f"apart: one process fails: {type(whole).__name__}"
    apart, where = distance(again, whole)
    return f"{'apart' if apart > (SAME if resume else NEAR) else 'equal'} {apart:.0e} ({where})"


def rank_main(arguments: argparse.Namespace) -> None:
    """Compare all trainings; rank 0 says how they ended."""
    keras.config.set_floatx("float64")
    strategy = dtk.strategies.AllReduceStrategy(shard_optimizer=arguments.shard_optimizer)
    for seed in range(arguments.first, arguments.first + arguments.count):
        training = draw(seed)
        line = compare(training, strategy, arguments.resume)
        if strategy.rank == 0:
            print(f"{seed}: {line} | {training.told()}", flush=True)


def main() -> int:
    """Run the trainings on ranks of this machine; return 1 if any are apart."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=40, help="how many seeds")
    parser.add_argument("--resume", action="store_true", help="stop, resume, and compare with that")
    parser.add_argument("--shard-optimizer", action="store_true")
    parser.add_argument("-n", "--workers", type=int, default=2)
    parser.add_argument("--communicator", default="auto")
    arguments = parser.parse_args()
    if os.environ.get("DTK_RUN") == "1":
        rank_main(arguments)
        return 0
    command = [sys.executable, "-m", "dtk", "run", "-n", str(arguments.workers)]
    command += ["--communicator", arguments.communicator, *sys.argv]
    apart = 0
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, FOLDER: folder}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None
            for line in job.stdout:
                print(line, end="", flush=True)
                apart += ": apart " in line or ": apart:" in line
    print(f"{apart} of {arguments.count} trainings are apart")
    return int(bool(apart or job.returncode))


if __name__ == "__main__":
    sys.exit(main())
