"""How an optimizer's gradients go through the strategy's exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from dtk.compat import keras_optimizers, keras_variables, tf_replicas
from dtk.errors import at_rank
from dtk.exchange import Auto, Dense
from dtk.exchange.base import Exchange, Exchanger, Portion, Trained
from dtk.exchange.factors import Factored, factored
from dtk.exchange.state import ExchangeState
from dtk.trainer.contract import Strategy
from dtk.trainer.tracing import traced_step


class GradientExchange:
    """One optimizer's exchangers, one for each list of variables it is applied to.

    Args:
        outer: The optimizer.
        inner: The same, or the one it wraps.
        strategy: An `AllReduceStrategy`.

    Attributes:
        state: What the exchangers remember.
        chooses: Whether the exchange is one that is chosen, see `exchange_selection`.
        seen: Shapes and dtypes of the last traced step's gradients that are summed whole.
        factored: Those of gradients that may go as their factors.
    """

    def __init__(self, outer: keras.Optimizer, inner: keras.Optimizer, strategy: Strategy):
        self._outer = outer
        self._inner = inner
        self._strategy = strategy
        self._exchange = strategy.exchange or Dense()
        self._exchangers: dict[tuple, Exchanger] = {}
        self.chooses = isinstance(self._exchange, Auto)
        self.seen: list[tf.TensorSpec] = []
        self.factored: list[tf.TensorSpec] = []
        self.state = ExchangeState(strategy.communicator, strategy.extended.worker_devices[0])

    @property
    def exchange(self) -> Exchange:
        """The exchange in use."""
        return self._exchange

    @property
    def window(self) -> int:
        """Number of steps for which gradients are exchanged once."""
        return self._inner.gradient_accumulation_steps or 1

    def use(self, exchange: Exchange) -> None:
        """Use another exchange from the next step on, which must be traced anew.

        Args:
            exchange: The exchange.
        """
        self._exchange = exchange
        self._exchangers.clear()

    @property
    def local(self) -> bool:
        """Whether replicas also take steps of their own."""
        return self._exchange.local

    @property
    def is_traced(self) -> bool:
        """Whether a step has been traced."""
        return bool(self._exchangers)

    def of(self, variables: Sequence | None) -> Exchanger:
        """Return the exchanger of the gradients of some variables.

        Args:
            variables: Keras variables; None is all that the optimizer trains.
        """
        trained = list(variables or keras_optimizers.trained_variables(self._inner))
        key = tuple(id(v) for v in trained)
        if key not in self._exchangers:
            self._exchangers[key] = self._make(trained)
        return self._exchangers[key]

    def _make(self, trained: list) -> Exchanger:
        strategy = self._strategy
        if self.local and not self._exchangers:
            for i, slot in enumerate(slots_of(self._outer)):
                self.state.keep(f"slot_{i}", "mean", keras_variables.stored(slot))
        # Other variables, such as those that are not frozen any more, have gradients of their own.
        places = {id(v): i for i, v in enumerate(keras_optimizers.trained_variables(self._inner))}
        key = str([places.get(id(v)) for v in trained])
        state = self.state.part(f"{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}/")
        return self._exchange.exchanger(
            strategy.communicator,
            state,
            Trained(
                [keras_variables.stored(v) for v in trained],
                [keras_variables.stored(v) for v in momenta_of(self._inner)],
            ),
        )

    def apply(self, gradients: list, variables: Sequence | None, go: Callable[[list], Any]) -> Any:
        """Reduce gradients, and call a function with those that are to be applied.

        Args:
            gradients: This replica's; None where there is none.
            variables: The Keras variables they are for; None is all.
            go: Applies gradients, given in the same order.

        Returns:
            What `go` returns.
        """
        exchanger = self.of(variables)
        scale = self._scale()

        def go_with(reduced: list) -> Any:
            return go(_put_back([_each(tf.multiply, g, scale) for g in reduced], gradients))

        present = shaped(gradients, variables or keras_optimizers.trained_variables(self._inner))
        if exchanger.factors:
            present = [factored(g) for g in present]
        present = [g for g in present if g is not None]
        self._see(present)
        present = tf_replicas.if_present(present)
        # Not multiplied by 1 / scale, which may be too small a number.
        present = [_each(tf.divide, g, scale) for g in present]
        result = exchanger.apply(present, go_with, portion())
        exchanger.count(portion())
        return result

    def reduce_window(self, gradients: list, variables: list) -> list:
        """Sum the gradients of an accumulation window over the replicas.

        Args:
            gradients: This replica's; None where there is none.
            variables: The Keras variables they are for.

        Returns:
            The sums, in the same order.
        """
        present = [g for g in shaped(gradients, variables) if g is not None]
        self._see(present)
        return _put_back(self.of(variables).reduce(present, portion()), gradients)

    def _see(self, gradients: list) -> None:
        self.seen, self.factored = [], []
        for g in gradients:
            if not isinstance(g, tf.IndexedSlices) and g.shape.is_fully_defined():
                alike = self.factored if isinstance(g, Factored) else self.seen
                alike.append(tf.TensorSpec(g.shape, g.dtype))

    def count(self, variables: list) -> None:
        """Count a step in an accumulation window.

        Args:
            variables: The Keras variables that the step has gradients of.
        """
        self.of(variables).count(portion())

    def _scale(self) -> tf.Tensor | None:
        """Return the loss scale, which changes; what is remembered of gradients does not.

        Returns:
            Scalar to divide gradients by before they are exchanged; None where nothing is
            remembered.
        """
        scale = getattr(self._outer, "dynamic_scale", None)
        if scale is None or not self._exchange.remembers:
            return None
        return tf.convert_to_tensor(scale)

    def close(self) -> None:
        """Make all ranks hold the same weights."""
        for exchanger in self._exchangers.values():
            exchanger.close()

    def together(self) -> list[tf.Tensor]:
        """Return for each exchanger of local steps whether all ranks hold the same weights now.

        Returns:
            bool scalars.
        """
        flags = [exchanger.together() for exchanger in self._exchangers.values()]
        return [flag for flag in flags if flag is not None]

    def share(self) -> tf.Tensor | None:
        """Return the weight of this rank in a mean over all ranks, see `Exchanger.share`.

        Returns:
            float32 scalar; None without local steps.
        """
        shares = [exchanger.share() for exchanger in self._exchangers.values()]
        return next((share for share in shares if share is not None), None)


def make_gradient_exchange(
    outer: keras.Optimizer, inner: keras.Optimizer, strategy: Strategy
) -> GradientExchange | None:
    """Make what exchanges an optimizer's gradients.

    Args:
        outer: The optimizer.
        inner: The same, or the one it wraps.
        strategy: The model's strategy.

    Returns:
        The exchange; None where one process holds all replicas and the strategy adds them up.
    """
    return None if strategy.communicator.size == 1 else GradientExchange(outer, inner, strategy)


def check_exchange(optimizer: keras.Optimizer, strategy: Strategy) -> None:
    """Check that an optimizer and the strategy's exchange can work together.

    Args:
        optimizer: The optimizer.
        strategy: The model's strategy.

    Raises:
        ValueError: They cannot.
    """
    exchange = strategy.exchange or Dense()
    if not exchange.local or strategy.communicator.size == 1:
        return
    if optimizer.gradient_accumulation_steps:
        raise ValueError(
            at_rank(
                strategy.rank,
                f"gradient_accumulation_steps with exchange={exchange}: a block is a window of "
                "steps that send nothing already; leave one of the two out",
            )
        )
    if optimizer.use_ema:
        raise ValueError(
            at_rank(
                strategy.rank,
                f"use_ema=True averages the weights of every step, and with exchange={exchange} "
                "each worker has weights of its own between blocks; leave one of the two out",
            )
        )


def slots_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return an optimizer's floating-point state beside its learning rate.

    Args:
        optimizer: The optimizer.
    """
    return [
        v
        for v in optimizer.variables
        if keras.backend.is_float_dtype(v.dtype) and not v.path.endswith("learning_rate")
    ]


def momenta_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return those of an optimizer's variables that average gradients.

    Args:
        optimizer: The optimizer.
    """
    return [v for v in optimizer.variables if v.path.endswith("_momentum")]


def shaped(gradients: list, variables: Sequence) -> list:
    """Give gradients the static shapes of their variables.

    Without them each gradient is sent by itself. Where a batch may be of any size, those of a Dense
    layer on sequences have none.

    Args:
        gradients: Tensors or `tf.IndexedSlices`; None stays None.
        variables: Keras variables in the same order.

    Returns:
        The gradients, in the same order.
    """
    return [
        g if g is None or isinstance(g, tf.IndexedSlices) else tf.ensure_shape(g, v.shape)
        for g, v in zip(gradients, variables, strict=True)
    ]


def portion() -> Portion | None:
    """Return this replica's part of the batch of the step being traced.

    Returns:
        The part; None outside dtk's steps.
    """
    step = traced_step.current()
    return None if step is None else Portion(step.rows, step.share)


def _each(
    operation: Callable, gradient: tf.Tensor | tf.IndexedSlices | Factored, scale: tf.Tensor | None
) -> Any:
    if scale is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = _each(operation, gradient.values, scale)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return operation(gradient, tf.cast(scale, gradient.dtype))


def _put_back(present: list, gradients: list) -> list:
    """Put values in the places of gradients; None stays None."""
    remaining = iter(present)
    return [None if g is None else next(remaining) for g in gradients]
