"""Optimizers that reduce their gradients over all replicas: from Keras's step to the update.

scale_loss       weigh the loss by the replica's share of the rows; in Keras's own step
apply            weigh the gradients in any other step, exchange them, then; likewise a script's
                 own apply_gradients, which calls apply
  check_finite     look for what is not finite
  clip             clip the sums: replicas' gradients, clipped, do not sum to those of a batch;
                   with accumulation, exchange the sums of a window, then clip them
    update           as Keras does, with `shard_optimizer=True` this rank's parts
save_, load_own_variables    wholes, whatever the rank holds
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from dtk import placement
from dtk.compat import keras_optimizers, tf_replicas
from dtk.errors import NotDistributedError, at_rank
from dtk.exchange.contract import BatchPart, Update, run_if
from dtk.kernels import optimizer_updates
from dtk.nests import Array, Function, Gradients, Tree
from dtk.patches import temporarily
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.gradients.gradient_exchange import GradientExchange
from dtk.trainer.gradients.sharded_optimizer import ShardedOptimizer
from dtk.trainer.gradients.shared_optimizer import SharedOptimizer, Variables
from dtk.trainer.replica import step_metrics, whole_batch
from dtk.trainer.strategy import Strategy
from dtk.trainer.tracing import own_loops, traced_step


class ReducingOptimizer(SharedOptimizer):
    """An optimizer whose gradients all replicas exchange, once.

    Of optimizers inside each other, which have one exchange, the outermost does so.
    """

    _dtk_exchange: GradientExchange

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Weigh the loss, then scale it."""
        outermost = self._dtk_exchange.outer is self
        return super().scale_loss(shared_optimizer.weighed_in_scale(loss) if outermost else loss)

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Gradients, trainable_variables: Variables | None = None) -> Tree:
        """Exchange gradients, then apply them; a step that only notes them does neither."""
        exchange = self._dtk_exchange
        if tf_replicas.running.applying is exchange:
            return super().apply(grads, trainable_variables)
        if exchange.outer is self:
            return self._dtk_exchanged("apply", super().apply, grads, trainable_variables)
        if _in_replica(exchange.strategy):
            _refuse_inner(self, exchange)
        return super().apply(grads, trainable_variables)

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Iterable[Tree]) -> Tree:
        """Exchange gradients for an `apply_gradients` of the script's, which gets the sums."""
        of_keras = not keras_optimizers.has_own(self, "apply_gradients")
        if of_keras or self._dtk_exchange.outer is not self:
            return super().apply_gradients(grads_and_vars)
        own = super().apply_gradients

        def update(grads: Gradients, variables: Variables) -> None:
            own(list(zip(grads, variables, strict=True)))

        grads, variables = zip(*grads_and_vars, strict=True)
        self._dtk_exchanged("apply_gradients", update, grads, variables)
        return self.iterations

    def _dtk_exchanged(
        self,
        method: str,
        update: Function[Tree],
        grads: Gradients,
        trainable_variables: Variables | None,
    ) -> Tree:
        """Give an update the gradients of all replicas; note those of a step that is to be."""
        exchange = self._dtk_exchange
        strategy = exchange.strategy
        alone = strategy.num_replicas_in_sync == 1 and strategy.world.size == 1
        device = placement.host() if alone else placement.computing(strategy)
        with (
            optimizer_updates.patch_row_sums(device),
            step_metrics.averaged_in_loop(exchange.statistics),
            temporarily(tf_replicas.running, applying=exchange),
        ):
            if not self.built and trainable_variables is not None:
                shared_optimizer.build_outside_step(self, trainable_variables, strategy)
            grads, variables = list(grads), list(trainable_variables or exchange.variables)
            step = traced_step.current()
            if step is not None:
                grads = step.handed_over(grads)
                step.reductions += 1
                if step.noted is not None:  # applied behind a cluster of XLA, or never, in a trial
                    step.noted.note(traced_step.Applied(self, grads, variables, method))
                    return None
            if not _in_replica(strategy):
                return update(grads, trainable_variables)
            if not alone:
                tf_replicas.refuse_under_xla()
                if step is None:
                    own_loops.warn_of_applied(grads, strategy)
            part = _part_of(step)
            sums, applied = _sum_over_replicas(exchange, grads, variables, part)
            if exchange.sharded is not None:
                parts = exchange.sharded.parts_of(variables)
                update = functools.partial(update, sums, parts)
                result = exchange.sharded.updated(update, in_step=True)
            else:
                update = functools.partial(update, sums, trainable_variables)
                result = update() if applied is None else run_if(applied, update)
            exchange.count(part)
            return result

    def check_finite(self, grads: Gradients) -> tf.Tensor:
        """Check scaled gradients; on all replicas, where they are not exchanged yet."""
        finite, exchange = super().check_finite(grads), self._dtk_exchange
        if not exchange.exchanges_windows or exchange.inner is self:
            return finite
        return whole_batch.sum_over_replicas(tf.cast(tf.logical_not(finite), tf.int32)) == 0

    def _dtk_clip(self, gradients: Gradients, variables: Variables) -> Gradients:
        """Exchange the gradients of a window; then, as `SharedOptimizer`, clip."""
        exchange = self._dtk_exchange
        if exchange.inner is self and exchange.exchanges_windows and _in_replica(exchange.strategy):
            # The sums of earlier steps of the window count even if this step has no rows.
            with tf_replicas.counted_if(None):
                part = _part_of(traced_step.current())
                gradients, _ = exchange.update(list(gradients), variables, part)
        return super()._dtk_clip(gradients, variables)

    def build(self, variables: Variables) -> None:
        """Make the optimizer's variables: with `shard_optimizer=True`, for parts of variables."""
        exchange = self._dtk_exchange
        if exchange.outer is not self:
            super().build(variables)
        elif exchange.sharded is None:
            super().build(variables)
            take_over(self, exchange.strategy)  # what a MultiOptimizer has made meanwhile
        else:
            with keras_optimizers.marking_slots():
                super().build(exchange.sharded.divided(variables))
            take_over(self, exchange.strategy)
            exchange.sharded.built()

    def finalize_variable_values(self, var_list: Variables) -> None:
        """Set the last values of variables, such as their averages."""
        exchange, finalize = self._dtk_exchange, super().finalize_variable_values
        if exchange.sharded is None or exchange.outer is not self:
            finalize(var_list)
        else:
            parts = exchange.sharded.parts_of(var_list)
            exchange.sharded.updated(functools.partial(finalize, parts))

    def save_own_variables(self, store: dict[str, Array]) -> None:
        """Save whole variables."""
        sharded = self._dtk_exchange.sharded
        if sharded is None:
            super().save_own_variables(store)
        else:
            sharded.save(self, store)

    def load_own_variables(self, store: dict[str, Array]) -> None:
        """Load whole variables, and whole windows."""
        self._dtk_exchange.divided = False
        sharded = self._dtk_exchange.sharded
        if sharded is None:
            super().load_own_variables(store)
        else:
            sharded.load(self, store, super().load_own_variables)


def take_over(optimizer: keras.Optimizer, strategy: Strategy) -> None:
    """Make a `ReducingOptimizer` of an optimizer, and of those inside it."""
    shared_optimizer.check(optimizer, strategy)
    exchange = shared_optimizer.exchange_of(optimizer)
    if exchange is None or exchange.outer is not optimizer:
        sharded = ShardedOptimizer(optimizer, strategy) if strategy.shard_optimizer else None
        exchange = GradientExchange(optimizer, strategy, sharded)
    for member in keras_optimizers.members(optimizer):
        shared_optimizer.set_exchange(member, exchange)
        keras_optimizers.index_variables(member)
    shared_optimizer.take_over(optimizer, strategy, ReducingOptimizer)


def _refuse_inner(optimizer: keras.Optimizer, exchange: GradientExchange) -> None:
    outer = exchange.outer
    message = (
        f"optimizer {optimizer.name!r} was applied by itself, and it is inside "
        f"{outer.name!r} ({type(outer).__name__}), which sums the gradients of all ranks: nothing "
        f"would sum these. Apply the outer one, as model.optimizer; with loss scaling, also scale "
        "the loss by its scale_loss"
    )
    raise NotDistributedError(at_rank(exchange.strategy.rank, message))


def _sum_over_replicas(
    exchange: GradientExchange, grads: Gradients, variables: Variables, part: BatchPart | None
) -> Update:
    replaced = _replacements(grads, variables, exchange.strategy)
    sent = [None if i in replaced else g for i, g in enumerate(grads)]
    if exchange.exchanges_windows:  # `clip` exchanges them later
        exchange.divided = True
        sums, applied = tf_replicas.if_present(sent), None
    else:
        sums, applied = exchange.update(sent, variables, part)
    return [replaced.get(i, g) for i, g in enumerate(sums)], applied


def _part_of(step: traced_step.Step | None) -> BatchPart | None:
    return None if step is None else BatchPart(step.rows, step.share)


def _in_replica(strategy: Strategy) -> bool:
    replica = tf.distribute.get_replica_context()
    return replica is not None and replica.strategy is strategy


def _replacements(
    grads: Gradients, variables: Sequence[keras.Variable], strategy: Strategy
) -> dict[int, tf.Tensor]:
    """Compute the values that replace variables: the largest "gradients" over the replicas.

    Each replica has seen its own rows only. Keras, too, takes the largest over the steps of an
    accumulation window.
    """
    mine = {
        i: g
        for i, (g, v) in enumerate(zip(grads, variables, strict=True))
        if g is not None and keras_optimizers.is_replaced(v)
    }
    # Replicas with local steps send nothing here and average their weights later.
    if not mine or (strategy.exchange is not None and strategy.exchange.local):
        return mine
    values = tf_replicas.if_present(list(mine.values()))
    largest = strategy.extended.reduce_over_replicas(values, "max")
    return dict(zip(mine, largest, strict=True))
