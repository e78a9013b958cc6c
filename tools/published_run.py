"""Runs a published script, without dtk or as one of its ranks, and writes down what it came to.

    python tools/published_run.py SCRIPT FOLDER [--dtk] [--double] [--nudge]

The script is one that `published_port.py` has made. In both runs: one seed, dropout rates of 0,
data made by `published_data.py`, and random numbers inside steps that belong to rows and to the
step's number, since ranks draw others than one process would. With --dtk, BatchNormalization is
synchronized. With --double all is computed in float64. With --nudge the first weights are 1e-7
(in float64 1e-15) apart, which shows what the script's network makes of rounding.

The list of TensorFlow's random functions is not shared with `dtk/compat/random_draws.py`: this tool
judges dtk, and would miss whatever a shared list forgot.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("MPLBACKEND", "Agg")

records: list[tuple[str, np.ndarray]] = []
models: list[Any] = []


def seen(value: Any) -> Any:
    """Write down what a model answered, and return it."""
    import keras

    if isinstance(value, keras.callbacks.History):
        remember(value.model)
        for name, numbers in sorted(value.history.items()):
            tell(f"history/{name}", numbers)
    else:
        for place, part in enumerate(keras.tree.flatten(value)):
            if np.asarray(part).dtype.kind in "fiub":
                tell(f"answer/{place}", part)
    return value


def tell(kind: str, value: Any) -> None:
    """Write down an array, under a name of its own."""
    records.append((f"{len(records):03}/{kind}", np.asarray(value, "float64")))


def remember(model: Any) -> None:
    """Keep a model, to write down its weights in the end."""
    if not any(model is other for other in models):
        models.append(model)


def few(epochs: int, most: int) -> int:
    """Return how many epochs are trained of those that the script asks for."""
    return min(epochs, most)


def weights(names: dict[str, Any]) -> None:
    """Write down the weights of all models that were trained or have a name of their own."""
    import keras

    for name in sorted(names):
        if isinstance(names[name], keras.Model):
            remember(names[name])
    for number, model in enumerate(models):
        for place, variable in enumerate(model.weights):
            if variable.dtype.startswith("float"):
                tell(f"weights/{number}/{place} {variable.name}", variable.numpy())


def updates() -> int:
    """Return how many updates all optimizers have made."""
    import gc

    import keras

    return sum(
        int(o.iterations.numpy())
        for o in gc.get_objects()
        if isinstance(o, keras.optimizers.Optimizer)
    )


def set_seeds() -> None:
    """Seed everything."""
    import keras

    keras.utils.set_random_seed(1)


def without_dropout() -> None:
    """Let dropout drop nothing, whatever the rate."""
    from keras.src import backend

    backend.random.dropout = lambda inputs, *args, **kwargs: inputs


def with_synchronized_norm() -> None:
    """Let batch normalization be that of the global batch, which a user of dtk writes."""
    from keras import layers

    first = layers.BatchNormalization.build

    def build(self, input_shape):
        self.synchronized = True
        first(self, input_shape)

    layers.BatchNormalization.build = functools.wraps(first)(build)


def with_double_top_k() -> None:
    """Let accuracy among the best k be computed in float64, too, which TensorFlow does not."""
    import tensorflow as tf

    first = tf.math.in_top_k

    def in_top_k(targets: Any, predictions: Any, k: Any, name: Any = None) -> Any:
        return first(targets, tf.cast(predictions, tf.float32), k, name)

    tf.math.in_top_k = tf.nn.in_top_k = in_top_k


def with_single_images() -> None:
    """Let random layers that a script makes in float32 compute so, in which Keras has parts."""
    import keras
    from keras.src.layers.preprocessing.image_preprocessing import base_image_preprocessing_layer

    layer = base_image_preprocessing_layer.BaseImagePreprocessingLayer
    first = layer.call

    @functools.wraps(first)
    def call(self, data: Any, training: bool = True) -> Any:
        before = keras.config.floatx()
        keras.config.set_floatx(self.compute_dtype)
        try:
            return first(self, data, training=training)
        finally:
            keras.config.set_floatx(before)

    layer.call = call


def nudged(double: bool) -> None:
    """Let weights that are drawn begin 1e-7 apart, in float64 1e-15."""
    generator = np.random.default_rng(1)
    apart, dtype = (1e-15, "float64") if double else (1e-7, "float32")

    def moved(first: Any, *args: Any) -> Any:
        value = first(*args)
        return value * (1 + apart * generator.normal(size=value.shape)).astype(dtype)

    around_initializers(moved)


def around_initializers(call: Any) -> None:
    """Let `call` answer for each initializer that draws; it is given Keras's own and arguments."""
    from keras.src.initializers import random_initializers

    for cls in vars(random_initializers).values():
        if isinstance(cls, type) and "__call__" in vars(cls):
            cls.__call__ = _answered(cls.__call__, call)


def _answered(first: Any, call: Any) -> Any:
    @functools.wraps(first)
    def answer(self: Any, shape: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return call(functools.partial(first, self), shape, dtype)

    return answer


class Draws:
    """Random numbers inside steps, a function of the row, the draw and the step's number.

    A draw of k numbers for each of the B rows is taken for k blocks of B, as in a batch of fakes
    before reals.
    """

    def __init__(self) -> None:
        import keras
        import tensorflow as tf

        self.traced = 0
        self.steps = tf.Variable(0, trainable=False, dtype=tf.int32)
        self.count = 0
        # Of the step that is traced: rows here, the first one's number, rows of the batch.
        self.rows: Any = None
        self.seed: Any = None
        for module, name, draw in drawing():
            setattr(module, name, self._by_rows(getattr(module, name), draw))
        around_initializers(self._outside)
        # An initializer may also be a function, such as `tf.random.normal`.
        first = keras.Layer.add_weight
        keras.Layer.add_weight = lambda *args, **kwargs: self._outside(first, *args, **kwargs)

    def _outside(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        """Draw weights as Keras does, also those of a layer that the first step builds."""
        before, self.rows = self.rows, None
        try:
            return first(*args, **kwargs)
        finally:
            self.rows = before

    def tracing(self, step: Any, rows: Any, first: Any, of: Any) -> Any:
        """Trace a step of so many rows, which are in the batch from a number on."""
        import tensorflow as tf

        before = self.rows
        self.traced += 1
        self.rows = [tf.cast(number, tf.int32) for number in (rows, first, of)]
        self.count = 0
        self.seed = tf.convert_to_tensor(self.steps.assign_add(1))
        try:
            return step()
        finally:
            self.rows = before

    def _by_rows(self, original: Any, draw: Any) -> Any:
        import inspect

        import tensorflow as tf

        signature = inspect.signature(original)

        @functools.wraps(original)
        def drawn(*args: Any, **kwargs: Any) -> Any:
            deferred = tf.executing_eagerly() and tf.is_symbolic_tensor(self.seed)
            if self.rows is None or deferred:  # outside of steps, or where one builds a layer
                return original(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            arguments = given.arguments
            known = {name: arguments[name] for name in ("minval", "maxval") if name in arguments}
            if "dtype" in arguments and not known:
                known = {"dtype": arguments["dtype"]}
            self.count += 1
            shape = tf.cast(tf.convert_to_tensor(arguments["shape"]), tf.int32)
            seed = tf.stack([self.count, self.seed])
            static = tf.get_static_value(shape, partial=True)
            if shape.shape[0] == 0 or (static is not None and static[0] is not None):
                return draw(shape=shape, seed=seed, **known)
            rows, first, of = self.rows
            blocks = tf.where(shape[0] % rows == 0, shape[0] // rows, 0)
            all_rows = tf.where(blocks > 0, blocks * of, shape[0])
            found = draw(shape=tf.concat([[all_rows], shape[1:]], 0), seed=seed, **known)
            mine = tf.reshape(tf.range(blocks)[:, None] * of + first + tf.range(rows)[None], [-1])
            taken = tf.gather(found, tf.cond(blocks > 0, lambda: mine, lambda: tf.range(shape[0])))
            return tf.ensure_shape(
                taken,
                [None, *(static[1:] if static is not None else [None] * (shape.shape[0] - 1))],
            )

        return drawn

    def plain(self) -> None:
        """Let Keras's own steps draw so."""
        from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

        from dtk.input import slicing

        first = TensorFlowTrainer._make_function

        def make(trainer: Any, step_function: Any) -> Any:
            if step_function.__name__ == "predict_step":
                return first(trainer, step_function)

            @functools.wraps(step_function)
            def step(data: Any) -> Any:
                rows = slicing.count_rows(data)
                return self.tracing(lambda: step_function(data), rows, 0, rows)

            return first(trainer, step)

        TensorFlowTrainer._make_function = make

    def of_ranks(self) -> None:
        """Let dtk's steps draw so."""
        import tensorflow as tf

        from dtk.even_division import even_bounds
        from dtk.trainer.replica import replica_step

        first = replica_step.run_step

        def run_step(step_function: Any, batch: Any, model: Any, strategy: Any, *args: Any) -> Any:
            index = strategy.local_index()
            rank, size = strategy.local_ranks()[index], strategy.num_replicas_in_sync
            begin = tf.minimum(even_bounds(batch.rows, rank, size)[0], batch.rows - 1)
            rows = tf.maximum(batch.counts[index], 1)

            def step() -> Any:
                return first(step_function, batch, model, strategy, *args)

            return self.tracing(step, rows, begin, batch.rows)

        replica_step.run_step = run_step
        first_run = tf.distribute.Strategy.run

        def run(strategy: Any, *args: Any, **kwargs: Any) -> Any:
            self.traced += 1  # a step of the script's own loop
            return first_run(strategy, *args, **kwargs)

        tf.distribute.Strategy.run = run


def drawing() -> list[tuple[Any, str, Any]]:
    """Return TensorFlow's functions that draw, by module and name, and what stands for each."""
    from tensorflow.python.ops import (
        gen_random_ops,
        gen_stateful_random_ops,
        gen_stateless_random_ops,
        gen_stateless_random_ops_v2,
    )

    own = gen_stateless_random_ops
    normal, truncated, uniform, integer = (
        own.stateless_random_normal,
        own.stateless_truncated_normal,
        own.stateless_random_uniform,
        own.stateless_random_uniform_int,
    )
    return [
        (gen_random_ops, "random_standard_normal", normal),
        (gen_stateless_random_ops_v2, "stateless_random_normal_v2", normal),
        (gen_stateful_random_ops, "stateful_standard_normal_v2", normal),
        (gen_random_ops, "truncated_normal", truncated),
        (gen_stateless_random_ops_v2, "stateless_truncated_normal_v2", truncated),
        (gen_random_ops, "random_uniform", uniform),
        (gen_stateless_random_ops_v2, "stateless_random_uniform_v2", uniform),
        (gen_stateful_random_ops, "stateful_uniform", uniform),
        (gen_random_ops, "random_uniform_int", integer),
        (gen_stateless_random_ops_v2, "stateless_random_uniform_int_v2", integer),
    ]


def rank_here() -> int:
    """Return which rank this process is, however `dtk run` has started it."""
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    by_config = config.get("task", {}).get("index", 0)
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMIX_RANK", by_config)))


def main() -> None:
    """Run the script and write `rank-N.npz`, and `rank-N.json` with how it ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("script", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtk", action="store_true")
    parser.add_argument("--nudge", action="store_true")
    parser.add_argument("--double", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    rank = rank_here() if options.dtk else 0

    import published_data

    published_data.install(json.loads((options.folder / "data.json").read_text()))
    if options.double:
        import keras

        keras.config.set_floatx("float64")
        with_double_top_k()
        with_single_images()
    set_seeds()
    without_dropout()
    draws = Draws()
    if options.nudge:
        nudged(options.double)
    if options.dtk:
        with_synchronized_norm()
        draws.of_ranks()
    else:
        draws.plain()
    told: dict[str, Any] = {"kind": "", "text": "", "file": ""}
    out = options.folder / f"rank-{rank}"
    names: dict[str, Any] = {
        "__name__": "__main__",
        "__file__": str(options.script),
        "_seen": seen,
        "_few": few,
    }
    sys.argv = [str(options.script)]
    sys.modules["__main__"].__dict__.update(names)
    names = sys.modules["__main__"].__dict__
    try:
        exec(compile(options.script.read_text(), str(options.script), "exec"), names)
        weights(names)
    except BaseException as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        file = traceback.extract_tb(error.__traceback__)[-1][0]
        told = {"kind": type(error).__name__, "text": text, "file": file}
        raise
    finally:
        told |= {"updates": updates(), "steps": draws.traced}
        told["seconds"] = time.process_time()
        Path(f"{out}.json").write_text(json.dumps(told))
        np.savez(f"{out}.npz", **dict(records))


if __name__ == "__main__":
    # From a module of its own: scripts run in this one's names, and may take `time` for another.
    import published_run

    random.seed(1)
    published_run.main()
