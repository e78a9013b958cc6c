"""RMSprop that blends into momentum SGD (Akiba, Suzuki & Fukuda 2017, arXiv:1711.04325)."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf
from keras import ops

from dtk.nests import Config
from dtk.optimizers.layerwise import LearningRate, check_ranges, check_rate, dense


def sgd_share(epoch: tf.Tensor, center: float = 10.0, period: float = 5.0) -> tf.Tensor:
    """Return SGD's share of a step, a_s: first exponential, then linear, with a smooth transition.

        a_s = exp(2 (e - center) / period) / 2      for e < center
        a_s = 1/2 + (e - center) / period           until it is 1, half a period later

    The line continues with the slope of the exponential. Published ports of the recipe double the
    slope, and so skip half of the line.

    Example:
        >>> [round(float(sgd_share(epoch)), 4) for epoch in (0.0, 5.0, 10.0, 11.0, 12.5, 90.0)]
        [0.0092, 0.0677, 0.5, 0.7, 1.0, 1.0]
    """
    beyond = (ops.convert_to_tensor(epoch) - center) / period
    below = 0.5 * ops.exp(2.0 * ops.minimum(beyond, 0.0))
    return ops.where(beyond < 0.0, below, ops.minimum(0.5 + beyond, 1.0))


@keras.saving.register_keras_serializable(package="dtk")
class RMSpropWarmup(keras.optimizers.Optimizer):
    """Optimizer that moves from RMSprop to momentum SGD: the warm-up for batches of 32k.

        m = rho m + (1 - rho) g^2
        D = momentum D - (a_s + a_r / (sqrt(m) + epsilon)) g
        w = w + rate * D

    with `a_s = sgd_share(epoch)` and `a_r = (1 - a_s) * rmsprop_rate / rate`, so that the RMSprop
    part has its own rate. The epoch is fractional and follows from the optimizer's count of steps,
    so a resumed job goes on where it was. `dtk.schedules.slow_start` has the recipe's rates; do not
    warm up the rate as well, because a_r grows if the rate shrinks. At a rate of 0 there is no
    RMSprop part.

    Weight decay is Keras's, decoupled. Sparse gradients of embeddings are made dense: m and D decay
    in every row.

    Args:
        learning_rate: The rate of the SGD part: a float, a schedule, or a function.
        steps_per_epoch: Batches in an epoch, as `fit` counts them.
        center: Epoch at which half of a step is SGD's.
        period: Length in epochs; `period / 2` after `center`, the whole step is SGD's.
        rmsprop_rate: The rate of the RMSprop part.
        momentum: Decay of D.
        rho: Decay of m.
        epsilon: Keeps the division finite, above 0.
        **kwargs: Arguments of every Keras optimizer: name, weight_decay, clipnorm, use_ema, ...

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> import keras
        >>> w = keras.Variable([1.0])
        >>> optimizer = RMSpropWarmup(0.1, steps_per_epoch=100)
        >>> optimizer.apply([keras.ops.convert_to_tensor([2.0])], [w])
        >>> round(float(w[0]), 4)      # 1 - 0.1 a_s g - 3e-4 (1 - a_s) g / sqrt(0.01 g^2)
        0.9952
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        steps_per_epoch: int,
        center: float = 10.0,
        period: float = 5.0,
        rmsprop_rate: float = 3e-4,
        momentum: float = 0.9,
        rho: float = 0.99,
        epsilon: float = 1e-8,
        **kwargs: object,
    ):
        check_rate(learning_rate)
        super().__init__(learning_rate=learning_rate, **kwargs)
        positive = {"steps_per_epoch": steps_per_epoch, "period": period}
        positive |= {"rmsprop_rate": rmsprop_rate, "epsilon": epsilon}
        check_ranges({"momentum": momentum, "rho": rho}, positive)
        self.steps_per_epoch = steps_per_epoch
        self.center = center
        self.period = period
        self.rmsprop_rate = rmsprop_rate
        self.momentum = momentum
        self.rho = rho
        self.epsilon = epsilon

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Make m and D for each variable."""
        if self.built:
            return
        super().build(variables)
        self._velocities, self._steps = self.add_optimizer_variables(
            variables, ["velocity", "step"]
        )

    @property
    def epoch(self) -> tf.Tensor:
        """Epochs so far, fractional; with gradient accumulation every batch counts."""
        taken = self.iterations * (self.gradient_accumulation_steps or 1)
        return ops.cast(taken, "float32") / self.steps_per_epoch

    def update_step(
        self,
        gradient: tf.Tensor | tf.IndexedSlices,
        variable: keras.Variable,
        learning_rate: tf.Tensor,
    ) -> None:
        index = self._get_variable_index(variable)
        velocity, step = self._velocities[index], self._steps[index]
        gradient = dense(gradient, variable)
        rate = ops.cast(learning_rate, variable.dtype)
        sgd = ops.cast(sgd_share(self.epoch, self.center, self.period), variable.dtype)
        rmsprop = ops.divide_no_nan((1.0 - sgd) * self.rmsprop_rate, rate)
        self.assign(velocity, self.rho * velocity + (1.0 - self.rho) * ops.square(gradient))
        share = sgd + rmsprop / (ops.sqrt(velocity) + self.epsilon)
        self.assign(step, self.momentum * step - share * gradient)
        self.assign_add(variable, rate * step)

    def get_config(self) -> Config:
        """Return the constructor's arguments, as Keras saves them."""
        names = ("center", "period", "rmsprop_rate", "momentum", "rho", "epsilon")
        own = {name: getattr(self, name) for name in ("steps_per_epoch", *names)}
        return {**super().get_config(), **own}
