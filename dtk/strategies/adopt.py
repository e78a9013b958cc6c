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
    Model       _distribute_strategy, _make_function, _maybe_symbolic_build, _symbolic_build,
                _initial_epoch, _compile_loss, _flatten_layers, _get_metrics_result_or_logs
    Optimizer   _distribution_strategy, _all_reduce_sum_gradients, _clip_gradients,
                _accumulated_gradients, _learning_rate,
                _trainable_variables_indices, _trainable_variables, _var_key,
                _var_to_optimizer_idx (of a MultiOptimizer)
    Variable    _value, _initialize, _initialize_with_initializer
    Embedding   _embeddings
    TFEpochIterator   _distributed_dataset, _num_batches, _current_iterator, _steps_seen,
                _get_iterator, _enumerate_iterator, _interrupted_warning
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend.common.variables import Variable as KerasVariable
from keras.src.backend.tensorflow import nn as keras_nn
from keras.src.backend.tensorflow import numpy as keras_numpy
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


def means_through(update: Callable) -> Any:
    """A context in which `keras.metrics.Mean` is updated by this instead.

    Args:
        update: Called as `update(metric, values, sample_weight, original=...)`.
    """
    original = keras.metrics.Mean.update_state

    @functools.wraps(original)
    def updated(self: Any, values: Any, sample_weight: Any = None) -> Any:
        return update(self, values, sample_weight, original=original)

    return _replaced(keras.metrics.Mean, update_state=updated)


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
    """Build a model, its metrics and its optimizer from a batch or the specification of one."""
    model._symbolic_build(data_batch=data_batch)


def make_function(model: Any, step: Callable) -> Callable:
    """Keras's loop over the batches of an iterator, around one step."""
    return model._make_function(step)


def compile_loss(model: Any) -> Any:
    """What computes the losses of a model's outputs, and tracks each; None without a loss."""
    return model._compile_loss


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
        whole: The Keras variable.
        index: Which part.
    """

    def __init__(self, whole: Any, index: int):
        self._part = (extended.shards_of(whole._value) or ())[index]
        super().__init__(
            initializer=lambda shape, dtype: None,
            shape=self._part.shape,
            dtype=whole.dtype,
            name=f"{whole.name}_part_{index}",
        )

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
