"""Layer-wise adaptive rate scaling (You, Gitman & Ginsburg 2017, arXiv:1708.03888)."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf
from keras import ops

from dtk.nests import Config
from dtk.optimizers.dense import dense
from dtk.optimizers.layerwise import (
    LayerwiseOptimizer,
    LearningRate,
    both_positive,
    check_below_one,
    check_positive,
    norm,
)


@keras.saving.register_keras_serializable(package="dtk")
class LARS(LayerwiseOptimizer):
    """Momentum SGD with a local rate for each variable.

        ratio = eta |w| / (|g| + beta |w|), and 1 if |w| or |g| is 0
        v = m v + rate * ratio * (g + beta w)
        w = w - v

    with eta the trust coefficient and beta the weight decay. As in SGD, the buffer v contains the
    rate; `LearningRateScaling` corrects it. `dtk.schedules.polynomial_decay` is the paper's rate.

    Biases and normalizations take plain momentum steps with the whole rate, see
    `LayerwiseOptimizer`. If these steps are too large, make eta ten times larger and the rate ten
    times smaller: no other steps change.

    Sparse gradients of embeddings are made dense: the decay and the norm involve every row.

    Args:
        learning_rate: A float, a schedule, or a function. A step has a length of about eta times
            the rate times the norm of the weights, so rates are larger than for SGD.
        momentum: m, 0.0 up to but below 1.0.
        trust_coefficient: eta, above 0.
        weight_decay: beta; None or 0.0 for none.
        exclude: Regular expressions for paths of other variables to skip.
        **kwargs: Arguments of every Keras optimizer: name, clipnorm, use_ema, ...

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> import keras
        >>> w = keras.Variable([[3.0, 4.0]])
        >>> optimizer = LARS(10.0, momentum=0.0, trust_coefficient=0.01)
        >>> optimizer.apply([keras.ops.convert_to_tensor([[0.0, 2.0]])], [w])
        >>> w.numpy().tolist()      # 10 * 0.01 * |w| / |g| = 0.25 gradients
        [[3.0, 3.5]]
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        weight_decay: float | None = None,
        exclude: Sequence[str] = (),
        **kwargs: object,
    ):
        super().__init__(learning_rate, exclude=exclude, weight_decay=weight_decay, **kwargs)
        check_below_one("momentum", momentum)
        check_positive("trust_coefficient", trust_coefficient)
        self.momentum = momentum
        self.trust_coefficient = trust_coefficient

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Make a momentum buffer for each variable."""
        if self.built:
            return
        super().build(variables)
        self._momentums = self.add_optimizer_variables(variables, "momentum")

    def update_step(
        self,
        gradient: tf.Tensor | tf.IndexedSlices,
        variable: keras.Variable,
        learning_rate: tf.Tensor,
    ) -> None:
        momentum = self._momentums[self._get_variable_index(variable)]
        rate = ops.cast(learning_rate, variable.dtype)
        gradient, decay = dense(gradient, variable), self.decay_of(variable)
        step = rate * (gradient + decay * variable)
        if self.adapts(variable):
            step *= ops.cast(self._ratio(gradient, variable, decay), variable.dtype)
        self.assign(momentum, self.momentum * momentum + step)
        self.assign_sub(variable, momentum)

    def _ratio(self, gradient: tf.Tensor, variable: keras.Variable, decay: float) -> tf.Tensor:
        slope, weights = norm(gradient), norm(variable)
        ratio = self.trust_coefficient * weights / (slope + decay * weights)
        return both_positive(weights, slope, ratio)

    def get_config(self) -> Config:
        """Return the constructor's arguments, as Keras saves them."""
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "trust_coefficient": self.trust_coefficient,
        }
