"""The seam with Keras: the only file that touches its private names.

It gives each of them a public name and decides nothing: what is done with them is in `tracing`,
`optimizing`, `steps`, `apart`, `feeding` and `adoption`. A new release of Keras is a change to this
file. Hooks last as long as the context that set them, or are set on one object only; nothing of
Keras stays patched.

Private names used, each with a test in tests/strategies/test_private_names.py or, if `fit` reads
its data by them, in tests/callbacks/test_keras_seam.py:

    keras.src.losses.loss            scale_loss_for_distribution, unscale_loss_for_distribution,
                                     reduce_weighted_values, apply_mask
    keras.src.backend.common.variables   Variable.assign (observed while a step is traced)
    keras.src.backend.tensorflow.numpy   take (replaced while a worker's step is traced)
    keras.src.backend.tensorflow.nn      _compute_moments_sync (replaced while a step is traced)
    keras.src.trainers.trainer       Trainer.compile (hooked while inside a scope)
    keras.src.trainers.data_adapters     ArrayDataAdapter (._inputs, ._shuffle), TFDatasetAdapter
    keras.src.backend.tensorflow.trainer    TensorFlowTrainer.train_step (compared with a model's)
    Model       _distribute_strategy, _make_function, _maybe_symbolic_build, _symbolic_build,
                _initial_epoch, _compile_loss, _compile_metrics, _flatten_layers, _metrics,
                _get_metrics_result_or_logs
    CompileLoss, CompileMetrics     _user_loss, _user_metrics, _user_weighted_metrics
    MeanMetricWrapper   _fn
    Optimizer   _distribution_strategy, _all_reduce_sum_gradients, _clip_gradients,
                _accumulated_gradients, _learning_rate,
                _trainable_variables_indices, _trainable_variables, _var_key,
                _var_to_optimizer_idx (of a MultiOptimizer)
    Muon        _should_use_adamw
    Variable    _value, _path, _initialize, _initialize_with_initializer
    Embedding   _embeddings
    TFEpochIterator   _distributed_dataset, _num_batches, _current_iterator, _steps_seen,
                _get_iterator, _enumerate_iterator, _interrupted_warning
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.variables import Variable as KerasVariable
from keras.src.backend.tensorflow import nn as keras_nn
from keras.src.backend.tensorflow import numpy as keras_numpy
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import loss as keras_losses
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter as TFDatasetAdapter
from keras.src.trainers.trainer import Trainer

from dtk.strategies import extended


@contextlib.contextmanager
def _replaced(owner: Any, **replacements: Any) -> Iterator[None]:
    """While inside, attributes of a module or class are others."""
    before = {name: getattr(owner, name) for name in replacements}
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(owner, name, original)


# While a step is traced.


def losses_through(scale: Callable, unscale: Callable, weigh: Callable) -> Any:
    """A context in which Keras's losses call these functions instead of its own.

    Each gets what Keras's own gets, and that one as the keyword `original`.

    Args:
        scale: Makes of a replica's loss its part of the global loss.
        unscale: Makes of that part the replica's loss again, for trackers.
        weigh: Weighs and reduces the losses of rows.
    """
    return _replaced(
        keras_losses,
        scale_loss_for_distribution=functools.partial(
            scale, original=keras_losses.scale_loss_for_distribution
        ),
        unscale_loss_for_distribution=functools.partial(
            unscale, original=keras_losses.unscale_loss_for_distribution
        ),
        reduce_weighted_values=functools.partial(
            weigh, original=keras_losses.reduce_weighted_values
        ),
    )


def masked_weight(sample_weight: Any, mask: Any, dtype: Any, reduction: str) -> Any:
    """The weight that Keras gives each row or element under a mask."""
    return keras_losses.apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)


def assigns_through(observe: Callable[[Any], None]) -> Any:
    """A context in which `observe(variable)` is told of every Keras variable that is assigned."""
    assign = KerasVariable.assign

    @functools.wraps(assign)
    def observed(self: Any, value: Any) -> Any:
        observe(self)
        return assign(self, value)

    return _replaced(KerasVariable, assign=observed)


@contextlib.contextmanager
def means_through(update: Callable) -> Iterator[None]:
    """A context in which `keras.metrics.Mean` and `Sum` are updated by this instead.

    Args:
        update: Called as `update(metric, values, sample_weight, original=...)`.
    """

    def updated(original: Callable) -> Callable:
        @functools.wraps(original)
        def through(self: Any, values: Any, sample_weight: Any = None) -> Any:
            return update(self, values, sample_weight, original=original)

        return through

    mean, total = keras.metrics.Mean, keras.metrics.Sum
    with (
        _replaced(mean, update_state=updated(mean.update_state)),
        _replaced(total, update_state=updated(total.update_state)),
    ):
        yield


def tapes_through(differentiate: Callable) -> Any:
    """A context in which `tf.GradientTape.gradient` is this instead.

    Args:
        differentiate: Called as `differentiate(tape, target, sources, output_gradients,
            original=..., **other arguments)`.
    """
    original = tf.GradientTape.gradient

    @functools.wraps(original)
    def through(
        self: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **more: Any
    ) -> Any:
        if args:  # given by position
            more["unconnected_gradients"] = args[0]
        return differentiate(self, target, sources, output_gradients, original=original, **more)

    return _replaced(tf.GradientTape, gradient=through)


@contextlib.contextmanager
def results_through(metrics: Sequence, result: Callable) -> Iterator[None]:
    """A context in which these metrics return `result(metric, original)` as their results.

    In another such, the outer one's.
    """
    replaced = [metric for metric in metrics if "result" not in vars(metric)]
    for metric in replaced:
        replacement = functools.partial(result, metric, metric.result)
        object.__setattr__(metric, "result", replacement)
    try:
        yield
    finally:
        for metric in replaced:
            object.__delattr__(metric, "result")


def metrics_of(model: Any) -> list:
    """Every metric of a model: those it lists, and others that are attributes of it."""
    listed = [*model.metrics, *model._metrics]
    held = [value for value in vars(model).values() if isinstance(value, keras.metrics.Metric)]
    return list({id(metric): metric for metric in [*listed, *held]}.values())


def takes_own_step(model: Any) -> bool:
    """Whether a model is trained by the train step that Keras gives it."""
    own = TensorFlowTrainer.train_step
    return type(model).train_step is own and "train_step" not in vars(model)


def is_kerass(function: Any) -> bool:
    """Whether a function, class or instance of one is Keras's own, and not a script's."""
    function = inspect.unwrap(function) if callable(function) else function
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0] == "keras"


def _given(identifiers: Any, get: Callable) -> Iterator[Any]:
    """What `compile` was given, with names looked up; wrapped functions as they are."""
    for given in keras.tree.flatten(identifiers):
        found = get(given) if isinstance(given, str | dict) else given
        fn = getattr(found, "fn", None) or getattr(found, "_fn", None)
        yield found if fn is None or not is_kerass(found) else fn


def foreign_losses(model: Any) -> list:
    """The losses given to `compile` that are not Keras's own."""
    compiled = model._compile_loss
    given = [] if compiled is None else _given(compiled._user_loss, keras.losses.get)
    return [loss for loss in given if loss is not None and not is_kerass(loss)]


def foreign_metrics(model: Any) -> list:
    """The metrics of a model that are not Keras's own."""
    compiled = model._compile_metrics
    asked = [] if compiled is None else [compiled._user_metrics, compiled._user_weighted_metrics]
    # "accuracy" and the like are several of Keras's; nothing is looked up by such names.
    given = [m for m in keras.tree.flatten(asked) if m is not None and not isinstance(m, str)]
    held = [metric for metric in metrics_of(model) if metric is not compiled]
    return [m for m in [*_given(given, keras.metrics.get), *held] if not is_kerass(m)]


@contextlib.contextmanager
def all_synchronized(model: Any) -> Iterator[None]:
    """A context in which every batch normalization of a model is that of all replicas."""
    layers = [
        layer
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
    ]
    for layer in layers:
        layer.synchronized = True
    try:
        yield
    finally:
        for layer in layers:
            layer.synchronized = False


def computes_own_loss(model: Any) -> bool:
    """Whether Keras computes a model's loss, from what `compile` and `add_loss` were given."""
    return type(model).compute_loss is Trainer.compute_loss


def takes_through(take: Callable) -> Any:
    """A context in which `keras.ops.take` calls `take(x, indices, axis, original)`."""
    original = keras_numpy.take

    @functools.wraps(original)
    def replacement(x: Any, indices: Any, axis: int | None = None) -> Any:
        return take(x, indices, axis, original)

    return _replaced(keras_numpy, take=replacement)


def moments_through(moments: Callable) -> Any:
    """A context in which synchronized layers call `moments(x, axes, keepdims, original=...)`."""
    original = keras_nn._compute_moments_sync
    return _replaced(keras_nn, _compute_moments_sync=functools.partial(moments, original=original))


# Models.


@contextlib.contextmanager
def compiles_through(before: Callable, after: Callable) -> Iterator[None]:
    """While inside, calls stand before and after `model.compile`; in another such, the outer's.

    Args:
        before: Called with the model and its `jit_compile`.
        after: Called with the model.
    """
    original = Trainer.compile
    # Inside a scope of the same strategy nothing changes; TensorFlow refuses one of another.
    if hasattr(original, "_dtk_adopts"):
        yield
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile_between(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        before(self, given.get("jit_compile", "auto"))
        original(self, *args, **kwargs)
        after(self)

    compile_between._dtk_adopts = True  # type: ignore[attr-defined]
    with _replaced(Trainer, compile=compile_between):
        yield


def owner_of(model: Any) -> Any:
    """The strategy a model was built under; None if under none."""
    return model._distribute_strategy


def set_owner(model: Any, strategy: Any) -> None:
    """Make a model belong to a strategy."""
    model._distribute_strategy = strategy


def build_through(model: Any, build: Callable) -> None:
    """Make Keras call `build(iterator=None, data_batch=None)` before a model's first step.

    Args:
        model: The model.
        build: Gets Keras's epoch iterator in `fit` and `evaluate`, a batch in single steps.
    """
    model._maybe_symbolic_build = build


def build_from(model: Any, data_batch: Any) -> None:
    """Build a model, its metrics and its optimizer from a batch or the specification of one.

    A model that has a train step and no `call` is not built so: its step builds what it uses.
    """
    if type(model).call in (keras.Model.call, keras.layers.Layer.call):
        return
    try:
        model._symbolic_build(data_batch=data_batch)
    except Exception:
        # Keras calls the model with the first of a batch's parts. A step of the script's own may
        # call it with others, and says itself what is wrong where it cannot.
        if takes_own_step(model):
            raise


def make_function(model: Any, step: Callable) -> Callable:
    """Keras's loop over the batches of an iterator, around one step."""
    return model._make_function(step)


def layers_of(model: Any) -> list:
    """Every layer of a model, also those inside others."""
    return list(model._flatten_layers())


def tables_of(model: Any) -> list:
    """Variables of embedding layers: of those a step needs a few rows only."""
    return [
        layer._embeddings
        for layer in layers_of(model)
        if type(layer).call is keras.layers.Embedding.call and layer.built
    ]


def initial_epoch(model: Any) -> int | None:
    """The epoch a callback wants `fit` to start from; None for the argument's."""
    return model._initial_epoch


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Make `fit` start from this epoch."""
    model._initial_epoch = epoch


def answer_once(model: Any, logs: dict) -> None:
    """When `fit` next asks what an epoch's steps said, which is at their end, let it be this."""

    def logs_of_then(latest: Any) -> dict:
        del latest, model._get_metrics_result_or_logs
        return logs

    model._get_metrics_result_or_logs = logs_of_then


# Variables.


def stored(variable: Any) -> Any:
    """The TensorFlow variable behind a Keras variable, whatever scope is open."""
    return variable._value


def move_variable(variable: Any) -> None:
    """Give a Keras variable new storage, made in the current scope, with the value it has."""
    if variable._value is not None and not extended.is_distributed(variable._value):
        variable._initialize(variable._value.numpy())


class Part(keras.Variable):
    """One part of a partitioned variable, as an optimizer sees it.

    Args:
        whole: The Keras variable. Optimizers decide by its path what they do to a part.
        index: Which part.
    """

    def __init__(self, whole: Any, index: int):
        self.whole = whole
        self._part = (extended.shards_of(whole._value) or ())[index]
        super().__init__(
            initializer=lambda shape, dtype: None,
            shape=self._part.shape,
            dtype=whole.dtype,
            name=f"{whole.name}_part_{index}",
        )
        self._path = whole.path
        self.constraint = whole.constraint

    def _initialize_with_initializer(self, initializer: Callable) -> None:
        self._value = self._part


# Optimizers, each for itself: one that wraps another is two.


def optimizer_owner(optimizer: Any) -> Any:
    """The strategy an optimizer was made under."""
    return optimizer._distribution_strategy


def own_optimizer(optimizer: Any, strategy: Any) -> None:
    """Make an optimizer belong to a strategy, and take gradients as they are: already reduced."""
    optimizer._distribution_strategy = strategy
    optimizer._all_reduce_sum_gradients = list


def clip_through(optimizer: Any, around: Callable) -> None:
    """Make an optimizer call `around(gradients, clip)` where it would call `clip(gradients)`.

    With gradient accumulation that is once per window, with the window's sum.
    """
    clip = optimizer._clip_gradients
    optimizer._clip_gradients = lambda gradients: around(gradients, clip)


def trained_variables(optimizer: Any) -> list:
    """The variables an optimizer was built for."""
    return optimizer._trainable_variables


def accumulated(optimizer: Any) -> list:
    """What an optimizer sums up in an accumulation window, by variable; None where nothing."""
    return list(getattr(optimizer, "_accumulated_gradients", []))


def given_rate(optimizer: Any) -> Any:
    """What an optimizer computes its learning rate with; None when the rate is a plain number."""
    rate = optimizer._learning_rate
    return rate if callable(rate) and not isinstance(rate, KerasVariable) else None


def takes_adamw(muon: Any, variable: Any) -> bool:
    """Whether a `keras.optimizers.Muon` updates a variable as AdamW does."""
    return muon._should_use_adamw(variable)


def index_variables(optimizer: Any) -> None:
    """Rebuild an optimizer's look-up of its variables after their storage moved."""
    optimizer._trainable_variables_indices = {
        optimizer._var_key(v): i for i, v in enumerate(optimizer._trainable_variables)
    }
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        optimizer._var_to_optimizer_idx = {
            optimizer._var_key(v): i
            for i, member in enumerate(optimizer.optimizers)
            for v in member._trainable_variables
        }


# The data adapter and the epoch iterator, which give `fit` its batches.


def arrays_of(adapter: ArrayDataAdapter) -> Any:
    """What an adapter of arrays was given: inputs, and targets and row weights if there are."""
    return adapter._inputs


def shuffles(adapter: ArrayDataAdapter) -> Any:
    """How an adapter of arrays shuffles; falsy if it does not."""
    return adapter._shuffle


def dataset_of(iterator: Any) -> Any:
    """The dataset an epoch iterator makes an iterator of for each epoch."""
    return iterator._distributed_dataset


def set_dataset(iterator: Any, dataset: Any) -> None:
    """Make the following epochs read another dataset."""
    iterator._distributed_dataset = dataset


def batches_in(iterator: Any) -> int | None:
    """Batches in an epoch iterator's data; None until an epoch has shown it."""
    return iterator._num_batches


def set_batches_in(iterator: Any, count: int | None) -> None:
    """Tell an epoch iterator how many batches its data has."""
    iterator._num_batches = count


def is_open(iterator: Any) -> bool:
    """Whether an iterator over the data is kept that the next epoch may go on with."""
    return iterator._current_iterator is not None


def steps_seen(iterator: Any) -> int:
    """Steps taken from the iterator over the data that is kept."""
    return iterator._steps_seen


def forget_place(iterator: Any) -> None:
    """Make the next epoch begin with a new iterator over the data."""
    iterator._current_iterator = None


def set_place(iterator: Any, current: Iterator, seen: int) -> None:
    """Make the next epoch go on with an iterator over the data from which `seen` were taken."""
    iterator._current_iterator, iterator._steps_seen = current, seen


def open_data(iterator: Any) -> Iterator:
    """A new iterator over the data, as an epoch makes it; a dataset shuffles anew with each."""
    return iter(iterator._get_iterator())


def on_opening(iterator: Any, call: Callable[[], None]) -> None:
    """Call a function whenever the data is opened anew."""
    get_iterator = iterator._get_iterator

    def told() -> Any:
        call()
        return get_iterator()

    iterator._get_iterator = told


def steps_through(
    iterator: Any, change: Callable[[Iterator[tuple]], Iterator[tuple]], once: bool = False
) -> None:
    """Put a generator between Keras and the steps of an epoch.

    Args:
        iterator: The epoch iterator.
        change: Gets Keras's steps, each (first step, last step, iterator over the data), and yields
            those that are to be done.
        once: In the next epoch only; else in all.
    """
    enumerate_steps = iterator._enumerate_iterator

    def changed() -> Iterator[tuple]:
        if once:
            iterator._enumerate_iterator = enumerate_steps
        yield from change(enumerate_steps())

    iterator._enumerate_iterator = changed


def end_quietly(iterator: Any) -> None:
    """Keep Keras from warning when the data ends before the steps do."""
    iterator._interrupted_warning = lambda: None
