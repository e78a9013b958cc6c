"""The step being traced, and the weight of its losses and metrics.

Keras traces one replica's step as if there were no other. Meanwhile this thread has a `Step`, and
Keras's losses and metrics go through the functions here. They keep one rule for every scalar of a
step, a loss or a logged number:

    the sum over the replicas, weighed by their shares of the rows, is the global batch's

A mean over the replica's rows keeps the rule by itself, with n_w of N rows and the share n_w / N.
So mean losses are not divided by the number of replicas, as Keras would; losses that are sums are
divided by the share; masked or sample-weight-normalised means get the denominator of all replicas.
`loss_terms` handles scalars that are not Keras's. Gradients are weighed by the share: in Keras's
own step through the scale of its loss, which costs nothing; in any other step when an optimizer
gets them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import NamedTuple, TypeAlias, cast

import keras
import tensorflow as tf

from dtk.communicators.aligned_slices import with_values
from dtk.compat import keras_models, keras_steps, keras_variables, tf_replicas
from dtk.compat.tf_replicas import on_values, running
from dtk.errors import NotDistributedError, at_rank
from dtk.kernels import fused_layers
from dtk.nests import Function, Gradients, Tree
from dtk.patches import temporarily
from dtk.trainer.tracing import row_dependence
from dtk.trainer.tracing.loss_terms import Terms, depends_on_data

# A value's path in a structure, as `keras.tree.flatten_with_path` returns it.
Path: TypeAlias = tuple[str | int, ...]


class Applied(NamedTuple):
    """Gradients that a step handed to an optimizer, weighed by the replica's share."""

    optimizer: keras.Optimizer
    gradients: Gradients
    variables: list[keras.Variable]
    method: str = "apply"  # of the optimizer: `apply_gradients` where a script has its own


class NotedGradients:
    """The gradients of a step whose optimizers only note them, in order."""

    def __init__(self) -> None:
        self.applied: list[Applied] = []

    def note(self, applied: Applied) -> None:
        """Note gradients that an optimizer is given."""
        self.applied.append(applied)


@dataclasses.dataclass(eq=False)
class LossCall:
    """A loss that a step has computed, in one call or several."""

    tensors: list[tf.Tensor]  # outputs, targets and weights
    adds_up: bool  # whether it is made of sums over rows, as far as is known
    has_rows: bool  # whether the rows of its tensors can be gathered
    is_cured: bool = False  # whether it calls `sum_over_batch` or `gather_over_batch`


@dataclasses.dataclass(eq=False)
class Step:
    """One replica's step being traced."""

    share: tf.Tensor  # this replica's part of the batch's rows
    model: keras.Model
    sum_over_replicas: Callable[[tf.Tensor], tf.Tensor]  # sums a number over the replicas
    rows: tf.Tensor | None = None  # of the global batch
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of its losses' terms
    weighs_loss: bool = False  # and so its gradients: Keras's own train step
    present: tf.Tensor | None = None  # whether this replica has rows
    tried: bool = False  # whether `self_test` has compared it with one process's step
    noted: NotedGradients | None = None
    notes_losses: bool = False
    # by which a script's tapes multiply the gradients of weights, where the step is tried
    times: tf.Variable | None = None
    # Computes a metric's result from the state of all replicas; see `step_metrics.WorldState`.
    result_of: Callable[[Callable[[], Tree]], Tree] | None = None

    def __post_init__(self) -> None:
        self.graph = tf.compat.v1.get_default_graph()
        self.terms = Terms(self.share, self.sum_over_replicas, self.kinds)
        self.rows_read: list[tf.Tensor] = [tf.constant(0, tf.int64)]
        self.reductions = self.assignments = 0
        self.assigned: dict[int, keras.Variable] = {}
        self.assigned_at: dict[int, int] = {}
        self.counted_once: set[int] = set()  # variables of metrics that one replica counts
        self.results: dict[Hashable, tuple[keras.Metric, Path]] = {}
        self.origins: dict[Hashable, tuple[str, bool]] = {}
        self.inside_loss = self.weighed_later = False
        self.loss = "loss"  # the name of the one being computed
        self.losses: dict[str, LossCall] = {}

    def take(self, inside: Step) -> None:
        """Take over the assignments and reductions of a part that has weighed its gradients."""
        self.take_assignments(inside)
        self.reductions += inside.reductions
        self.weighs_loss = True

    def take_assignments(self, inside: Step) -> None:
        """Take over the assignments of a part that has computed the rows of all replicas."""
        self.assigned |= inside.assigned
        self.assigned_at |= {k: self.assignments + n for k, n in inside.assigned_at.items()}
        self.assignments += inside.assignments

    def begin_loss(self, tensors: list[tf.Tensor], adds_up: bool) -> None:
        """Note the tensors of the loss being computed, which may be called several times."""
        before = self.losses.get(self.loss, LossCall([], True, True))
        fit = before.has_rows and row_dependence.have_rows(tensors, self.graph)
        self.losses[self.loss] = LossCall(
            [*before.tensors, *tensors], before.adds_up and adds_up, fit, before.is_cured
        )

    def note_loss(self, values: tf.Tensor) -> None:
        """Note whether the graph shows that the loss being computed adds up over rows."""
        call = self.losses.get(self.loss)
        if call is not None and call.adds_up and not call.is_cured and not tf.executing_eagerly():
            call.adds_up = row_dependence.adds_up(values, call.tensors, self.graph)

    def note_read(self, rows: tf.Tensor) -> None:
        """Count bytes of rows read, except in a loop or branch: its tensors cannot leave it."""
        if tf.compat.v1.get_default_graph() is self.graph:
            self.rows_read.append(tf.size(rows, tf.int64) * rows.dtype.size)

    def weighed(
        self, value: tf.Tensor | tf.IndexedSlices | None
    ) -> tf.Tensor | tf.IndexedSlices | None:
        """Multiply a value by the share of this replica."""
        if value is None:
            return None
        if isinstance(value, tf.IndexedSlices):
            return with_values(value, self.weighed(value.values))
        value = tf.convert_to_tensor(value)
        # multiply_no_nan: a mean over no rows may be 0/0, and must count as zero.
        return tf.math.multiply_no_nan(value, tf.cast(self.share, value.dtype))

    def handed_over(self, gradients: Gradients) -> Gradients:
        """Weigh gradients for an optimizer, unless the loss was weighed."""
        return gradients if self.weighs_loss else [self.weighed(g) for g in gradients]


def takes_own_step(step_function: Callable[[Tree], Tree], model: keras.Model) -> bool:
    """Return whether a step function is Keras's own train step."""
    return step_function.__name__ == "train_step" and keras_models.takes_own_step(model)


def current() -> Step | None:
    """Return the step this thread is tracing; None outside dtk's steps."""
    return cast("Step | None", running.step)


def tracing(step: Step | None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which this thread traces a step."""
    return temporarily(running, step=step)


@contextlib.contextmanager
def weighing_by_rows() -> Iterator[None]:
    """Return a context in which steps keep the rule above and use the chosen kernels.

    Outside it nothing is patched.
    """
    with (
        keras_steps.patch_losses(_scale, _unscale, _weigh),
        keras_steps.patch_means(_update_mean),
        keras_steps.patch_tapes(_differentiate),
        keras_steps.patch_tf_functions(lambda: current() is not None),
        fused_layers.patch_layers(),
    ):
        yield


def losses_unscaled() -> contextlib.AbstractContextManager[None]:
    """Return a context in which losses outside replicas are not divided by their number.

    Keras would divide them: `loss_fn(y, model(x))` in the scope of two workers would return half
    the loss.
    """
    return keras_steps.patch_losses(_scale, _unscale, _unweighed)


def _unweighed(*args: object, original: Function[tf.Tensor], **kwargs: object) -> tf.Tensor:
    return original(*args, **kwargs)


# Losses.


def _scale(value: tf.Tensor, original: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    step = current()
    if step is None:
        return _outside(value, original)
    # Keras scales the mean of a loss object, and losses given to `add_loss`.
    return value if step.inside_loss else step.terms.to_mean("additional loss", value)


def _unscale(value: tf.Tensor, original: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    return _outside(value, original) if current() is None else value


def _outside(value: tf.Tensor, original: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Scale a loss in a replica whose step is not dtk's; keep a loss outside the replicas."""
    return value if tf.distribute.in_cross_replica_context() else original(value)


def _weigh(
    values: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
    mask: tf.Tensor | None = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: tf.DType = None,
    *,
    original: Function[tf.Tensor],
) -> tf.Tensor:
    step = current()
    if step is None:
        return original(values, sample_weight, mask, reduction, dtype)
    weighted = sample_weight is not None or mask is not None
    by_weight = reduction == "mean_with_sample_weight" and weighted
    with temporarily(step, inside_loss=True):
        # Keras's mean is 0 where this replica's weights sum to 0, and those of all need not.
        kind = "sum" if by_weight else reduction
        result = original(values, sample_weight, mask, kind, dtype)
    if reduction in (None, "none"):
        return result
    values = tf.convert_to_tensor(values)
    step.note_loss(values)
    if values.shape.rank == 0:
        # The loss function has reduced its rows itself, in an unknown way.
        return step.terms.to_mean(step.loss, result)
    if reduction == "sum":
        share = tf.cast(step.share, result.dtype)
        return step.terms.mark_mean(tf.math.divide_no_nan(result, share))
    if by_weight:
        weight = keras_steps.masked_weight(sample_weight, mask, dtype, reduction)
        total = _of_all(tf.reduce_sum(tf.cast(weight, result.dtype)), step)
        return step.terms.mark_mean(tf.math.divide_no_nan(result, total))
    if reduction in ("sum_over_batch_size", "mean") and mask is not None:
        counted = tf.reduce_sum(tf.cast(mask, result.dtype))
    elif _are_chosen(values, step):
        counted = tf.cast(tf.size(values), result.dtype)
    else:
        return step.terms.mark_mean(result)
    # `result` is local sum / local count; wanted is local sum / global count / share.
    weight = tf.math.divide_no_nan(tf.stop_gradient(counted), _of_all(counted, step))
    return step.terms.mark_mean(result * weight)


def _of_all(counted: tf.Tensor, step: Step) -> tf.Tensor:
    """Return the sum over replicas by which to divide a local sum, for a mean to be weighed."""
    return step.sum_over_replicas(tf.stop_gradient(counted)) * tf.cast(step.share, counted.dtype)


def _are_chosen(values: tf.Tensor, step: Step) -> bool:
    """Return whether the values of a loss of one's own are not one for each row, but a choice."""
    # No communication in a branch or loop: perhaps not all replicas enter it.
    if tf.compat.v1.get_default_graph() is not step.graph or tf.executing_eagerly():
        return False
    if keras_models.is_all_keras(step.model):
        return False
    return row_dependence.are_chosen(values, step.graph)


def _differentiate(
    gradient: keras_steps.Gradient,
    values: keras_steps.Values,
    target: Tree,
    sources: Tree,
    output_gradients: Tree,
) -> Tree:
    """Compute `tf.GradientTape.gradient`, with factors for terms that are not means."""
    del values
    step = current()
    if step is None or step.weighs_loss or not _are_weights(sources, step):
        return gradient(target, sources, output_gradients)
    if output_gradients is not None:
        return _multiplied(gradient(target, sources, output_gradients), step.times)
    targets, seeds, changed = [], [], False
    for value in map(tf.convert_to_tensor, tf.nest.flatten(target)):
        total = value if value.shape.rank == 0 else tf.reduce_sum(value)
        parts = step.terms.parts("gradient", total)
        changed = changed or parts is not None
        for factor, scalar in parts or [(1.0, total)]:
            of_tape = value if scalar is total else scalar
            targets.append(of_tape)
            seeds.append(tf.cast(factor, of_tape.dtype) * tf.ones_like(of_tape))
    if changed:
        target, output_gradients = targets, seeds
    with temporarily(step, weighed_later=True):
        return _multiplied(gradient(target, sources, output_gradients), step.times)


def _multiplied(gradients: Tree, times: tf.Variable | None) -> Tree:
    def multiplied(one: tf.Tensor | tf.IndexedSlices | None) -> tf.Tensor | tf.IndexedSlices | None:
        if one is None or one.dtype.size < 4:  # whose largest number is small
            return one
        return on_values(one, lambda values: values * tf.cast(times, values.dtype))

    return gradients if times is None else tf.nest.map_structure(multiplied, gradients)


def _are_weights(sources: Tree, step: Step) -> bool:
    trained = {id(v) for v in step.model.trainable_variables}
    trained |= {id(keras_variables.stored(v)) for v in step.model.trainable_variables}
    return any(id(source) in trained for source in tf.nest.flatten(sources))


# Metrics.


def _update_mean(
    self: keras.Metric,
    values: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
    *,
    original: Function[object],
) -> object:
    """Count a scalar in a mean or sum once for the batch, not once for every replica."""
    step = current()
    if step is None:
        return original(self, values, sample_weight)
    values = tf.convert_to_tensor(values)
    if values.shape.rank == 0:
        if not values.dtype.is_floating:
            values = tf.cast(values, self.dtype)
        values = step.terms.to_mean(f"metric {self.name!r}", values)
    elif tf.executing_eagerly() or values.shape.rank is None or values.shape[0] is None:
        return original(self, values, sample_weight)  # one number for each row
    if sample_weight is None:
        return original(self, values, step.share)
    weight = tf.convert_to_tensor(sample_weight)
    # A weight computed from the data, such as its number of rows, adds up by itself.
    if tf.executing_eagerly() or depends_on_data(weight):
        return original(self, values, sample_weight)
    return original(self, values, tf.cast(weight, step.share.dtype) * step.share)


def is_in_loop() -> bool:
    """Return whether a replica runs a step of a script's own loop."""
    in_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    return in_replica and current() is None


def _may_move(variable: keras.Variable) -> bool:
    """Return whether a variable may be a moving statistic: no weight, metric or seed."""
    is_state = not variable.trainable and variable.synchronization != "on_read"
    return is_state and keras.backend.is_float_dtype(variable.dtype)


def assign(
    variable: keras.Variable, value: tf.Tensor, *, original: Function[tf.Tensor]
) -> tf.Tensor:
    """Assign a variable, and note it where a step does so; a loop's moving statistics only."""
    step = current()
    if step is not None:
        step.assigned[id(variable)] = variable
        step.assignments += 1
        step.assigned_at[id(variable)] = step.assignments
    elif is_in_loop():
        _refuse_state_of_one(variable, tf.distribute.get_strategy())
        if _may_move(variable):
            running.assigned_in_loop[id(variable)] = variable
    return original(variable, value)


def _refuse_state_of_one(variable: keras.Variable, strategy: tf.distribute.Strategy) -> None:
    """Refuse to count in a metric that no scope has made: its result would be one replica's."""
    if strategy.num_replicas_in_sync > 1 and keras_variables.made_outside_scope(variable):
        metric, _, name = variable.path.rpartition("/")
        message = (
            f"strategy.run counts in {name!r} of metric {metric!r}, which was made outside "
            "strategy.scope(): its result would be of this replica's rows alone. Make the metric "
            "inside `with strategy.scope():`"
        )
        raise NotDistributedError(at_rank(tf_replicas.replica_index(), message))
