"""Keras models: what dtk reads and sets of them, and what it patches.

for good         keras.Model.fit and its like               patch_calls
                 functions that write a model to a path     patch_saving
                 makedirs and rmtree of Keras's callbacks   patch_folders
inside a scope   keras.Model.compile                        patch_compile
of one model     methods, by a class made for it            made_classes
                 _maybe_symbolic_build                      AdoptedModel
                 _get_metrics_result_or_logs, once          set_next_epoch_logs
of a callback    ModelCheckpoint._save_model, during `fit`  saving_nothing
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from keras.src.utils import file_utils
from tensorflow.python.checkpoint.checkpoint import TrackableSaver
from tensorflow.python.eager import context as eager_context

from dtk.errors import DtkError
from dtk.nests import Args, Function, Kwargs, Logs, Specs, Tree
from dtk.patches import definer, patch, patch_for_good, temporarily

# What models, losses and metrics raise when a part of a batch is not what they take.
_MISFITS = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    tf.errors.InvalidArgumentError,
)

# Keras's losses that are not means over rows: made of sums over all rows, or of pairs of rows.
_OF_ALL_ROWS = (keras.losses.dice, keras.losses.tversky)
_OF_PAIRS = (keras.losses.circle,)
# Operations of functional models that compute each element from elements of the same row.
_BY_ELEMENT = {
    *("Absolute", "Add", "Cast", "Divide", "Exp", "Gelu", "Multiply", "Negative", "Power", "Relu"),
    *("Sigmoid", "Silu", "Softplus", "Sqrt", "Square", "Subtract", "Tanh", "TrueDivide"),
}

# Notes what `run_eagerly` allows in one process only, such as NumPy in a metric.
_IN_PYTHON = (
    "dtk: models, losses and metrics are traced once under run_eagerly=True, too, and what they "
    "count is summed over workers: let them use keras.ops, and variables made by add_weight, or "
    "compute the metric from model.predict(x), such as in on_epoch_end of a callback"
)

_Found = TypeVar("_Found")
_Batch = TypeVar("_Batch")
_Logs = TypeVar("_Logs")


def metrics_of(model: keras.Model) -> list[keras.Metric]:
    """Return every metric of a model: in its lists, and in its attributes."""
    listed = [*model.metrics, *model._metrics]
    held = [value for value in vars(model).values() if isinstance(value, keras.metrics.Metric)]
    return list({id(metric): metric for metric in [*listed, *held]}.values())


def metrics_with_results_of(model: keras.Model) -> list[keras.Metric]:
    """Return every metric but those given to `compile` that no step has updated."""
    given = model._compile_metrics
    return [m for m in metrics_of(model) if m is not given or given.built]


def takes_own_step(model: keras.Model) -> bool:
    """Return whether a model trains with Keras's own train step."""
    own = type(model).train_step is keras.Model.train_step
    return own and "train_step" not in vars(model)


def is_from_keras(function: object) -> bool:
    """Return whether a function, class or instance is Keras's own, not a script's."""
    function = inspect.unwrap(function) if callable(function) else function
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0] == "keras"


def unwrapped(wrapper: _Found) -> _Found:
    """Return the function that Keras has wrapped in a loss or metric."""
    # A script's own class may call anything so, such as its count of false negatives.
    wrapped = [getattr(wrapper, name, None) for name in ("fn", "_fn") if is_from_keras(wrapper)]
    return next((function for function in wrapped if function is not None), wrapper)


def foreign_losses(model: keras.Model) -> list[keras.Loss | Function[tf.Tensor]]:
    """Return the losses given to `compile` that are not Keras's own, or not means over rows."""
    return [unwrapped(loss) for loss in _losses_of(model) if is_foreign_loss(loss)]


def _losses_of(model: keras.Model) -> list[keras.Loss | Function[tf.Tensor]]:
    compiled = model._compile_loss
    given = [] if compiled is None else keras.tree.flatten(compiled._user_loss)
    looked_up = [keras.losses.get(one) if isinstance(one, str | dict) else one for one in given]
    return [loss for loss in looked_up if loss is not None]


def losses_are_means(model: keras.Model) -> bool:
    """Return whether Keras's own losses of a model divide by the number of all rows."""
    return all(
        getattr(loss, "reduction", "mean") in ("mean", "sum_over_batch_size")
        and getattr(loss, "ignore_class", None) is None
        for loss in _losses_of(model)
    )


def is_foreign_loss(loss: keras.Loss | Function[tf.Tensor]) -> bool:
    """Return whether a loss is not Keras's own, or not a mean over rows."""
    function = unwrapped(loss)
    return not is_from_keras(function) or function in _OF_ALL_ROWS or compares_rows(loss)


def compares_rows(loss: keras.Loss | Function[tf.Tensor]) -> bool:
    """Return whether a loss is Keras's own, and computes along the batch."""
    return unwrapped(loss) in _OF_PAIRS or is_along_batch(loss)


def is_along_batch(part: object) -> bool:
    """Return whether a layer, loss or metric of Keras's is told to compute along the batch."""
    layer = part if isinstance(part, keras.Layer) else None
    settings = getattr(part, "_fn_kwargs", {}) if layer is None else _settings_of(layer)
    named = [value for key, value in settings.items() if key.endswith(("axis", "axes"))]
    axes = [axis for value in named for axis in keras.tree.flatten(value)]
    # Outputs of losses and metrics nearly always have two axes.
    return 0 in axes or layer is None and -2 in axes


def _settings_of(layer: keras.Layer) -> Mapping[str, object]:
    """Return a layer's configuration; none of a model, or of a wrapper of what has none."""
    if isinstance(layer, keras.Model):
        return {}
    with contextlib.suppress(Exception):  # a script's own layer raises whatever it raises
        config: Mapping[str, object] = layer.get_config()
        return config
    return {}


def foreign_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics of a built model that are not Keras's own, or are along the batch."""
    compiled = model._compile_metrics
    inside = compiled.metrics if compiled is not None and compiled.built else []
    metrics = {id(metric): metric for metric in [*metrics_of(model), *inside]}.values()
    return [m for m in metrics if not is_from_keras(unwrapped(m)) or is_along_batch(m)]


def foreign_state(model: keras.Model) -> list[keras.Variable]:
    """Return the state of layers that are neither Keras's nor dtk's own, such as averages."""
    # An inner layer comes after those that it is in.
    layers = {id(v): layer for layer in layers_of(model) for v in layer.non_trainable_weights}
    modules = {key: type(layer).__module__.partition(".")[0] for key, layer in layers.items()}
    return [v for v in model.non_trainable_weights if modules[id(v)] not in ("keras", "dtk")]


def computes_own_loss(model: keras.Model) -> bool:
    """Return whether Keras computes the loss, from `compile` and `add_loss`."""
    return model.__class__.compute_loss is keras.Model.compute_loss


def is_all_keras(model: keras.Model) -> bool:
    """Return whether a model's steps and losses are Keras's own."""
    steps = type(model).train_step, type(model).test_step
    return computes_own_loss(model) and all(map(is_from_keras, steps)) and not foreign_losses(model)


# Patches.

# Called as `handle(model, name, method, args, kwargs)`.
Handler: TypeAlias = Callable[[keras.Model, str, Function[object], Args, Kwargs], object]
# Called as `write(model, path, save, how)`.
Write: TypeAlias = Callable[[keras.Model, object, Callable[[object], object], str], object]
_CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_SAVES = (
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
    (keras.Model, "export"),
)
_ADDRESS = re.compile(" at 0x[0-9a-f]+")


def handler() -> Handler | None:
    """Return the handler that `patch_calls` has set; None before."""
    return getattr(keras.Model.fit, "_dtk_handler", None)


def patch_calls(handle: Handler) -> None:
    """Make every call of `fit` and its like, of any model, as `handle(...)` from now on.

    A model's own override runs as before; Keras's methods that it calls go through here.
    """

    def call(
        name: str,
        model: keras.Model,
        *args: object,
        original: Function[object],
        **kwargs: object,
    ) -> object:
        return handle(model, name, functools.partial(original, model), args, kwargs)

    for name in _CALLS:
        patch_for_good(definer(keras.Model, name), name, functools.partial(call, name))
    keras.Model.fit._dtk_handler = handle


def patch_saving(
    write: Write, write_checkpoint: Callable[[str, Callable[[str], object]], object]
) -> None:
    """Let `write` save every model or its weights, and the other checkpoints, from now on.

    These are of `tf.train.Checkpoint` and of what uses it.
    """

    def save(
        model: keras.Model,
        filepath: object,
        *args: object,
        original: Function[object],
        **kwargs: object,
    ) -> object:
        how = _ADDRESS.sub("", f"{original.__name__} {args} {kwargs}")
        return write(model, filepath, lambda path: original(model, path, *args, **kwargs), how)

    def save_checkpoint(
        saver: TrackableSaver,
        file_prefix: object,
        checkpoint_number: object = None,
        *args: object,
        original: Function[object],
        **kwargs: object,
    ) -> object:
        if not isinstance(file_prefix, str | os.PathLike) or checkpoint_number is not None:
            return original(saver, file_prefix, checkpoint_number, *args, **kwargs)
        return write_checkpoint(
            os.fspath(file_prefix), lambda prefix: original(saver, prefix, None, *args, **kwargs)
        )

    for owner, name in _SAVES:
        patch_for_good(owner, name, save)
    patch_for_good(TrackableSaver, "save", save_checkpoint)


def patch_folders(make: Function[None], remove: Function[None]) -> None:
    """Let these make and remove folders of Keras's callbacks, from now on.

    They are called as `make(path, original=...)` and `remove(path, original=...)`.
    """
    patch_for_good(file_utils, "makedirs", make)
    patch_for_good(file_utils, "rmtree", remove)


@contextlib.contextmanager
def saving_nothing(callbacks: Iterable[keras.callbacks.Callback]) -> Iterator[None]:
    """Return a context in which Keras's own ModelCheckpoints only learn their best value."""
    with contextlib.ExitStack() as patched:
        for callback in callbacks:
            if type(callback) is keras.callbacks.ModelCheckpoint:
                learn = functools.partial(_learn_best, callback)
                patched.enter_context(patch(callback, _save_model=learn))
        yield


def _learn_best(
    callback: keras.callbacks.ModelCheckpoint, epoch: int, batch: int | None, logs: Logs | None
) -> None:
    if callback.monitor in (logs or {}):
        callback._should_save_model(epoch, batch, logs, callback.filepath)


@contextlib.contextmanager
def patch_compile(
    before: Callable[[keras.Model, bool | str | None], bool | str | None],
    after: Callable[[keras.Model], object],
) -> Iterator[None]:
    """Return a context in which `before` and `after` are called around `model.compile`.

    In nested contexts, the functions of the outer one are called.
    """
    original = keras.Model.compile
    # A nested scope is the same strategy's: TensorFlow refuses any other.
    if hasattr(original, "_dtk_scope"):
        yield
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile_between(self: keras.Model, *args: object, **kwargs: object) -> None:
        bound = signature.bind(self, *args, **kwargs)
        jit_compile = bound.arguments.get("jit_compile", "auto")
        if jit_compile == "auto" and bound.arguments.get("run_eagerly"):
            jit_compile = False
        bound.arguments["jit_compile"] = before(self, jit_compile)
        original(*bound.args, **bound.kwargs)
        after(self)

    compile_between._dtk_scope = True  # type: ignore[attr-defined]
    # Replace it in the defining class: Keras looks there to see if a model overrides `compile`.
    with patch(definer(keras.Model, "compile"), compile=compile_between):
        yield


# Models.


def owner_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """Return the strategy a model was built under; Keras also saves what is no model."""
    return getattr(model, "_distribute_strategy", None)


def set_owner(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Make a model belong to a strategy."""
    model._distribute_strategy = strategy


def auto_jit(model: keras.Model) -> bool:
    """Return whether Keras would compile a model with XLA if no strategy owned it."""
    with temporarily(model, _distribute_strategy=None):
        return bool(model._resolve_auto_jit_compile())


def note_auto_jit(model: keras.Model, auto: bool) -> None:
    """Note on a model whether XLA compiles it by Keras's choice."""
    model._dtk_auto_jit = auto


def is_auto_jit(model: keras.Model) -> bool:
    """Return whether XLA compiles a model by Keras's choice."""
    return getattr(model, "_dtk_auto_jit", False)


class AdoptedModel(TensorFlowTrainer):
    """A model of which a strategy replaces methods; see `made_classes`.

    No `keras.Model`, as layers with Keras's trainer are none: Keras's own tests train such.
    """

    def _dtk_begin(self, iterator: Iterator[Tree] | None, data_batch: Tree) -> None:
        """Take the iterator of an epoch, or a single batch, and build the model by it."""
        raise NotImplementedError

    def _maybe_symbolic_build(
        self, iterator: Iterator[Tree] | None = None, data_batch: Tree = None
    ) -> None:
        # Keras calls this first with the iterator, and would build the model for one replica.
        self._dtk_begin(iterator, data_batch)


def lacks_state(model: keras.Model) -> bool:
    """Return whether a step would build layers or metrics."""
    metrics = model._compile_metrics
    return lacks_layers(model) or not (metrics is None or metrics.built)


def lacks_layers(model: keras.Model) -> bool:
    """Return whether a step would build layers."""
    return not all(layer.built for layer in model._flatten_layers(include_self=False))


def is_built(model: keras.Model) -> bool:
    """Return whether `build_from` has nothing to build."""
    compiled = (model._compile_metrics, model._compile_loss, model.optimizer)
    return all(part is None or part.built for part in compiled) and all(
        layer.built for layer in model._flatten_layers()
    )


def counted_elsewhere(model: keras.Model) -> list[str]:
    """Return the names of metrics that have counted for another model, before they are built."""
    compiled = model._compile_metrics
    if compiled is None or compiled.built:
        return []
    flat = keras.tree.flatten([compiled._user_metrics, compiled._user_weighted_metrics])
    metrics = [one for one in flat if isinstance(one, keras.metrics.Metric)]
    return [one.name for one in metrics if any(np.any(np.asarray(v)) for v in one.variables)]


def build_from(model: keras.Model, data_batch: Tree | Specs) -> None:
    """Build a model, its metrics and its optimizer from a batch or its specification.

    A model with a train step and without `call` is left out: its step builds what it uses.
    """
    if type(model).call in (keras.Model.call, keras.layers.Layer.call):
        return
    # In one process Keras's first step builds the model, and numbers the draws of initializers such
    # as `tf.random.normal` in that step's graph, from 0. Here they are made outside of graphs.
    numbers = itertools.count()
    # Keras's first step makes no call for it, which a layer that is built may count.
    kept = numbers_kept(model) if model.built else contextlib.nullcontext()
    with kept, patch(eager_context, internal_operation_seed=lambda: next(numbers)):
        _build(model, data_batch)


def _build(model: keras.Model, data_batch: Tree | Specs) -> None:
    if takes_own_step(model):
        try:
            model._symbolic_build(data_batch=data_batch)
        except (AttributeError, NotImplementedError) as error:
            if model.run_eagerly:
                error.add_note(_IN_PYTHON)
            raise
        return
    # Keras calls the model, its loss and its metrics with the parts of a batch. A script's own step
    # may call them with anything else: then they may not fit, and the step builds what it uses.
    try:
        model._symbolic_build(data_batch=data_batch)
    except _MISFITS as error:
        # Keras turns an error of the model into a RuntimeError.
        cause = error.__context__ if isinstance(error, RuntimeError) else None
        if not isinstance(cause or error, _MISFITS) or isinstance(cause or error, DtkError):
            raise


def make_function(
    model: keras.Model, step: Callable[[_Batch], _Logs]
) -> Callable[[tf.data.Iterator], _Logs]:
    """Make Keras's loop that calls a step for each batch of an iterator."""
    with temporarily(model, jit_compile=False):
        return model._make_function(step)


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """Return every layer of a model, nested layers included."""
    return list(model._flatten_layers())


@contextlib.contextmanager
def numbers_kept(model: keras.Model) -> Iterator[None]:
    """Return a context after which layers' numbers, and lists of numbers, are as before.

    A step of the script's that runs eagerly may count its calls in them. A layer that is not built
    may take its sizes from its first rows.
    """
    owners = [one for one in layers_of(model) if one.built or one is model]
    before = [(one.built, dict(vars(one)), _numbers_in(one)) for one in owners]
    yield
    for one, (was_built, held, numbers) in zip(owners, before, strict=True):
        for name, value in _numbers_in(one).items():
            if name in numbers:
                if isinstance(value, list) and isinstance(numbers[name], list):
                    getattr(one, name)[:] = numbers[name]
                else:
                    setattr(one, name, numbers[name])
            elif was_built and name in held:
                if held[name] is not vars(one)[name]:
                    setattr(one, name, held[name])
            elif was_built or hasattr(type(one), name):  # `getattr(self, "calls", 0)` is 0 again
                delattr(one, name)


def _numbers_in(layer: keras.Layer) -> dict[str, int | float | list[int | float]]:
    found: dict[str, int | float | list[int | float]] = {}
    for name, value in vars(layer).items():
        numbers = [*value] if isinstance(value, list) else [value]
        if all(type(one) in (int, float) for one in numbers):
            found[name] = numbers if isinstance(value, list) else value
    return found


def combining_operations(model: keras.Model) -> list[str]:
    """Return the names of a functional model's operations that may combine rows, as `mean` may."""
    operations = [o for one in model._flatten_layers() for o in getattr(one, "operations", ())]
    names = {type(one).__name__ for one in operations if not isinstance(one, keras.Layer)}
    return sorted(names - _BY_ELEMENT)


def tables_of(model: keras.Model) -> list[tf.Variable]:
    """Return the tables of embedding layers of which a step needs only a few rows."""
    return [
        layer._embeddings
        for layer in layers_of(model)
        if type(layer).call is keras.layers.Embedding.call and layer.built
        if layer._embeddings.regularizer is None  # which reads all rows
    ]


def initial_epoch(model: keras.Model) -> int | None:
    """Return the epoch that a callback wants `fit` to start from."""
    return model._initial_epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Make `fit` start from an epoch."""
    model._initial_epoch = epoch


def set_next_epoch_logs(model: keras.Model, logs: Logs | None = None) -> None:
    """Make `fit` use these logs for the next epoch that ends.

    None: what the metrics hold, if the epoch ran no step.
    """

    def logs_of_then(latest: Logs | None) -> Logs:
        del model._get_metrics_result_or_logs
        if logs is not None:
            return logs
        return model._get_metrics_result_or_logs(latest or model.get_metrics_result())

    model._get_metrics_result_or_logs = logs_of_then
