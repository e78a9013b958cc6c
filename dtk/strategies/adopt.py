"""The seam with Keras: the only file that touches its private names.

`strategy.scope()` *adopts* every model compiled inside it. Adopting gives that one model object its
own step functions; nothing of Keras stays patched once the scope is left. What it makes exact:

* Each rank's loss counts with its share of the rows, so uneven slices sum to the single process's
  loss. For n_w of N rows the share is n_w / N: Keras divides its mean losses by the number of
  replicas, and that division is replaced by the share. Losses that are sums need no factor, and
  masked or sample-weight-normalised means get the world's denominator.
* Gradients are reduced once, before loss-scale checks, accumulation and clipping see them; with
  accumulation once per window.
* Metric state is summed over ranks after every step, so logs are those of one process.
* Non-trainable state that a step assigns (moving statistics) is averaged, weighted by share.

Private names used, each with a test in tests/strategies/test_private_names.py:

    keras.src.losses.loss            scale_loss_for_distribution, unscale_loss_for_distribution,
                                     reduce_weighted_values
    keras.src.backend.common.variables   Variable.assign (observed while a step is traced)
    keras.src.trainers.trainer       Trainer.compile (hooked while inside a scope)
    Model       _distribute_strategy, _make_function, _maybe_symbolic_build, _symbolic_build,
                _initial_epoch, _compile_loss, _flatten_layers, _get_metrics_result_or_logs
    Optimizer   _distribution_strategy, _all_reduce_sum_gradients, _clip_gradients,
                _accumulated_gradients, _learning_rate
                _trainable_variables_indices, _trainable_variables, _var_key
    Variable    _value, _initialize
    TFEpochIterator   _distributed_dataset, _num_batches, _current_iterator, _steps_seen,
                _get_iterator, _enumerate_iterator, _interrupted_warning
    keras.src.backend.tensorflow.numpy   take (replaced while a worker's step is traced)
    keras.layers.Embedding               _embeddings
    Variable    _initialize_with_initializer
    keras.src.trainers.data_adapters     ArrayDataAdapter (._inputs, ._shuffle), TFDatasetAdapter
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.common.variables import Variable as KerasVariable
from keras.src.backend.tensorflow import numpy as keras_numpy
from keras.src.losses import loss as keras_losses
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.trainer import Trainer

from dtk.errors import NotDistributedError, at_rank
from dtk.strategies import extended, fitting, slicing

# What a step needs to know while Keras traces it; one per thread, because a mirrored strategy
# traces its replicas in threads.
_tracing = threading.local()


class _Step:
    """One replica's step being traced.

    Attributes:
        share: n_w / N, this replica's part of the global batch's rows (float32 scalar).
        size: Number of replicas.
        model: Whose step it is.
        world_sum: Sums a tensor over the replicas.
        applied: What was to be applied, where steps only note it (see `trace_apart`); else None.
        reductions: How many times gradients were reduced.
        assigned: Keras variables assigned so far, by id.
        per_output: True while Keras computes the losses of single outputs.
        parts: The losses computed so far.
    """

    def __init__(self, share: tf.Tensor, size: Any, model: Any, world_sum: Callable):
        self.share = share
        self.size = size
        self.model = model
        self.world_sum = world_sum
        self.applied: list[Applied] | None = None
        self.rows_read: list[tf.Tensor] = [tf.constant(0, tf.int64)]
        self._graph = tf.compat.v1.get_default_graph()
        self.reductions = 0
        self.assigned: dict[int, Any] = {}
        self.per_output = False
        self.parts = _Parts()

    def note_read(self, rows: tf.Tensor) -> None:
        """Count bytes read; not inside a loop or branch, whose tensors cannot leave it."""
        if tf.compat.v1.get_default_graph() is self._graph:
            self.rows_read.append(tf.size(rows, tf.int64) * rows.dtype.size)


class _Parts:
    """The losses of a step, each one replica's part: over the replicas they add up to the world's.

    Whatever else a step computes, such as a mean over its rows, must be weighed by share to add up.
    `in` tells them apart: a loss, and in a graph what was computed from one, is a part. Eagerly,
    only what `compute_loss` or a loss object returned is.
    """

    def __init__(self) -> None:
        self._parts: set = set()
        self._others: set = set()

    def add(self, loss: Any) -> Any:
        """Note a loss, and return it."""
        self._parts.add(loss.ref())
        return loss

    def made_whole(self, loss: Any) -> Any:
        """Note what Keras records of a loss, and return it: no part any more."""
        self._others.add(loss.ref())
        return loss

    def __contains__(self, value: Any) -> bool:
        seen: set = set()
        left = [value] if isinstance(value, tf.Tensor) else []
        while left:
            tensor = left.pop()
            if tensor.ref() in self._parts:
                return True
            if tensor.ref() not in seen and tensor.ref() not in self._others:
                seen.add(tensor.ref())
                left.extend([] if tf.executing_eagerly() else tensor.op.inputs)
        self._others |= seen
        return False


class Applied(NamedTuple):
    """Gradients that a step handed to an optimizer."""

    optimizer: Any
    gradients: list
    variables: list


def _step() -> _Step | None:
    return getattr(_tracing, "step", None)


# Losses.


def _scale(value: Any, original: Callable) -> Any:
    step = _step()
    if step is None:
        return original(value)
    # multiply_no_nan: a mean over no rows may be 0/0, and must count as nothing.
    return step.parts.add(tf.math.multiply_no_nan(value, tf.cast(step.share, value.dtype)))


def _unscale(value: Any, original: Callable) -> Any:
    step = _step()
    if step is None:
        return original(value)
    if step.per_output and not tf.executing_eagerly():
        # In a graph, trackers of single outputs count one per batch on every replica: the mean
        # over replicas of size * (share * mean) is the batch's mean. Eagerly they count rows, as
        # the loss tracker does.
        return step.parts.made_whole(value * tf.cast(step.size, value.dtype))
    return step.parts.made_whole(tf.math.divide_no_nan(value, tf.cast(step.share, value.dtype)))


def _reduce_weighted(
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
    *,
    original: Callable,
) -> Any:
    result = original(values, sample_weight, mask, reduction, dtype)
    step = _step()
    if step is None or reduction in (None, "none"):
        return result
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        weight = keras_losses.apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)
        counted = tf.reduce_sum(tf.cast(weight, result.dtype))
    elif reduction in ("sum_over_batch_size", "mean") and mask is not None:
        counted = tf.reduce_sum(tf.cast(mask, result.dtype))
    else:
        return step.parts.add(result)
    # `result` is share * (local sum / local count); wanted is local sum / global count.
    counted = tf.stop_gradient(counted)
    total = step.world_sum(counted)
    part = tf.math.divide_no_nan(counted, total * tf.cast(step.share, result.dtype))
    return step.parts.add(result * part)


def _noting_loss(compute_loss: Callable) -> Callable:
    """A model's `compute_loss`, whose result is a part; eagerly nothing else would tell."""

    @functools.wraps(compute_loss)
    def noting(*args: Any, **kwargs: Any) -> Any:
        loss, step = compute_loss(*args, **kwargs), _step()
        return loss if step is None else step.parts.add(tf.convert_to_tensor(loss))

    return noting


def _update_mean(self: Any, values: Any, sample_weight: Any = None, *, original: Callable) -> Any:
    """A custom step that records a loss means the world's, as one batch or as the rows it tells."""
    step = _step()
    if step is not None and values in step.parts:
        share = tf.cast(step.share, values.dtype)
        values = tf.math.divide_no_nan(values, share)
        sample_weight = share if sample_weight is None else sample_weight
    return original(self, values, sample_weight)


def _observe_assign(self: Any, value: Any, *, original: Callable) -> Any:
    step = _step()
    if step is not None:
        step.assigned[id(self)] = self
    return original(self, value)


@contextlib.contextmanager
def _keras_in_shares() -> Iterator[None]:
    """While inside, Keras scales losses by row share; outside nothing is patched."""
    scale = keras_losses.scale_loss_for_distribution
    unscale = keras_losses.unscale_loss_for_distribution
    reduce_weighted = keras_losses.reduce_weighted_values
    assign, update = KerasVariable.assign, keras.metrics.Mean.update_state

    @functools.wraps(assign)
    def observed(self: Any, value: Any) -> Any:
        return _observe_assign(self, value, original=assign)

    @functools.wraps(update)
    def updated(self: Any, values: Any, sample_weight: Any = None) -> Any:
        return _update_mean(self, values, sample_weight, original=update)

    keras_losses.scale_loss_for_distribution = functools.partial(_scale, original=scale)
    keras_losses.unscale_loss_for_distribution = functools.partial(_unscale, original=unscale)
    keras_losses.reduce_weighted_values = functools.partial(
        _reduce_weighted, original=reduce_weighted
    )
    KerasVariable.assign = observed
    keras.metrics.Mean.update_state = updated
    try:
        yield
    finally:
        keras_losses.scale_loss_for_distribution = scale
        keras_losses.unscale_loss_for_distribution = unscale
        keras_losses.reduce_weighted_values = reduce_weighted
        KerasVariable.assign = assign
        keras.metrics.Mean.update_state = update


# Optimizers.


def optimizers_of(model: Any) -> list:
    """The model's optimizer and any other it holds as an attribute (a GAN has two)."""
    found = [
        value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)
    ]
    unique = {id(optimizer): optimizer for optimizer in found}
    return list(unique.values())


def _chain(optimizer: Any) -> list:
    """An optimizer and those it wraps, outermost first."""
    chain = [optimizer]
    while hasattr(chain[-1], "inner_optimizer"):
        chain.append(chain[-1].inner_optimizer)
    return chain


def accumulators_of(optimizer: Any) -> list:
    """Variables that hold this rank's part of an unfinished accumulation window."""
    inner = _chain(optimizer)[-1]
    return [a for a in getattr(inner, "_accumulated_gradients", []) if a is not None]


def schedule_of(optimizer: Any) -> Any:
    """What an optimizer computes its learning rate with; None when the rate is a plain number."""
    rate = _chain(optimizer)[-1]._learning_rate
    return rate if callable(rate) and not isinstance(rate, KerasVariable) else None


def _bind_optimizer(optimizer: Any, strategy: Any) -> None:
    """Make `optimizer` reduce its gradients once, where every later step sees the reduced ones."""
    chain = _chain(optimizer)
    for member in chain:
        if getattr(member, "_dtk_member_of", None) is strategy:
            continue
        _check_owner(member, strategy)
        member._distribution_strategy = member._dtk_member_of = strategy
        member._all_reduce_sum_gradients = list

    index_variables(optimizer)

    outer, inner = chain[0], chain[-1]
    if getattr(outer, "_dtk_bound", None) is strategy:
        return
    outer._dtk_bound = strategy
    if inner.gradient_accumulation_steps:
        # The window's sum is all that is needed: reduce where the window closes.
        clip, apply_own = inner._clip_gradients, outer.apply

        def clip_reduced(grads: Any) -> Any:
            # What earlier steps of the window left counts, whether or not this one has rows.
            with extended.counted_if(None):
                return clip(_reduce_gradients(grads, strategy))

        def apply_present(grads: Any, trainable_variables: Any = None) -> Any:
            return apply_own(extended.if_present(list(grads)), trainable_variables)

        inner._clip_gradients = clip_reduced
        outer.apply = apply_present
        if outer is not inner:
            check_finite = outer.check_finite
            outer.check_finite = lambda grads: _everywhere(check_finite(grads))
    else:
        apply = outer.apply

        @functools.wraps(apply)
        def reduced_apply(grads: Any, trainable_variables: Any = None) -> Any:
            if not outer.built and trainable_variables is not None:
                _build_outside(outer, list(trainable_variables), strategy)
            return apply(_reduce_gradients(grads, strategy), trainable_variables)

        outer.apply = reduced_apply


def _check_owner(member: Any, strategy: Any) -> None:
    """Take over an optimizer that no other strategy has."""
    owner = member._distribution_strategy
    if owner is strategy:
        return
    if type(owner).__name__ != "_DefaultDistributionStrategy":
        raise ValueError(
            at_rank(
                strategy.rank,
                f"optimizer {member.name!r} was made for another strategy "
                f"({type(owner).__name__}); make a new optimizer inside this strategy's scope",
            )
        )
    strategy.take_variables(member.variables)


def _build_outside(optimizer: Any, variables: list, strategy: Any) -> None:
    """Make an optimizer's variables outside the step being traced.

    Keras builds the optimizer given to `compile` before the first step; others are built by their
    first `apply`, in the middle of a step. Variables made there tie one replica's step to
    another's. A new thread is outside every graph, device and replica.
    """

    def build() -> None:
        with strategy.scope():
            optimizer.build(variables)

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(build).result()


def _reduce_gradients(grads: Any, strategy: Any) -> list:
    """Sum gradients over all replicas; None stays None."""
    grads = list(grads)
    step = _step()
    if step is not None:
        step.reductions += 1
    present = [g for g in grads if g is not None]
    if not present or not _in_replica(strategy):
        return grads
    reduced = iter(strategy.reduce_gradients(present))
    return [None if g is None else next(reduced) for g in grads]


def _in_replica(strategy: Any) -> bool:
    replica = tf.distribute.get_replica_context()
    return replica is not None and replica.strategy is strategy


def _everywhere(flag: tf.Tensor) -> tf.Tensor:
    """True where `flag` is true on every replica."""
    replica = tf.distribute.get_replica_context()
    misses = tf.cast(tf.logical_not(flag), tf.int32)
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, misses) == 0


# Steps.


def _run_step(step_function: Callable, batch: slicing.Slices, adoption: Adoption) -> Any:
    """Run Keras's own train or test step on this replica's slice, then make its logs global."""
    strategy, model = adoption.strategy, adoption.model
    index = strategy.local_index()
    data, mine = slicing.forget_rows(batch.parts[index]), batch.counts[index]
    rows = _sum_over_replicas(mine) if isinstance(batch.rows, tuple) else batch.rows
    share = tf.cast(
        tf.math.divide_no_nan(tf.cast(mine, tf.float64), tf.cast(rows, tf.float64)), tf.float32
    )

    step = _Step(share, strategy.num_replicas_in_sync, model, _sum_over_replicas)
    before = {id(v): tf.identity(v) for v in metric_variables(model)}
    outer, _tracing.step = _step(), step
    try:
        with extended.counted_if(mine > 0):
            logs = step_function(data)
    finally:
        _tracing.step = outer
    _forget_stand_in(mine > 0, before, model)
    if step_function.__name__ == "train_step":
        _check_reduced(step, adoption)
    return _global_state(step, model, logs)


def _sum_over_replicas(value: tf.Tensor) -> tf.Tensor:
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


def metric_variables(model: Any) -> list:
    """State variables of every metric of a model, the loss tracker among them."""
    return [v for metric in model.metrics for v in metric.variables]


def _forget_stand_in(present: tf.Tensor, before: dict, model: Any) -> None:
    """Without rows of its own, a replica's metrics stay as they were.

    But for what counts batches and not rows, see `_unscale`: there it adds zero and counts.
    """
    counts_batches = set() if tf.executing_eagerly() else count_batches(model)

    def restore() -> tf.Tensor:
        for variable in metric_variables(model):
            if id(variable) in counts_batches:
                continue
            variable.assign(before.get(id(variable), tf.zeros_like(variable)))
        return tf.constant(True)

    tf.cond(present, lambda: tf.constant(False), restore)


def count_batches(model: Any) -> set[int]:
    """Ids of the metric variables that count batches, in a graph: trackers of single outputs."""
    if model._compile_loss is None:
        return set()
    return {id(v) for metric in model._compile_loss.metrics for v in metric.variables}


def _check_reduced(step: _Step, adoption: Adoption) -> None:
    model = adoption.model
    if step.reductions or not model.trainable_variables:
        return
    if tf.executing_eagerly() and any(
        _chain(o)[-1].gradient_accumulation_steps for o in optimizers_of(model)
    ):
        return  # Eagerly, an accumulation window reduces only when it closes.
    raise NotDistributedError(
        at_rank(
            adoption.strategy.rank,
            f"the first training step of model {model.name!r} finished without reducing any "
            f"gradient over {adoption.strategy.num_replicas_in_sync} replicas, so each would train "
            "alone. Its train_step must hand gradients to an optimizer that is an attribute of the "
            "model (self.optimizer.apply(gradients, self.trainable_variables)).",
        )
    )


def _global_state(step: _Step, model: Any, logs: Any) -> Any:
    """One reduction for all that must be global after a step: metrics and moving statistics."""
    replica = tf.distribute.get_replica_context()
    summed = [v for v in metric_variables(model) if v.aggregation == "sum"]
    averaged = _moving_statistics(step)
    numbers = other_logs(step, logs)
    share = step.share
    values = (
        [tf.convert_to_tensor(v) for v in summed]
        + [
            tf.math.multiply_no_nan(tf.convert_to_tensor(v), tf.cast(share, v.dtype))
            for v in averaged
        ]
        + list(numbers.values())
    )
    if not values:
        return logs
    reduced = replica.all_reduce(tf.distribute.ReduceOp.SUM, values)
    totals, means = reduced[: len(summed)], reduced[len(summed) : len(summed) + len(averaged)]
    for variable, mean in zip(averaged, means, strict=True):
        variable.assign(mean)
    if not isinstance(logs, dict):
        return logs
    with keras.StatelessScope(state_mapping=list(zip(summed, totals, strict=True))):
        counted = _counted(model, set(step.assigned))
    logs = {name: counted.get(name, value) for name, value in logs.items()}
    others = reduced[len(summed) + len(averaged) :]
    return {**logs, **dict(zip(numbers, others, strict=True))}


def other_logs(step: _Step, logs: Any) -> dict:
    """What adds up to the numbers a custom step returned that are no metric it has updated."""
    if not isinstance(logs, dict):
        return {}
    counted = _counted(step.model, set(step.assigned))
    return {
        name: value
        if value in step.parts
        else tf.math.multiply_no_nan(value, tf.cast(step.share, value.dtype))
        for name, value in logs.items()
        if name not in counted and tf.is_tensor(value) and value.dtype.is_floating
    }


def _counted(model: Any, assigned: set[int]) -> dict:
    """Results of the metrics a step has updated."""
    names: set[str] = set()
    for metric in model.metrics:
        if any(id(v) in assigned for v in metric.variables):
            result = metric.result()
            names |= set(result) if isinstance(result, dict) else {metric.name}
    return {name: value for name, value in model.get_metrics_result().items() if name in names}


def _moving_statistics(step: _Step) -> list:
    """Non-trainable floats the step assigned, but for those synchronized layers keep equal."""
    model = step.model
    exact = {
        id(v)
        for layer in model._flatten_layers()
        if getattr(layer, "synchronized", False)
        for v in layer.non_trainable_variables
    }
    return [
        v
        for v in model.non_trainable_variables
        if id(v) in step.assigned and id(v) not in exact and keras.backend.is_float_dtype(v.dtype)
    ]


# Steps that change nothing: for workers of parameter servers.


class Apart(NamedTuple):
    """What a step would have changed.

    Attributes:
        logs: What Keras's step returned.
        applied: Gradients by optimizer, in the order they were handed over.
        scope: Knows the values the step assigned (`keras.StatelessScope.get_current_value`).
        step: The step.
        rows_read: Bytes of table rows it looked up, int64 scalar.
    """

    logs: Any
    applied: list[Applied]
    scope: Any
    step: _Step
    rows_read: tf.Tensor

    @property
    def assigned(self) -> set[int]:
        """Ids of the Keras variables it assigned."""
        return set(self.step.assigned)


def trace_apart(
    step_function: Callable,
    data: Any,
    model: Any,
    *,
    share: tf.Tensor,
    size: tf.Tensor,
    world_sum: Callable,
    state: Sequence[tuple[Any, tf.Tensor]],
    tables: Sequence = (),
) -> Apart:
    """Trace one of Keras's steps as a pure function of data and state.

    Args:
        step_function: `model.train_step` or `model.test_step`.
        data: This slice.
        model: The model.
        share: This slice's part of the global batch's rows, float32 scalar.
        size: Slices the global batch was cut into, a scalar.
        world_sum: Sums a scalar over the slices.
        state: Keras variables and the values they have in this step. Gradients are taken with
            respect to these values.
        tables: Keras variables that are looked up where they are instead.
    """
    step = _Step(share, size, model, world_sum)
    step.applied = []
    outer, _tracing.step = _step(), step
    try:
        with (
            _keras_in_shares(),
            _tapes_over(state, tables),
            _looked_up_in_place(tables, model),
            keras.StatelessScope(state_mapping=state, collect_losses=True) as scope,
        ):
            logs = step_function(data)
    finally:
        _tracing.step = outer
    return Apart(logs, step.applied, scope, step, tf.add_n(step.rows_read))


@contextlib.contextmanager
def _tapes_over(state: Sequence, tables: Sequence) -> Iterator[None]:
    """Let gradient tapes see the values that stand for variables."""
    values = {id(variable): value for variable, value in state if variable.trainable}
    places = {id(variable): variable._value for variable in tables}
    enter, gradient = tf.GradientTape.__enter__, tf.GradientTape.gradient

    def watching(self: Any) -> Any:
        tape = enter(self)
        tape.watch(list(values.values()))
        return tape

    @functools.wraps(gradient)
    def through(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        flat = keras.tree.flatten(sources)
        asked = [
            extended.shards_of(places[id(s)]) or places[id(s)]
            if id(s) in places
            else values.get(id(s), s)
            for s in flat
        ]
        found = gradient(self, target, asked, *args, **kwargs)
        found = [
            _whole_gradient(f, s) if isinstance(f, list | tuple) else f
            for f, s in zip(found, flat, strict=True)
        ]
        return keras.tree.pack_sequence_as(sources, found)

    tf.GradientTape.__enter__, tf.GradientTape.gradient = watching, through
    try:
        yield
    finally:
        tf.GradientTape.__enter__, tf.GradientTape.gradient = enter, gradient


def _whole_gradient(parts: Sequence, variable: Any) -> tf.IndexedSlices | None:
    """The gradient of a partitioned table from those of its parts."""
    rows, indices, first = [], [], 0
    for part, shard in zip(parts, extended.shards_of(variable._value) or (), strict=True):
        if part is not None:
            sparse = as_slices(part)
            rows.append(sparse.values)
            indices.append(tf.cast(sparse.indices, tf.int64) + first)
        first += shard.shape[0]
    if not rows:
        return None
    return tf.IndexedSlices(tf.concat(rows, 0), tf.concat(indices, 0), tuple(variable.shape))


def as_slices(gradient: Any) -> tf.IndexedSlices:
    """A gradient as rows of a table, all of them if it is dense."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.IndexedSlices(gradient, tf.range(tf.shape(gradient, tf.int64)[0]))


@contextlib.contextmanager
def _looked_up_in_place(tables: Sequence, model: Any) -> Iterator[None]:
    """Let `keras.ops.take` fetch from tables only the rows it takes, each once.

    Their gradients then have each row once, too. But Keras squares and clips a sparse gradient
    row by row as it comes, so Adam makes of two equal rows something else than of their sum. Where
    that matters, a row that was taken twice stays two rows, as in one process.
    """
    summed = all(_is_linear(optimizer) for optimizer in optimizers_of(model))
    places = {id(variable): variable._value for variable in tables}
    take = keras_numpy.take

    @functools.wraps(take)
    def take_rows(x: Any, indices: Any, axis: int | None = None) -> Any:
        dense = not isinstance(indices, tf.SparseTensor | tf.RaggedTensor)
        if id(x) not in places or axis != 0 or not dense:
            return take(x, indices, axis)
        indices = tf.convert_to_tensor(indices)
        flat = tf.reshape(indices, [-1])
        flat = tf.where(flat < 0, flat + x.shape[0], flat)
        once, positions = tf.unique(flat) if summed else (flat, None)
        rows = tf.nn.embedding_lookup(places[id(x)], once)
        step = _step()
        if step is not None:
            step.note_read(rows)
        taken = rows if positions is None else tf.gather(rows, positions)
        return tf.reshape(taken, tf.concat([tf.shape(indices), x.shape[1:]], 0))

    keras_numpy.take = take_rows
    try:
        yield
    finally:
        keras_numpy.take = take


def _is_linear(optimizer: Any) -> bool:
    """Whether an optimizer makes the same of two gradients and of their sum."""
    chain = _chain(optimizer)
    inner = chain[-1]
    clips = inner.clipnorm or inner.global_clipnorm or inner.clipvalue
    return type(inner) is keras.optimizers.SGD and len(chain) == 1 and not clips


def tables_of(model: Any) -> list:
    """Variables of embedding layers: of those a step needs a few rows only."""
    return [
        layer._embeddings
        for layer in model._flatten_layers()
        if type(layer).call is keras.layers.Embedding.call and layer.built
    ]


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


def note_applies(optimizer: Any, strategy: Any, parts_of: Callable[[Any], list]) -> None:
    """Make an optimizer note what a traced step hands it, and see partitioned variables as parts.

    Args:
        optimizer: The model's optimizer.
        strategy: Its strategy.
        parts_of: Keras variable -> itself in a list, or its parts.
    """
    chain = _chain(optimizer)
    outer = chain[0]
    if getattr(outer, "_dtk_bound", None) is strategy:
        return
    for member in chain:
        _check_owner(member, strategy)
        member._distribution_strategy = strategy
        member._all_reduce_sum_gradients = list
    outer._dtk_bound = strategy
    apply, build, finalize = outer.apply, outer.build, outer.finalize_variable_values

    @functools.wraps(apply)
    def noted_apply(grads: Any, trainable_variables: Any = None) -> Any:
        step = _step()
        if step is None or step.applied is None:
            return apply(grads, trainable_variables)
        variables = trainable_variables or outer._trainable_variables
        step.applied.append(Applied(outer, list(grads), list(variables)))
        return None

    def expanded(variables: Any) -> list:
        return [part for variable in variables for part in parts_of(variable)]

    outer.apply = noted_apply
    outer._dtk_apply = apply
    outer.build = lambda variables: build(expanded(variables))
    outer.finalize_variable_values = lambda variables: finalize(expanded(variables))


def apply_now(optimizer: Any, gradients: list, variables: list) -> None:
    """What `optimizer.apply` does where it is not only noted."""
    optimizer._dtk_apply(gradients, variables)


class Adoption:
    """What dtk keeps about one model compiled under one strategy.

    Attributes:
        model: The model.
        strategy: Its strategy.
        rows_unknown: True while `fit` reads per-rank pipelines, so that the rows of a global batch
            are known only by summing.
        epoch_iterator: Keras's iterator of the running `fit`; None outside.
        callbacks: The `keras.callbacks.CallbackList` of the running `fit`; None outside.
    """

    def __init__(self, model: Any, strategy: Any):
        self.model = model
        self.strategy = strategy
        self.rows_unknown = False
        self.epoch_iterator: Any = None
        self.callbacks: Any = None
        self._given_adapter: Any = None
        self._batch_size: int | None = None
        self._iterators = 0

    @property
    def takes_over(self) -> bool:
        """Whether the model's step functions are replaced; in a world of one it is plain Keras."""
        return self.strategy.num_replicas_in_sync > 1

    def bind_optimizers(self) -> None:
        """Make the model's optimizers reduce their gradients over the replicas."""
        for optimizer in optimizers_of(self.model):
            _bind_optimizer(optimizer, self.strategy)

    # Data.

    def take_epoch_iterator(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Feed Keras's epoch iterator with cut batches, and build the model from their shapes."""
        model, strategy = self.model, self.strategy
        if iterator is not None:
            if self.takes_over:
                dataset = iterator.data_adapter.get_tf_dataset()
                iterator._distributed_dataset = self.cut(dataset)
                data_batch = _first_part(iterator._distributed_dataset.element_spec)
            else:
                dataset = iterator._distributed_dataset
                data_batch = dataset.element_spec
            if self.callbacks is not None and self.epoch_iterator is None:
                self.rows_unknown = _is_per_rank(dataset)
                self._take_fit_iterator(iterator)
        with strategy.scope():
            model._symbolic_build(data_batch=data_batch)
        if not self.takes_over:
            return
        self._take_metrics()
        self.bind_optimizers()
        compile_loss = model._compile_loss
        if compile_loss is not None and "call" not in vars(compile_loss):
            compile_loss.call = _flagged(compile_loss.call)

    def _take_metrics(self) -> None:
        """Make the state of metrics created outside the scope one that is summed when read."""
        self.strategy.take_metric_state(
            [v for v in metric_variables(self.model) if v.synchronization == "on_read"]
        )

    def _take_fit_iterator(self, iterator: Any) -> None:
        self.epoch_iterator = iterator
        self._given_adapter = iterator.data_adapter
        self._batch_size = None
        self._iterators = 0
        get_iterator = iterator._get_iterator

        def counted() -> Any:
            self._iterators += 1
            return get_iterator()

        iterator._get_iterator = counted
        self._tell_steps(iterator.num_batches)

    def _tell_steps(self, steps: int | None) -> None:
        """Tell the callbacks, the progress bar among them, how many steps an epoch has."""
        self.callbacks.set_params({**self.callbacks.params, "steps": steps})

    def tell_learned_steps(self) -> None:
        """Once an epoch has shown how many steps the data has, let the progress bar know."""
        iterator = self.epoch_iterator
        if iterator is None or self.callbacks.params.get("steps") is not None:
            return
        if iterator.num_batches is not None:
            # Keras counts the attempt that found the data at its end.
            self._tell_steps(iterator.num_batches - iterator.steps_per_execution)

    def cut(self, dataset: Any) -> tf.data.Dataset:
        """Dataset of `Slices` for this process, from whatever `fit` was given."""
        strategy = self.strategy
        if isinstance(dataset, extended.PerRankDataset):
            if dataset.whole is None:
                return dataset.local.map(slicing.on_elements(dataset.local, _own_rows))
            dataset = dataset.whole
        cut = slicing.cut_dataset(dataset, strategy.local_ranks(), strategy.num_replicas_in_sync)
        return cut.prefetch(tf.data.AUTOTUNE)

    def _cut_batches(self, batches: Any) -> Iterator[slicing.Slices]:
        for batch in batches:
            batch = tf.nest.map_structure(
                lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), batch
            )
            yield slicing.cut(
                batch, self.strategy.local_ranks(), self.strategy.num_replicas_in_sync
            )

    # Step functions.

    def make_step_function(self, step_function: Callable, name: str) -> Callable:
        """Keras's loop around one step, over cut batches."""
        strategy = self.strategy
        sequence = strategy.new_sequence(name)

        @tf.autograph.experimental.do_not_convert
        def step(batch: slicing.Slices) -> Any:
            with strategy.sequence(sequence):
                return _run_step(step_function, batch, self)

        function = self.model._make_function(step)

        def run(iterator: Any) -> Any:
            with _keras_in_shares():
                if isinstance(iterator, tf.data.Iterator):
                    return function(iterator)
                return function(self._cut_batches(iterator))

        return run

    def make_train_function(self, force: bool = False) -> Callable:
        """Replaces `Model.make_train_function` on the adopted model."""
        model = self.model
        if model.train_function is None or force:
            self.bind_optimizers()
            model.train_function = self.make_step_function(model.train_step, "train")
        return model.train_function

    def make_test_function(self, force: bool = False) -> Callable:
        """Replaces `Model.make_test_function` on the adopted model."""
        model = self.model
        if model.test_function is None or force:
            model.test_function = self.make_step_function(model.test_step, "test")
        return model.test_function

    def make_predict_function(self, force: bool = False) -> Callable:
        """Replaces `Model.make_predict_function`: every rank gets every row, in order."""
        model, strategy = self.model, self.strategy
        if model.predict_function is not None and not force:
            return model.predict_function
        sequence = strategy.new_sequence("predict")

        @tf.autograph.experimental.do_not_convert
        def one_step(data: Any) -> Any:
            with strategy.sequence(sequence):
                data = slicing.forget_rows(without_optionals(data))
                outputs = model.predict_step(slicing.stand_in(data))
                rows = slicing.count_rows(data)
                outputs = keras.tree.map_structure(lambda output: _first(output, rows), outputs)
                return strategy.gather_outputs(outputs)

        @tf.autograph.experimental.do_not_convert
        def steps(batches: list) -> Any:
            outputs = [
                strategy.join_outputs(strategy.run(one_step, args=(data,))) for data in batches
            ]
            return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

        function = steps if model.run_eagerly else tf.function(steps, reduce_retracing=True)
        model.predict_function = function
        return function

    def predict_on_batch(self, x: Any) -> Any:
        """Replaces `Model.predict_on_batch`: a cut batch, a whole result on every rank."""
        function = self.make_predict_function()
        strategy = self.strategy
        batch = slicing.cut_exactly(
            tf.nest.map_structure(tf.convert_to_tensor, (x,)),
            strategy.local_ranks(),
            strategy.num_replicas_in_sync,
        )
        outputs = function([self.strategy.per_replica(batch)])
        return tf.nest.map_structure(
            lambda leaf: leaf if isinstance(leaf, tf.RaggedTensor) else leaf.numpy(), outputs
        )

    def new_epoch(self, epoch: int) -> None:
        """Called when an epoch of `fit` begins."""

    def settle(self) -> None:
        """Wait for steps under way; here there are none, each is over when Keras has called it."""

    def leave(self) -> None:
        """Called when `fit`, `evaluate`, `predict` or a single step is over."""

    # Batch size between epochs.

    def set_batches(self, adapter: Any) -> None:
        """Read the following epochs from another Keras data adapter, and tell the progress bar."""
        iterator = self.epoch_iterator
        dataset = adapter.get_tf_dataset()
        iterator.data_adapter = adapter
        iterator._distributed_dataset = (
            self.cut(dataset)
            if self.takes_over
            else self.strategy.experimental_distribute_dataset(dataset)
        )
        iterator._num_batches = adapter.num_batches
        iterator._current_iterator = None
        self._tell_steps(iterator.num_batches)

    def shuffle(self, epoch: int) -> None:
        """Put the rows of arrays in an order of their own for this epoch, the same on every rank.

        With a fixed seed Keras repeats one order in every epoch. That is what a script that sets a
        seed gets, as without dtk; one that sets none gets a new order each epoch, as without dtk.
        """
        iterator, strategy = self.epoch_iterator, self.strategy
        if extended.global_seed() != strategy.seed_in_force:
            strategy.shuffle_seed = None
        if strategy.shuffle_seed is None or iterator is None:
            return
        adapter = iterator.data_adapter
        if isinstance(adapter, ArrayDataAdapter) and adapter._shuffle:
            strategy.seed_in_force = (strategy.shuffle_seed + epoch) % 2**31
            tf.random.set_seed(strategy.seed_in_force)
            iterator._distributed_dataset = self.cut(adapter.get_tf_dataset())

    def batch_size(self) -> int | None:
        """Global batch size of the running `fit`; None where the data does not tell."""
        if self._batch_size is not None:
            return self._batch_size
        adapter = self.epoch_iterator.data_adapter
        return None if self.rows_unknown else adapter.batch_size

    def rows_in(self, steps: int) -> int | None:
        """Rows in the first `steps` batches of an epoch; None where the data does not tell."""
        adapter, size = self.epoch_iterator.data_adapter, self.batch_size()
        if size is None:
            return None
        partial = adapter.partial_batch_size if steps == adapter.num_batches else None
        return steps * size - (size - partial if partial else 0)

    def check_rebatch(self) -> None:
        """Whether `rebatch` is possible.

        Raises:
            ValueError: The data comes in batches that cannot be cut anew.
        """
        given = self._given_adapter
        if isinstance(given, ArrayDataAdapter) or (
            isinstance(given, TFDatasetAdapter) and not self.rows_unknown
        ):
            return
        raise ValueError(
            f"the batch size of data from a {type(given).__name__} cannot be changed during fit; "
            "give fit arrays or a tf.data.Dataset of global batches"
        )

    def rebatch(self, size: int) -> None:
        """Read the following epochs in global batches of `size` rows.

        Arrays keep their order of rows (the same shuffle, cut differently). A dataset is cut anew
        behind the script's own pipeline; Keras then learns the number of steps in the first epoch.
        """
        if size == self.batch_size():
            return
        self.check_rebatch()
        given = self._given_adapter
        if isinstance(given, ArrayDataAdapter):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(given._inputs)
            shuffle = given._shuffle
            adapter = ArrayDataAdapter(x, y, sample_weight, batch_size=size, shuffle=shuffle)
        else:
            dataset = given.get_tf_dataset()
            whole: Any = dataset.whole if isinstance(dataset, extended.PerRankDataset) else dataset
            adapter = TFDatasetAdapter(whole.rebatch(size))
        self.set_batches(adapter)
        self._batch_size = size
        if adapter.num_batches is None:
            # Where the data ends is where an epoch of unknown length ends: nothing to warn about.
            self.epoch_iterator._interrupted_warning = lambda: None

    # Position in the data, to go on from it later.

    def data_position(self, in_epoch: bool) -> dict:
        """Where the running `fit` is in its data, as plain numbers.

        Args:
            in_epoch: Call it with True from `on_train_batch_begin`, with False between epochs.
        """
        iterator = self.epoch_iterator
        ahead = iterator.steps_per_execution if in_epoch else 0
        return {
            "iterators": self._iterators,
            "seen": iterator._steps_seen - ahead,
            "open": in_epoch or iterator._current_iterator is not None,
            "batch_size": self.batch_size(),
            "batches": None if self._batch_size else iterator._num_batches,
        }

    def resume_at(self, step: int, position: dict) -> None:
        """Let the next epoch begin at `step`, with the rows that would have come there.

        Iterators over a dataset shuffle anew each time one is made, so as many are made as before;
        then the batches already seen are passed over.
        """
        iterator = self.epoch_iterator
        enumerate_steps = iterator._enumerate_iterator

        def resumed() -> Iterator[tuple]:
            iterator._enumerate_iterator = enumerate_steps
            if step and position["batch_size"] != self.batch_size():
                raise ValueError(
                    f"step {step} of an epoch was reached with batch_size="
                    f"{position['batch_size']}, which {self.batch_size()} cannot continue; use the "
                    "same, or a checkpoint from the end of an epoch"
                )
            self._find_position(step, position)
            for begin, end, batches in enumerate_steps():
                if begin >= step:
                    yield begin, end, batches
                elif iterator.steps_per_epoch is None:
                    _pass_over(batches, end - begin + 1)

        iterator._enumerate_iterator = resumed

    def resume_after_steps(self, logs: dict, position: dict) -> None:
        """Let the next epoch have no steps: they are done, and only its validation is left.

        Args:
            logs: What the epoch's training steps said.
            position: Where the data is after them.
        """
        model, iterator = self.model, self.epoch_iterator
        enumerate_steps = iterator._enumerate_iterator

        def none_left() -> Iterator[tuple]:
            iterator._enumerate_iterator = enumerate_steps
            self._find_position(0, position)
            # Keras asks for an epoch's numbers when its steps are over.
            model._get_metrics_result_or_logs = logs_of_then
            yield from ()

        def logs_of_then(latest: Any) -> dict:
            del latest, model._get_metrics_result_or_logs
            return logs

        iterator._enumerate_iterator = none_left

    def _find_position(self, step: int, position: dict) -> None:
        iterator = self.epoch_iterator
        stream = iterator.steps_per_epoch is not None
        inside = position["open"] if stream else step > 0
        if iterator._num_batches is None and not self._batch_size:
            iterator._num_batches = position["batches"]
        if not isinstance(iterator.data_adapter, ArrayDataAdapter):
            while self._iterators < position["iterators"] - inside:
                iter(iterator._get_iterator())
        if stream and inside:
            iterator._current_iterator = iter(iterator._get_iterator())
            _pass_over(iterator._current_iterator, position["seen"])
            iterator._steps_seen = position["seen"] - step

    # Where training starts.

    def initial_epoch(self) -> int | None:
        """The epoch a callback wants `fit` to start from; None for the argument's."""
        return self.model._initial_epoch

    def set_initial_epoch(self, epoch: int | None) -> None:
        """Make `fit` start from this epoch."""
        self.model._initial_epoch = epoch

    # State that is this rank's own.

    def seed_states(self) -> list:
        """State variables of the model's random number generators (dropout and the like)."""
        weights = {id(v) for v in self.model.weights}
        return [
            v
            for v in self.model.variables
            if id(v) not in weights and v.name == "seed_generator_state"
        ]

    def shared_variables(self) -> list:
        """Every variable the ranks must agree on: weights and optimizer state."""
        own = {id(a) for optimizer in optimizers_of(self.model) for a in accumulators_of(optimizer)}
        optimizer_variables = [
            v for optimizer in optimizers_of(self.model) for v in optimizer.variables
        ]
        unique = {id(v): v for v in [*self.model.weights, *optimizer_variables]}
        return [v for key, v in unique.items() if key not in own]


def _own_rows(batch: Any) -> slicing.Slices:
    return slicing.Slices((batch,), (slicing.count_rows(batch),), ())


def _first(output: Any, rows: tf.Tensor) -> Any:
    if isinstance(output, tf.SparseTensor):
        raise ValueError(
            "predict cannot put sparse outputs of several workers together; end the model with "
            "tf.sparse.to_dense"
        )
    return output[:rows]


def _first_part(spec: Any) -> Any:
    return spec.parts[0] if isinstance(spec, slicing.Slices) else spec


def _is_per_rank(dataset: Any) -> bool:
    """Whether every rank reads a pipeline of its own."""
    return isinstance(dataset, extended.PerRankDataset) and dataset.whole is None


def at_end_of_data(iterator: Any, call: Callable[[], None]) -> None:
    """Call a function whenever an epoch of a Keras epoch iterator ends, however it ends.

    `fit` keeps the iterator of its validation data and brings it every epoch: once is enough.
    """
    if getattr(iterator, "_dtk_tells_its_end", False):
        return
    iterator._dtk_tells_its_end = True
    enumerate_steps = iterator._enumerate_iterator

    def until_end() -> Iterator[tuple]:
        try:
            yield from enumerate_steps()
        finally:
            call()

    iterator._enumerate_iterator = until_end


def _pass_over(batches: Iterator, count: int) -> None:
    for _ in range(count):
        next(batches, None)


def _flagged(call: Callable) -> Callable:
    @functools.wraps(call)
    def flagged(*args: Any, **kwargs: Any) -> Any:
        step = _step()
        if step is None:
            return call(*args, **kwargs)
        step.per_output = True
        try:
            return call(*args, **kwargs)
        finally:
            step.per_output = False

    return flagged


def without_optionals(data: Any) -> Any:
    """A structure in which what Keras marks as absent is None."""
    return keras.tree.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )


def move_variable(variable: Any) -> None:
    """Give a Keras variable new storage, made in the current scope, with the value it has."""
    if variable._value is not None and not extended.is_distributed(variable._value):
        variable._initialize(variable._value.numpy())


def index_variables(optimizer: Any) -> None:
    """Rebuild an optimizer's look-up of its variables after their storage moved."""
    for member in _chain(optimizer):
        member._trainable_variables_indices = {
            member._var_key(v): i for i, v in enumerate(member._trainable_variables)
        }


# Adopting.


def adoption_of(model: Any) -> Adoption | None:
    """The adoption of a model, None when no dtk strategy compiled it."""
    return getattr(model, "_dtk_adoption", None)


def adopt(model: Any, strategy: Any) -> Adoption:
    """Give one compiled model the strategy's step functions. Compiling again starts afresh."""
    before = adoption_of(model)
    if before is not None and before.strategy is not strategy:
        raise ValueError(
            at_rank(
                strategy.rank,
                f"model {model.name!r} was compiled under another strategy; build a new one for "
                "this",
            )
        )
    strategy.take_variables(model.variables)
    adoption = before or strategy.make_adoption(model)
    adoption.bind_optimizers()
    if before is not None:
        return before
    model._dtk_adoption = adoption
    model._maybe_symbolic_build = adoption.take_epoch_iterator
    model.compute_loss = _noting_loss(model.compute_loss)
    if adoption.takes_over:
        model.make_train_function = adoption.make_train_function
        model.make_test_function = adoption.make_test_function
        model.make_predict_function = adoption.make_predict_function
        model.predict_on_batch = adoption.predict_on_batch
    fitting.wrap(model, adoption)
    return adoption


@contextlib.contextmanager
def adopting(strategy: Any) -> Iterator[None]:
    """While inside, `compile` adopts. Keras's own `compile` is restored on leaving."""
    original = Trainer.compile

    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile_and_adopt(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        _refuse_jit(given.get("jit_compile", "auto"), strategy)
        owner = self._distribute_strategy
        if owner is not None and owner is not strategy:
            raise ValueError(
                at_rank(
                    strategy.rank,
                    f"model {self.name!r} was built under another strategy "
                    f"({type(owner).__name__}); build and compile it under the same one",
                )
            )
        self._distribute_strategy = strategy
        original(self, *args, **kwargs)
        adopt(self, strategy)

    # Inside a scope of the same strategy nothing changes; TensorFlow refuses one of another.
    nested = hasattr(original, "_dtk_adopts")
    compile_and_adopt._dtk_adopts = True  # type: ignore[attr-defined]
    if not nested:
        Trainer.compile = compile_and_adopt
    try:
        yield
    finally:
        if not nested:
            Trainer.compile = original


def _refuse_jit(jit_compile: Any, strategy: Any) -> None:
    if jit_compile is True and strategy.num_replicas_in_sync > 1:
        raise ValueError(
            at_rank(
                strategy.rank,
                "jit_compile=True compiles the whole step with XLA, which cannot contain "
                "reductions that run on the host; leave jit_compile at 'auto' (it stays off under "
                "a strategy)",
            )
        )


def check_adopted(function: Any, strategy: Any) -> None:
    """Refuse to run the step of a model that this strategy did not compile."""
    model = getattr(function, "__self__", None)
    if not isinstance(model, keras.Model) or strategy.num_replicas_in_sync == 1:
        return
    if function.__name__ not in ("train_step", "test_step", "predict_step"):
        return
    if adoption_of(model) is None:
        raise NotDistributedError(
            at_rank(
                strategy.rank,
                f"model {model.name!r} was compiled outside strategy.scope(), so its steps would "
                "not be exact; call model.compile(...) inside `with strategy.scope():`",
            )
        )
