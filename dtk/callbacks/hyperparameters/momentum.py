"""The momentum of an optimizer, settable during training."""

from __future__ import annotations

import keras
import tensorflow as tf

from dtk.callbacks.hyperparameters.rate import momentum_buffers

# The attribute of an optimizer that holds its `Momentum`.
_MARK = "_dtk_momentum"


class Momentum:
    """Momentum of a `keras.optimizers.SGD`, which may change from step to step.

    Keras keeps the momentum as a float, which becomes a constant of a traced step. While the
    optimizer updates a weight, a variable replaces the float, so a new value costs one assignment
    and no new trace. `optimizer.momentum`, and the value saved with a model, stay the script's.
    After training the optimizer keeps the last value.
    """

    retrace = True

    def __init__(self, optimizer: keras.Optimizer):
        self._optimizer = optimizer
        self._variable = tf.Variable(
            optimizer.momentum, trainable=False, dtype=tf.float32, name="momentum"
        )
        self._value = float(optimizer.momentum)
        self._put_into(optimizer)

    def _put_into(self, optimizer: keras.Optimizer) -> None:
        update, given, held = optimizer.update_step, optimizer.momentum, _Held(self._variable)

        @tf.autograph.experimental.do_not_convert
        def update_step(
            gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
        ) -> None:
            optimizer.momentum = held
            try:
                update(gradient, variable, learning_rate)
            finally:
                optimizer.momentum = given

        optimizer.update_step = update_step

    @property
    def value(self) -> float:
        """Momentum of the next step."""
        return self._value

    def set(self, value: float) -> None:
        """Set the momentum of the following steps."""
        if value != self._value:
            self._variable.assign(value)
            self._value = value

    def carry_over(self, factor: float) -> None:
        """Multiply the momentum buffers."""
        if factor != 1.0:
            for buffer in momentum_buffers(self._optimizer):
                buffer.assign(buffer.value * factor)


class _Held:
    """Momentum as Keras's SGD uses it: never equal to 0, and converted to a tensor."""

    def __init__(self, variable: tf.Variable):
        self._variable = variable

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return id(self)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._variable, dtype, name=name)


def innermost(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Return the optimizer inside wrappers, such as `LossScaleOptimizer`."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def momentum_of(optimizer: keras.Optimizer, who: str) -> Momentum:
    """Return an optimizer's momentum; the same object each time."""
    inner = innermost(optimizer)
    if not isinstance(inner, keras.optimizers.SGD):
        raise ValueError(
            f"{who} sets the momentum of keras.optimizers.SGD, and the optimizer is a "
            f"{type(inner).__name__}; use SGD(rate, momentum=0.9), or leave the callback out"
        )
    if not inner.momentum:
        raise ValueError(
            f"{who} sets the momentum, and the optimizer was made without: its buffers are made "
            "when it is built; give SGD any momentum above 0, such as momentum=0.9"
        )
    if not hasattr(inner, _MARK):
        setattr(inner, _MARK, Momentum(inner))
    return getattr(inner, _MARK)


def carried_over(before: float, after: float, nesterov: bool = False) -> float:
    """Return the factor of momentum buffers when the momentum changes.

    The factor keeps the total weight of each gradient: (1 - mu) (1 + mu + mu^2 + ...) = 1 (unit
    gain). When mu changes, a buffer will still add mu^p / (1 - mu) times its content to the
    weights, with p = 1, or p = 2 for Nesterov's momentum, which is a step ahead.

    Example:
        >>> round(carried_over(0.9, 0.81), 4)     # twice the batch
        2.1111
        >>> round(2.1111 * 0.81 / (1 - 0.81), 3), round(0.9 / (1 - 0.9), 3)
        (9.0, 9.0)
    """
    if before == after or after < _NONE:
        return 1.0
    return (before / after) ** (2 if nesterov else 1) * (1.0 - after) / (1.0 - before)


# The momentum of a step of 27 time constants. The square of a smaller one does not fit in float32.
_NONE = 1e-12
