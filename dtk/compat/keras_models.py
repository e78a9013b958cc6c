"""What dtk needs to know of Keras models, and to set on them, that has no public name."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf

from dtk.compat.replacing import definer, replaced
from dtk.nests import Function, Logs, Nest, Specs

# What `compile` takes for a loss or a metric that Keras knows by name.
_Identifier: TypeAlias = str | dict[str, object]

_Found = TypeVar("_Found")
_Batch = TypeVar("_Batch")
_Logs = TypeVar("_Logs")


def metrics_of(model: keras.Model) -> list[keras.Metric]:
    """Return every metric of a model: those it lists, and others that are attributes of it."""
    listed = [*model.metrics, *model._metrics]
    held = [value for value in vars(model).values() if isinstance(value, keras.metrics.Metric)]
    return list({id(metric): metric for metric in [*listed, *held]}.values())


def takes_own_step(model: keras.Model) -> bool:
    """Return whether a model is trained by the train step that Keras gives it."""
    own = type(model).train_step is keras.Model.train_step
    return own and "train_step" not in vars(model)


def is_from_keras(function: object) -> bool:
    """Return whether a function, class or instance of one is Keras's own, and not a script's."""
    function = inspect.unwrap(function) if callable(function) else function
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0] == "keras"


def _given(identifiers: object, get: Callable[[_Identifier], _Found]) -> Iterator[_Found]:
    """Return what `compile` was given, with names looked up; wrapped functions as they are."""
    for given in keras.tree.flatten(identifiers):
        found = get(given) if isinstance(given, str | dict) else given
        fn = getattr(found, "fn", None) or getattr(found, "_fn", None)
        yield found if fn is None or not is_from_keras(found) else fn


def foreign_losses(model: keras.Model) -> list[keras.Loss | Function[tf.Tensor]]:
    """Return the losses given to `compile` that are not Keras's own."""
    compiled = model._compile_loss
    given = [] if compiled is None else _given(compiled._user_loss, keras.losses.get)
    return [loss for loss in given if loss is not None and not is_from_keras(loss)]


def foreign_metrics(model: keras.Model) -> list[keras.Metric | Function[tf.Tensor]]:
    """Return the metrics of a model that are not Keras's own."""
    compiled = model._compile_metrics
    asked = [] if compiled is None else [compiled._user_metrics, compiled._user_weighted_metrics]
    # "accuracy" and the like are several of Keras's; nothing is looked up by such names.
    given = [m for m in keras.tree.flatten(asked) if m is not None and not isinstance(m, str)]
    held = [metric for metric in metrics_of(model) if metric is not compiled]
    return [m for m in [*_given(given, keras.metrics.get), *held] if not is_from_keras(m)]


def foreign_counters(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics of a model that count by a class or function that is not Keras's own."""
    compiled = model._compile_metrics
    inside = compiled.metrics if compiled is not None and compiled.built else []
    metrics = {id(metric): metric for metric in [*metrics_of(model), *inside]}.values()
    return [m for m in metrics if not is_from_keras(m) or not is_from_keras(getattr(m, "_fn", m))]


def computes_own_loss(model: keras.Model) -> bool:
    """Return whether Keras computes the loss, from `compile` and `add_loss`."""
    return type(model).compute_loss is keras.Model.compute_loss


# Models.


@contextlib.contextmanager
def compiles_through(
    before: Callable[[keras.Model, bool | str | None], bool | str | None],
    after: Callable[[keras.Model], object],
) -> Iterator[None]:
    """Return a context in which functions are called before and after `model.compile`.

    In another such context, the outer's functions are called.
    """
    original = keras.Model.compile
    # Inside a scope of the same strategy nothing changes; TensorFlow refuses one of another.
    if hasattr(original, "_dtk_scope"):
        yield
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile_between(self: keras.Model, *args: object, **kwargs: object) -> None:
        given = signature.bind(self, *args, **kwargs)
        jit_compile = given.arguments.get("jit_compile", "auto")
        if jit_compile == "auto" and given.arguments.get("run_eagerly"):
            jit_compile = False
        given.arguments["jit_compile"] = before(self, jit_compile)
        original(*given.args, **given.kwargs)
        after(self)

    compile_between._dtk_scope = True  # type: ignore[attr-defined]
    # Where Keras compares it with a model's own, to tell whether a script has overridden it.
    with replaced(definer(keras.Model, "compile"), compile=compile_between):
        yield


def owner_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """Return the strategy a model was built under."""
    return model._distribute_strategy


def set_owner(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Make a model belong to a strategy."""
    model._distribute_strategy = strategy


def auto_jit(model: keras.Model) -> bool:
    """Return whether Keras would compile a model by XLA if it belonged to no strategy."""
    owner, model._distribute_strategy = model._distribute_strategy, None
    try:
        return bool(model._resolve_auto_jit_compile())
    finally:
        model._distribute_strategy = owner


def note_auto_jit(model: keras.Model, auto: bool) -> None:
    """Note on a model whether XLA compiles it because that is Keras's choice."""
    model._dtk_auto_jit = auto


def is_auto_jit(model: keras.Model) -> bool:
    """Return whether XLA compiles a model because that is Keras's choice."""
    return getattr(model, "_dtk_auto_jit", False)


def is_first_time(model: keras.Model, what: str) -> bool:
    """Return whether this is asked of a model for the first time."""
    happened = vars(model).get("_dtk_happened", frozenset())
    object.__setattr__(model, "_dtk_happened", happened | {what})
    return what not in happened


def build_through(model: keras.Model, build: Function[None]) -> None:
    """Make Keras call `build(iterator=None, data_batch=None)` before a model's first step."""
    model._maybe_symbolic_build = build


def trainer_of(model: keras.Model, kind: type[_Found]) -> _Found | None:
    """Return what `set_trainer` has left on a model; None if nothing."""
    found = getattr(model, "_dtk_trainer", None)
    return found if isinstance(found, kind) else None


def set_trainer(model: keras.Model, trainer: object) -> None:
    """Leave its trainer on a model."""
    model._dtk_trainer = trainer


def losses_through(model: keras.Model, compute_loss: Function[tf.Tensor | None]) -> None:
    """Make a model compute losses by a function in place of its `compute_loss`."""
    model.compute_loss = compute_loss


def functions_through(
    model: keras.Model,
    train: Function[Callable[[tf.data.Iterator], Nest]],
    test: Function[Callable[[tf.data.Iterator], Nest]],
    predict: Function[Callable[[list[Nest]], Nest]],
) -> None:
    """Make a model get its step functions from elsewhere."""
    model.make_train_function = train
    model.make_test_function = test
    model.make_predict_function = predict


def lacks_state(model: keras.Model) -> bool:
    """Return whether a step would make weights or metrics of layers."""
    metrics = model._compile_metrics
    layers = model._flatten_layers(include_self=False)
    return not all(part.built for part in layers) or not (metrics is None or metrics.built)


def is_built(model: keras.Model) -> bool:
    """Return whether `build_from` would find nothing to build."""
    compiled = (model._compile_metrics, model._compile_loss, model.optimizer)
    return all(part is None or part.built for part in compiled) and all(
        layer.built for layer in model._flatten_layers()
    )


def counted_elsewhere(model: keras.Model) -> list[str]:
    """Return the names of metrics that have counted for another model, where none is built yet."""
    compiled = model._compile_metrics
    if compiled is None or compiled.built:
        return []
    given = keras.tree.flatten([compiled._user_metrics, compiled._user_weighted_metrics])
    metrics = [one for one in given if isinstance(one, keras.metrics.Metric)]
    return [one.name for one in metrics if any(np.any(np.asarray(v)) for v in one.variables)]


def build_from(model: keras.Model, data_batch: Nest | Specs) -> None:
    """Build a model, its metrics and its optimizer from a batch or the specification of one.

    A model that has a train step and no `call` is not built so: its step builds what it uses.
    """
    if type(model).call in (keras.Model.call, keras.layers.Layer.call):
        return
    if takes_own_step(model):
        model._symbolic_build(data_batch=data_batch)
        return
    # Keras calls the model, its loss and its metrics with the parts of a batch. A step of the
    # script's own may call them with anything else, so no error says that the script is wrong; in
    # one process Keras does not even try. If it is wrong, its step raises the error next.
    with contextlib.suppress(Exception):
        model._symbolic_build(data_batch=data_batch)


def make_function(
    model: keras.Model, step: Callable[[_Batch], _Logs]
) -> Callable[[tf.data.Iterator], _Logs]:
    """Make Keras's loop over the batches of an iterator, around one step."""
    jit_compile, model.jit_compile = model.jit_compile, False
    try:
        return model._make_function(step)
    finally:
        model.jit_compile = jit_compile


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """Return every layer of a model, also those inside others."""
    return list(model._flatten_layers())


def tables_of(model: keras.Model) -> list[tf.Variable]:
    """Return the variables of embedding layers, of which a step needs a few rows only."""
    return [
        layer._embeddings
        for layer in layers_of(model)
        if type(layer).call is keras.layers.Embedding.call and layer.built
    ]


def initial_epoch(model: keras.Model) -> int | None:
    """Return the epoch that a callback wants `fit` to start from."""
    return model._initial_epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Make `fit` start from an epoch."""
    model._initial_epoch = epoch


def answer_once(model: keras.Model, logs: Logs) -> None:
    """Make `fit` take these logs for the epoch that ends next."""

    def logs_of_then(latest: Logs | None) -> Logs:
        del latest, model._get_metrics_result_or_logs
        return logs

    model._get_metrics_result_or_logs = logs_of_then
